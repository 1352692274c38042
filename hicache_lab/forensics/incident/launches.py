"""One launch seen with everything around it: what rules look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from hicache_lab.base.units import GB, format_gb
from hicache_lab.forensics.incident.facts import Amount, Evidence, Facts
from hicache_lab.forensics.incident.kills import ZONE_SHIFTS, is_at_the_end_of, is_during, server_like
from hicache_lab.forensics.incident.memory import MemoryReading, lowest
from hicache_lab.forensics.incident.question import (
    LaunchFacts,
    LaunchQuestion,
    RefusedPool,
    ask_launch,
    releases_in_question,
)
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.run import Run
from hicache_lab.sglang.releases import ReleaseRules, rules_for
from hicache_lab.sizing.guard import (
    RESERVE_TEXT,
    Budget,
    FreeAmount,
    HostView,
    beyond_reserve_bytes,
    rank_budget,
    read_free_amount,
)
from hicache_lab.sizing.rank import DeviceFacts

KV = frozenset({"kv", "full"})
"""Pools that ``--hicache-size`` counts in every release."""

NOTICEABLE = GB
"""Below this, pools of a toy model or a rounding difference say nothing."""


@dataclass(frozen=True)
class RunFacts:
    """One launch seen with everything around it."""

    run: Run
    facts: Facts

    @cached_property
    def rules(self) -> tuple[ReleaseRules, ...]:
        """Rules of the examined releases that could have printed this run, the oldest first; () if no wording tells."""
        return tuple(map(rules_for, releases_in_question(self.facts.stated.release, self.run.releases)))

    @property
    def release(self) -> str:
        """The release or the releases, in words."""
        if self.facts.stated.release is not None:
            return self.facts.stated.release
        return str(self.run.releases) if self.run.releases else "an unknown release"

    def rule(self, name: str) -> object | None:
        """The value of a rule if all releases in question agree, else None."""
        values = {getattr(rules, name) for rules in self.rules}
        return values.pop() if len(values) == 1 else None

    def budget(self, available_bytes: int) -> Budget | None:
        """What one rank's check allows with so much available, if all releases in question agree on the arithmetic."""
        view = HostView(available_bytes, ranks_per_host=self.ranks_per_engine or 1)
        budgets = {budget.divides: budget for rules in self.rules if (budget := rank_budget(rules, view))}
        return next(iter(budgets.values())) if len(budgets) == 1 else None

    def free_amount(self, refusal: ev.HostRefusal) -> FreeAmount:
        """What the free amount of a refusal is, in the releases that could have printed it."""
        return read_free_amount(
            self.rules,
            ranks=self.ranks_per_engine,
            requested_bytes=refusal.requested_bytes,
            free_bytes=refusal.free_bytes,
            named=self.release,
        )

    @property
    def ranks_per_engine(self) -> int | None:
        """Ranks of one engine on this host, among which a later check divides; data-parallel replicas are others."""
        launch = self.run.launch
        return launch.ranks_per_host if launch is not None and launch.tp_size else self.run.ranks

    @property
    def size_gb(self) -> float | None:
        """``--hicache-size`` in GB per rank: from the arguments, or from equal whole-GB pools of several ranks."""
        if (launch := self.run.launch) is not None:
            return float(launch.hicache_size) if launch.hicache_size and launch.hicache_size > 0 else None
        sizes = {pool.bytes for pool in self.run.host_pools if pool.pool in ("kv", "full")}
        ranks = len(self.run.host_bytes_by_rank())
        if ranks > 1 and len(sizes) == 1 and (only := sizes.pop()) and only % GB == 0:
            return only / GB
        return None

    @property
    def size_evidence(self) -> tuple[Evidence, ...]:
        """Where the size stands."""
        return tuple(
            Evidence(e.where.file, e.where.line, _argument_excerpt(e.text)) for e in self.run.of(ev.ServerArgs)
        )[:1]

    @property
    def pool_evidence(self) -> tuple[Evidence, ...]:
        """The host-pool lines."""
        return tuple(Evidence.of(pool) for pool in self.run.host_pools[:16])

    @cached_property
    def available(self) -> Amount | None:
        """Memory available when the host pools were asked for, from the best source there is."""
        facts = self.facts
        if facts.stated.available_bytes is not None:
            return Amount(facts.stated.available_bytes, facts.stated.by)
        first = min((pool.at for pool in self.run.host_pools if pool.at is not None), default=None)
        if (sample := self._sample_before(first)) is not None and sample.left_bytes is not None:
            return Amount(sample.left_bytes, "memory samples", (Evidence.of(sample),))
        for sizing in self.run.of(ev.HostSizing):
            if sizing.host_bytes is not None:
                return Amount(sizing.host_bytes, "printed by the server", (Evidence.of(sizing),))
        # on a CPU the "device" memory is the host's
        for capacity in self.run.of(ev.Capacity):
            if capacity.available_cpu_bytes is not None:
                return Amount(capacity.available_cpu_bytes, "printed by the server", (Evidence.of(capacity),))
        return None

    def _sample_before(self, moment: datetime | None) -> MemoryReading | None:
        timed = [s for s in self.facts.memory if s.at is not None and s.left_bytes is not None]
        if moment is None or not timed:
            return None
        before = [s for s in timed if s.at is not None and moment - timedelta(minutes=10) <= s.at <= moment]
        return before[-1] if before else None

    @property
    def deaths(self) -> list[ev.ProcessDeath]:
        """Processes that SIGKILL ended, by their numeric exit code."""
        return [death for death in self.run.of(ev.ProcessDeath) if death.killed]

    @property
    def kills(self) -> list[ev.KernelOom]:
        """Kernel kills that belong to this run: during it or within ten minutes after, or of unknown time.

        A control group's kill of a foreign process says nothing about this server and is left out. Where no kill fits
        any run by the clock, ``kill_shift`` is tried.
        """
        return self._kills[0]

    @property
    def kill_shift(self) -> timedelta:
        """What the kernel log's clock must be moved by to fit the server's: whole half hours, or nothing."""
        return self._kills[1]

    @cached_property
    def _kills(self) -> tuple[list[ev.KernelOom], timedelta]:
        ours = [kill for kill in self.facts.kills if server_like(kill.comm) or not kill.cgroup]
        timed = [kill for kill in ours if kill.at is not None]
        found = [kill for kill in timed if is_during(kill, self.run)]
        # without times only one run can be meant
        if self.run is _ended_badly(self.facts):
            found += [kill for kill in ours if kill.at is None]
        if found or any(is_during(kill, run) for kill in timed for run in self.facts.log.runs):
            return found, timedelta()
        likely = [kill for kill in timed if server_like(kill.comm)]
        shifts = [shift for shift in ZONE_SHIFTS if any(is_at_the_end_of(kill, self.run, shift) for kill in likely)]
        if not shifts:
            return [], timedelta()
        return [kill for kill in likely if is_during(kill, self.run, shifts[0])], shifts[0]

    @property
    def distant_kills(self) -> list[ev.KernelOom]:
        """Kills of a process like this server's that no clock puts into any run, within a day of this one."""
        runs = list(run_facts(self.facts))
        if self.run is not self.facts.log.runs[-1] or any(seen.kills for seen in runs):
            return []
        first, last, day = self.run.first, self.run.last, timedelta(days=1)
        if first is None or last is None:
            return []
        return [
            kill
            for kill in self.facts.kills
            if kill.at is not None and server_like(kill.comm) and first - day <= kill.at <= last + day
        ]

    @property
    def was_killed(self) -> bool:
        """Whether the kernel's line or a numeric exit code shows a kill. The hint in SGLang's text never does."""
        return bool(self.deaths or self.kills)

    @property
    def exhausted(self) -> MemoryReading | None:
        """A sample after the pools began that shows less left than the reserve."""
        first = min((pool.at for pool in self.run.host_pools if pool.at is not None), default=None)
        sample = lowest(
            (s for s in self.facts.memory if s.at is None or first is None or s.at >= first), lambda s: s.left_bytes
        )
        return sample if sample is not None and beyond_reserve_bytes(sample.left_bytes or 0) < 0 else None

    @property
    def limit(self) -> Amount | None:
        """What physically bounds the pools: the smaller of the host's RAM and the container's limit."""
        both = [a for a in (self.facts.total, self.facts.container_limit) if a is not None]
        return min(both, key=lambda amount: amount.bytes, default=None)

    @cached_property
    def room(self) -> Amount | None:
        """What all host pools together could take: the limit of the question, so every fact that lowers it counts.

        A refusal's free amount alone does not tell it: other ranks held memory by then.
        """
        room = self.question.limit_bytes
        if room is None or (self.available is None and self.refusals):
            return self.limit
        known = [amount for amount in (self.available, self.limit) if amount is not None]
        if not known:
            return None
        least = min(known, key=lambda amount: amount.bytes)
        if least.bytes == room:
            return least
        evidence = tuple(dict.fromkeys(one for amount in known for one in amount.evidence))
        return Amount(
            max(room, 0), f"{least.source}: {format_gb(least.bytes)}, less {self._what_lowers_it()}", evidence
        )

    @property
    def taken_bytes(self) -> int:
        """What the host pools really take: as the log shows them, or more where the question's answer says so."""
        answer = self.question.answer
        return max(self.run.projected_host_bytes, answer.resident_bytes if answer is not None else 0)

    def _what_lowers_it(self) -> str:
        """The facts that leave the pools less than was available, in words."""
        question, stated, lowered = self.question.question, self.facts.stated, []
        if question.overhead_bytes if question is not None else stated.overhead_bytes:
            lowered.append("the server's other memory")
        if self.facts.hugepages is not None and self.available is None:
            lowered.append("reserved huge pages")
        if stated.cgroup_usage_bytes and (question is None or question.container_binds):
            lowered.append("what the container already used")
        return " and ".join(lowered) or "what else is known of the host"

    @cached_property
    def question(self) -> LaunchQuestion:
        """What preflight is asked about this launch; every size that a rule names is its answer."""
        run, available, hugepages = self.run, self.available, self.facts.hugepages
        total, limit = self.facts.total, self.facts.container_limit
        refusal = next((r for r in self.refusals if r.requested_bytes is not None and r.free_bytes is not None), None)
        tp_only = all(label.startswith("TP") and " " not in label for label in run.ranks_seen)
        facts = LaunchFacts(
            launch=run.launch,
            releases=run.releases,
            tp_ranks=len(run.ranks_seen) or None if tp_only else None,
            size_gb=self.size_gb,
            pools_bytes=self._pools_of_a_rank,
            total_bytes=total.bytes if total else None,
            available_bytes=available.bytes if available else None,
            server_is_counted=self.facts.stated.available_bytes is None and bool(available or refusal),
            container_limit_bytes=limit.bytes if limit else None,
            hugepages_bytes=hugepages.bytes if hugepages else 0,
            refused=None if refusal is None else self._refused(refusal),
            device=self._device,
        )
        return ask_launch(facts, self.facts.stated)

    @property
    def _pools_of_a_rank(self) -> int:
        """The host pools that one rank asked for, a refused one among them: the most that a rank shows."""
        by_rank = self.run.host_bytes_by_rank()
        # a refusal is printed again by whoever handles it
        refused = {(refusal.rank.label, refusal.pool): refusal.requested_bytes or 0 for refusal in self.refusals}
        for (label, _), requested in refused.items():
            by_rank[label] = by_rank.get(label, 0) + requested
        return max(by_rank.values(), default=0)

    def _refused(self, refusal: ev.HostRefusal) -> RefusedPool:
        held = sum(pool.bytes for pool in self.run.host_pools if pool.rank == refusal.rank)
        return RefusedPool(refusal.requested_bytes or 0, refusal.free_bytes or 0, held)

    @property
    def _device(self) -> DeviceFacts:
        pools = [pool for pool in self.run.of(ev.DevicePool) if pool.final]
        return DeviceFacts(
            tokens=self.run.device_tokens,
            swa_tokens=max((pool.swa_tokens for pool in pools if pool.swa_tokens), default=None),
            mamba_slots=max((pool.states for pool in pools if pool.states), default=None),
        )

    @property
    def refusals(self) -> list[ev.HostRefusal]:
        """What the server's own check refused."""
        return list(self.run.of(ev.HostRefusal))

    @property
    def memory_evidence(self) -> tuple[Evidence, ...]:
        """Kills, deaths and the emptiest sample."""
        shown: list[ev.Event | MemoryReading] = [
            *self.kills[:8],
            *self.deaths[:8],
            *([self.exhausted] if self.exhausted is not None else []),
        ]
        return tuple(Evidence.of(one) for one in shown)

    @property
    def ending(self) -> str:
        """How it ended, as far as it is shown; a sentence to append."""
        if self.kills:
            return f" The kernel killed {len(self.kills)} process(es)."
        if self.deaths:
            return f" {len(self.deaths)} process(es) ended by SIGKILL."
        if self.exhausted is not None and self.exhausted.left_bytes is not None:
            return (
                f" Afterwards {format_gb(self.exhausted.left_bytes)} were left, less than the {RESERVE_TEXT} reserve."
            )
        return " Nothing was killed in what was given."

    @property
    def outcome(self) -> str:
        """How the launch ended, in a few words."""
        run = self.run
        if killed := len(self.kills) or len(self.deaths):
            return f"{killed} process(es) killed"
        if self.refusals:
            return "refused by the server's own check"
        if self._a_process_failed:
            return "a process failed"
        if run.milestone("shutdown") is not None:
            return "shut down as asked; nothing failed"
        if self.was_ready:
            return "ready; the log ends while it runs, and nothing failed in it"
        return "never ready; the log ends before"

    @property
    def was_ready(self) -> bool:
        """Whether the server said so, or served."""
        return self.run.milestone("ready") is not None or bool(self.run.batches.prefill or self.run.batches.decode)

    @property
    def nothing_failed(self) -> bool:
        """The server was ready and no process of it failed: what the rules find in it are risks."""
        return self.was_ready and not (self.was_killed or self.refusals or self._a_process_failed)

    @property
    def _a_process_failed(self) -> bool:
        failed = ("process_death", "defunct", "pin_failure", "gpu_oom")
        quits = any(event.name in ("sigquit", "watchdog", "nccl") for event in self.run.of(ev.Stall))
        of_a_process = any(failure.process for failure in self.run.of(ev.Failure))
        return quits or of_a_process or any(self.run.counts[kind] for kind in failed)

    @property
    def stopped_early(self) -> bool:
        """Host pools were asked for and the server neither became ready nor was told to stop."""
        run = self.run
        later = run.milestone("ready") or run.batches.decode or run.milestone("shutdown")
        return bool(run.host_pools) and not later

    @property
    def failed_early(self) -> bool:
        """``stopped_early``, and the log itself shows that a process ended: it was not merely cut there."""
        quits = any(event.name == "sigquit" for event in self.run.of(ev.Stall))
        return self.stopped_early and bool(quits or self.run.counts["process_death"] or self.run.counts["defunct"])


def _ended_badly(facts: Facts) -> Run | None:
    """The last launch with a process that SIGKILL ended, else the last launch."""
    runs = facts.log.runs
    killed = [run for run in runs if any(death.killed for death in run.of(ev.ProcessDeath))]
    return (killed or runs)[-1] if runs else None


def _argument_excerpt(text: str) -> str:
    """The few arguments of a very long line that matter here."""
    import re

    names = "model_path|tp_size|pp_size|dp_size|nnodes|page_size|enable_hierarchical_cache|hicache_ratio|hicache_size"
    found = re.findall(rf"['\"]?\b(?:{names})['\"]?\s*[=:]\s*(?:'[^']*'|[^,)}}]*)", text)
    return f"server_args=… {', '.join(found)} …" if found else text[:400]


def run_facts(facts: Facts) -> Iterator[RunFacts]:
    """Each launch with everything around it."""
    return (RunFacts(run, facts) for run in facts.log.runs)
