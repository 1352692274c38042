"""Everything known about an incident in one place: runs, kernel lines, memory samples, what people said."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property

from hicache_lab.base.units import GB, format_gb
from hicache_lab.forensics.incident.folder import Files, sort_files
from hicache_lab.forensics.incident.kernel import KernelLog, read_kernel_log
from hicache_lab.forensics.incident.memory import Sample, lowest, read_memory
from hicache_lab.forensics.incident.oom_reports import once, teller_of
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.collect import Log, read_log
from hicache_lab.forensics.logs.run import Run
from hicache_lab.sglang.releases import RESERVE_BYTES, ReleaseRules, rules_for


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows something; its text is untrusted."""

    file: str
    line: int
    text: str

    @classmethod
    def of(cls, event: ev.Event | Sample) -> Evidence:
        """The line an event or a sample stands in."""
        prefix = event.prefix if isinstance(event, ev.Event) else ""
        return cls(event.where.file, event.where.line, f"{prefix}{event.text}"[:400])


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes with where it comes from."""

    bytes: int
    source: str
    evidence: tuple[Evidence, ...] = ()

    def __str__(self) -> str:
        return f"{format_gb(self.bytes)} ({self.source})"


@dataclass(frozen=True)
class Facts:
    """What a diagnosis may use. ``stated_*`` is what the user said on the command line or in incident.json."""

    log: Log
    kernel: tuple[KernelLog, ...] = ()
    memory: tuple[Sample, ...] = ()
    stated_total_bytes: int | None = None
    stated_available_bytes: int | None = None
    stated_release: str | None = None
    stated_by: str = "stated"

    @property
    def kills(self) -> list[ev.KernelOom]:
        """Kernel kills in all logs given."""
        mixed = [event for event in self.log.events() if isinstance(event, ev.KernelOom)]
        kills = [kill for log in self.kernel for kill in log.kills] + mixed
        own = [kill for kill in kills if teller_of(kill) is None and _server_like(kill.comm)]
        kept = (kill for kill in kills if teller_of(kill) is None or not any(_same_kill(kill, one) for one in own))
        return once(kept)

    @property
    def total(self) -> Amount | None:
        """RAM of the host."""
        if self.stated_total_bytes is not None:
            return Amount(self.stated_total_bytes, self.stated_by)
        for sample in self.memory:
            if sample.total_bytes is not None:
                return Amount(sample.total_bytes, "memory samples", (Evidence.of(sample),))
        for log in self.kernel:
            if log.ram_bytes is not None:
                return Amount(log.ram_bytes, "the kernel's report", (Evidence.of(log.evidence["ram"]),))
        return None

    @property
    def container_limit(self) -> Amount | None:
        """The smallest memory limit of a control group that anything here shows."""
        found = []
        for log in self.kernel:
            if log.cgroup_limit_bytes is not None:
                shown = (Evidence.of(log.evidence["cgroup_limit"]),)
                found.append(Amount(log.cgroup_limit_bytes, log.cgroup_limit_source, shown))
        for sample in self.memory:
            if sample.cgroup_limit_bytes is not None:
                found.append(Amount(sample.cgroup_limit_bytes, "memory samples", (Evidence.of(sample),)))
                break
        return min(found, key=lambda amount: amount.bytes, default=None)

    @property
    def hugepages(self) -> Amount | None:
        """Reserved huge pages that nobody uses: memory that is there and that MemAvailable does not count."""
        for sample in self.memory:
            if sample.hugepages_free_bytes:
                return Amount(sample.hugepages_free_bytes, "memory samples", (Evidence.of(sample),))
        for log in self.kernel:
            if log.hugepages_free_bytes:
                return Amount(
                    log.hugepages_free_bytes, "the kernel's report", (Evidence.of(log.evidence["hugepages"]),)
                )
        return None

    def lowest_left(self) -> Sample | None:
        """The sample with the least memory left."""
        return lowest(self.memory, lambda sample: sample.left_bytes)


@dataclass(frozen=True)
class RunFacts:
    """One launch seen with everything around it."""

    run: Run
    facts: Facts

    @cached_property
    def rules(self) -> tuple[ReleaseRules, ReleaseRules] | None:
        """Rules of the oldest and the newest release that could have printed this run; None if no wording tells."""
        if self.facts.stated_release is not None:
            rules = rules_for(self.facts.stated_release)
            return rules, rules
        releases = self.run.releases
        return (rules_for(releases.first), rules_for(releases.last)) if releases else None

    @property
    def release(self) -> str:
        """The release or the releases, in words."""
        if self.facts.stated_release is not None:
            return self.facts.stated_release
        return str(self.run.releases) if self.run.releases else "an unknown release"

    def rule(self, name: str) -> object | None:
        """The value of a rule if all releases in question agree, else None."""
        if self.rules is None:
            return None
        oldest, newest = (getattr(rules, name) for rules in self.rules)
        return oldest if oldest == newest else None

    @property
    def reserve_bytes(self) -> int:
        """What the server leaves to the rest of the machine."""
        return RESERVE_BYTES

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
        if facts.stated_available_bytes is not None:
            return Amount(facts.stated_available_bytes, facts.stated_by)
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

    def _sample_before(self, moment: datetime | None) -> Sample | None:
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
        ours = [kill for kill in self.facts.kills if _server_like(kill.comm) or not kill.cgroup]
        timed = [kill for kill in ours if kill.at is not None]
        found = [kill for kill in timed if _during(kill, self.run)]
        # without times only one run can be meant
        if self.run is _ended_badly(self.facts):
            found += [kill for kill in ours if kill.at is None]
        if found or any(_during(kill, run) for kill in timed for run in self.facts.log.runs):
            return found, timedelta()
        likely = [kill for kill in timed if _server_like(kill.comm)]
        shifts = [shift for shift in _ZONES if any(_ends(kill, self.run, shift) for kill in likely)]
        if not shifts:
            return [], timedelta()
        return [kill for kill in likely if _during(kill, self.run, shifts[0])], shifts[0]

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
            if kill.at is not None and _server_like(kill.comm) and first - day <= kill.at <= last + day
        ]

    @property
    def was_killed(self) -> bool:
        """Whether the kernel's line or a numeric exit code shows a kill. The hint in SGLang's text never does."""
        return bool(self.deaths or self.kills)

    @property
    def exhausted(self) -> Sample | None:
        """A sample after the pools began that shows less left than the reserve."""
        first = min((pool.at for pool in self.run.host_pools if pool.at is not None), default=None)
        sample = lowest(
            (s for s in self.facts.memory if s.at is None or first is None or s.at >= first), lambda s: s.left_bytes
        )
        return sample if sample is not None and (sample.left_bytes or 0) < self.reserve_bytes else None

    @property
    def limit(self) -> Amount | None:
        """What physically bounds the pools: the smaller of the host's RAM and the container's limit."""
        both = [a for a in (self.facts.total, self.facts.container_limit) if a is not None]
        return min(both, key=lambda amount: amount.bytes, default=None)


# a container's clock is mostly UTC and its host's is local: time zones differ by whole half hours
_ZONES = sorted((timedelta(minutes=30 * n) for n in range(-28, 29) if n), key=abs)


def _same_kill(told: ev.KernelOom, own: ev.KernelOom) -> bool:
    """Whether a kill that others tell of is one of the kernel's own, by clocks that may be of two time zones."""
    if told.at is None or own.at is None:
        return True
    apart = abs(told.at - own.at)
    half_hour = timedelta(minutes=30)
    return apart <= 28 * half_hour and min(apart % half_hour, half_hour - apart % half_hour) <= timedelta(seconds=30)


def _server_like(comm: str | None) -> bool:
    # the names a process of SGLang has in the kernel's eyes; None: the line does not say
    return comm is None or comm.startswith(("sglang", "python", "pt_main", "ray::"))


def _during(kill: ev.KernelOom, run: Run, shift: timedelta = timedelta()) -> bool:
    if kill.at is None:
        return False
    if run.first is None or run.last is None:
        return True
    return run.first - timedelta(minutes=1) <= kill.at + shift <= run.last + timedelta(minutes=10)


def _ends(kill: ev.KernelOom, run: Run, shift: timedelta) -> bool:
    near = timedelta(minutes=5)
    return kill.at is not None and run.last is not None and abs(kill.at + shift - run.last) <= near


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


def gather(
    logs: Iterable[str],
    *,
    kernel_logs: Iterable[str] = (),
    memory: Iterable[str] = (),
    host_ram_bytes: int | None = None,
    available_bytes: int | None = None,
    release: str | None = None,
    stated_by: str = "stated",
) -> Facts:
    """Read everything that belongs to an incident.

    Args:
        logs: server logs; kernel logs and memory series among them are told apart by their content.
        kernel_logs: dmesg, journald, syslog.
        memory: memory series.
        host_ram_bytes: RAM of the host, if somebody knows it.
        available_bytes: memory available before the launch, if somebody knows it.
        release: the SGLang release; otherwise the wording of the lines says which it can be.
        stated_by: who says what the last three say, in a word.

    Raises:
        InputError: a file cannot be read or has no known form.
        UnknownFact: a release that is none.
    """
    if release is not None:
        rules_for(release)
    files = sort_files(logs)
    # a kernel log alone is diagnosed too
    given = files if files.logs else Files(logs=(*files.kernel_logs, *files.memory))
    log = read_log(given.logs)
    year = next((run.first.year for run in log.runs if run.first is not None), None)
    return Facts(
        log=log,
        kernel=tuple(read_kernel_log(path, year=year) for path in dict.fromkeys((*kernel_logs, *given.kernel_logs))),
        memory=tuple(sample for path in dict.fromkeys((*memory, *given.memory)) for sample in read_memory(path)),
        stated_total_bytes=host_ram_bytes,
        stated_available_bytes=available_bytes,
        stated_release=release,
        stated_by=stated_by,
    )


def run_facts(facts: Facts) -> Iterator[RunFacts]:
    """Each launch with everything around it."""
    return (RunFacts(run, facts) for run in facts.log.runs)
