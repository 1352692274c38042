"""Rules about the server's own check, the container, the driver and the kernel."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_lab.base.units import GB, format_both, format_gb
from hicache_lab.forensics.incident.findings import AFTERMATH, MEMORY_END, Confidence, Symptom, quotes, rule
from hicache_lab.forensics.incident.launches import KV, NOTICEABLE, RunFacts
from hicache_lab.forensics.logs import events as ev
from hicache_lab.sizing.guard import RESERVE_TEXT, beyond_reserve_bytes


@rule(20, "ranks refused after others had been given the same size", explains=AFTERMATH | {"guard_refusal"})
def staggered_refusal(launch: RunFacts) -> Iterator[Symptom]:
    """Some ranks got their pool and others, looking later, were refused the same size."""
    refusals, pools = launch.refusals, launch.run.host_pools
    passed = {pool.rank for pool in pools if pool.pool in KV}
    late = [r for r in refusals if r.rank not in passed and r.requested_bytes]
    if not passed or not late or len({pool.rank for pool in pools} | {r.rank for r in late}) < 2:
        return
    asked = late[0].requested_bytes or 0
    same = [pool for pool in pools if abs(pool.bytes - asked) <= GB // 100]
    if not same:
        return
    yield Symptom(
        "high",
        quotes(same) + quotes(late),
        f"{len(same)} rank(s) were given {format_gb(asked)} and {len({r.rank for r in late})} were refused the same: "
        "each rank looks at the machine when it comes to it, and the memory the others had taken by then was gone. "
        f"{launch.free_amount(late[0]).meaning}. The same launch can pass on another day.",
        f"leave room for the ranks that look last: {launch.question.remedy}",
    )


@rule(
    30,
    "reserved, unused huge pages beside a refusal or a kill",
    explains=MEMORY_END,
    shares=frozenset({"guard_refusal"}),
)
def hugepages(launch: RunFacts) -> Iterator[Symptom]:
    """Reserved huge pages are memory that the check does not see."""
    reserved = launch.facts.hugepages
    refusals = [r for r in launch.refusals if r.requested_bytes is not None and r.free_bytes is not None]
    if reserved is None or reserved.bytes < NOTICEABLE or not (refusals or launch.was_killed):
        return
    confidence: Confidence = "medium"
    missing = ""
    if refusals:
        short = _missing_in_the_check(launch, refusals[0])
        confidence = "high" if reserved.bytes >= short else "low"
        missing = f" {format_gb(short)} were missing in the check."
    yield Symptom(
        confidence,
        reserved.evidence + quotes(refusals, 4) + quotes(launch.kills, 4),
        f"{format_both(reserved.bytes)} are reserved as huge pages and unused. MemAvailable, from which the check "
        f"starts, does not count them, and ordinary allocations cannot use them.{missing}",
        "release the reservation before the launch: sysctl vm.nr_hugepages=0 (and the sizes below "
        "/sys/kernel/mm/hugepages), or have the server use it where the release can",
    )


def _missing_in_the_check(launch: RunFacts, refusal: ev.HostRefusal) -> int:
    """Bytes of available memory with which the refused request would have passed."""
    requested, free = refusal.requested_bytes or 0, refusal.free_bytes or 0
    budget = launch.budget(0)
    allowed = launch.free_amount(refusal).all_ranks_bytes
    together = requested * (budget.divisor if budget is not None else 1)
    return together - (free if allowed is None else allowed)


@rule(
    40,
    "a kill inside a control group, or a container's limit below the host's memory",
    explains=MEMORY_END,
    shares=frozenset({"guard_refusal", "aggregate_overcommit"}),
)
def container_limit(launch: RunFacts) -> Iterator[Symptom]:
    """A control group's limit bounds the server, not the host's RAM."""
    limit, total, taken = launch.facts.container_limit, launch.facts.total, launch.run.projected_host_bytes
    used = launch.facts.stated.cgroup_usage_bytes or 0
    kills = [kill for kill in launch.kills if kill.cgroup]
    binding = [
        sizing
        for sizing in launch.run.of(ev.HostSizing)
        if sizing.cgroup_bytes is not None and sizing.host_bytes is not None and sizing.cgroup_bytes < sizing.host_bytes
    ]
    too_small = limit is not None and (total is None or limit.bytes < total.bytes) and taken > limit.bytes - used
    if not kills and not too_small and not (binding and launch.refusals):
        return
    known = f" of {format_both(limit.bytes)}" if limit is not None else ""
    host = f"; the host has {format_gb(total.bytes)}" if total is not None else ""
    if kills:
        text = f"The kernel killed inside a control group that had reached its limit{known}{host}."
    elif binding:
        left, there = binding[0].cgroup_bytes or 0, binding[0].host_bytes or 0
        text = (
            f"The container leaves {format_gb(left)} while the host has {format_gb(there)} available: "
            "the check went by the container."
        )
    else:
        held = f", of which it already used {format_gb(used)}" if used else ""
        text = f"The host pools together take {format_both(taken)}; the container has a limit{known}{held}{host}."
    if launch.rule("guard_reads_cgroup") is False:
        text += f" {launch.release} does not look at containers: its check compared with the whole host."
    yield Symptom(
        "high" if kills or binding else "medium",
        quotes(kills) + quotes(binding, 4) + (limit.evidence if limit else ()) + launch.pool_evidence,
        text,
        f"raise the container's memory limit, or size by it: {launch.question.remedy}",
    )


@rule(50, "SGLang's own refusal of a host pool", explains=AFTERMATH)
def guard_refusal(launch: RunFacts) -> Iterator[Symptom]:
    """The server's own check refused a pool."""
    if not launch.refusals:
        return
    first = launch.refusals[0]
    who = ", ".join(sorted({refusal.rank.label or "the scheduler" for refusal in launch.refusals}))
    asked, free = first.requested_bytes, first.free_bytes
    if asked is None or free is None:
        numbers = "No memory is left for the host tier after the reserve"
        remedy = "free host memory, or launch without --enable-hierarchical-cache"
    else:
        numbers = f"The check before the allocation refused {format_gb(asked)} with {format_gb(free)} free ({who})"
        if launch.run.host_pools and launch.run.host_pools[0].rank == first.rank:
            numbers += f"; {first.pool} comes on top of the flag"
        remedy = f"{launch.question.remedy}{_needed(launch)}"
    yield Symptom(
        "high",
        quotes(launch.refusals, 16) + launch.size_evidence,
        f"{numbers}. {launch.free_amount(first).meaning}.",
        remedy,
    )


def _needed(launch: RunFacts) -> str:
    """The host on which the size that was asked for would leave the reserve."""
    answer = launch.question.answer
    if answer is None or answer.over_reserve_bytes is None or answer.over_reserve_bytes >= 0:
        return ""
    needed = (answer.question.limit_bytes or 0) - answer.over_reserve_bytes
    return f". A host of this kind needs {format_both(needed)} available for the size asked."


@rule(100, "a failed cudaHostRegister or pinned allocation", explains=AFTERMATH)
def pinning_failure(launch: RunFacts) -> Iterator[Symptom]:
    """The driver refused to pin the host pool."""
    events = list(launch.run.of(ev.PinFailure))
    if not events:
        return
    size = next((event.size_bytes for event in events if event.size_bytes), None)
    of = f" of {format_both(size)}" if size else ""
    yield Symptom(
        "high",
        quotes(events),
        f"Pinning host memory{of} for the GPU failed. The size itself was accepted; "
        "the driver, the container's memlock limit or a virtual machine's limit on pinned memory refused it.",
        "check ulimit -l (container: --ulimit memlock=-1), nvidia-smi and the driver's messages in dmesg; "
        "try a smaller --hicache-size to see whether the size matters",
    )


@rule(120, "a kernel OOM line, or exit code -9 or 137", explains=AFTERMATH)
def kernel_oom_kill(launch: RunFacts) -> Iterator[Symptom]:
    """The kernel's own line, or exit code −9 / 137."""
    if not launch.was_killed:
        yield from _distant_kill(launch)
        return
    text, confidence = _kills_in_words(launch) if launch.kills else _deaths_in_words(launch)
    remedy = (
        "find what took the memory (the findings before this one); "
        "pass the kernel log with --kernel-log and a memory series with --memory"
    )
    pools, room = launch.taken_bytes, launch.room
    if room is not None and launch.run.projected_host_bytes >= NOTICEABLE:
        if pools <= beyond_reserve_bytes(room.bytes):
            text += (
                f" The host pools alone ({format_gb(pools)}) fit {room}: something else took memory, "
                "or a container's limit is lower (/sys/fs/cgroup/memory.max, kubectl describe pod)."
            )
        else:
            text += f" The host pools ({format_gb(pools)}) do not fit {room} with the {RESERVE_TEXT} reserve."
            remedy = launch.question.remedy
    yield Symptom(
        confidence,
        launch.memory_evidence,
        text,
        remedy,
    )


def _kills_in_words(launch: RunFacts) -> tuple[str, Confidence]:
    kills = launch.kills
    confidence: Confidence = "high"
    held = [kill.resident_bytes for kill in kills if kill.resident_bytes]
    most = f", the largest holding {format_both(max(held))}" if held else ""
    scope = " in a control group" if any(kill.cgroup for kill in kills) else ""
    names = ", ".join(sorted({kill.comm for kill in kills if kill.comm}))
    named = f" ({names})" if names else ""
    text = f"The kernel ran out of memory{scope} and killed {len(kills)} process(es){named}{most}."
    if launch.kill_shift:
        confidence = "medium"
        hours = launch.kill_shift.total_seconds() / 3600
        text += (
            f" By the clock of the kernel log that was {abs(hours):g} h {'before' if hours > 0 else 'after'} "
            "the end of the server log: taken for two time zones."
        )
    reporters = sorted({kill.reporter for kill in kills if kill.reporter is not None})
    if reporters:
        confidence = "medium"
        text += (
            f" That is what {' and '.join(reporters)} {'tell' if len(reporters) > 1 else 'tells'}; "
            "the node's own kernel log (dmesg -T) says which process, how large, and whose limit."
        )
    return text, confidence


def _deaths_in_words(launch: RunFacts) -> tuple[str, Confidence]:
    codes = sorted({death.exit_code for death in launch.deaths if death.exit_code is not None})
    text = (
        f"{len(launch.deaths)} process(es) ended with exit code {', '.join(map(str, codes))}: SIGKILL. "
        "Without the kernel's log it is not certain that the kernel sent it."
    )
    return text, "medium"


def _distant_kill(launch: RunFacts) -> Iterator[Symptom]:
    kills, last = launch.distant_kills, launch.run.last
    if not kills or kills[0].at is None or last is None:
        return
    yield Symptom(
        "low",
        quotes(kills),
        f"The kernel killed {len(kills)} process(es) of such a server, the first at {kills[0].at:%Y-%m-%d %H:%M:%S}; "
        f"the server log ends at {last:%Y-%m-%d %H:%M:%S}, and no difference of time zones brings them together.",
        "find out whether this is the launch that was killed: compare the clocks of both logs and the process ids",
        "note",
    )


@rule(160, "a log that ends while host pools are allocated")
def stopped_during_allocation(launch: RunFacts) -> Iterator[Symptom]:
    """The log ends right after host pools were asked for: nothing says why."""
    run, size, ranks = launch.run, launch.size_gb, launch.run.ranks
    if not launch.stopped_early or launch.was_killed or launch.refusals:
        return
    failed = ("failure", "pin_failure", "gpu_oom", "host_smaller", "process_death", "token_shortage")
    if any(run.counts[kind] for kind in failed) or run.projected_host_bytes < NOTICEABLE:
        return
    if any(event.kind == "access" for event in run.events) or run.batches.prefill:
        return
    per_rank = f" ({ranks} × {size:g} GB: the flag is per rank)" if size and ranks and ranks > 1 else ""
    yield Symptom(
        "low",
        launch.pool_evidence[-4:],
        f"The log of this launch ends after host pools of {format_both(run.projected_host_bytes)} were asked "
        f"for{per_rank}, and the server never became ready. A kernel kill leaves no line in the log of its victim; "
        "so do a lost terminal and a cut file.",
        "look for the kill: dmesg -T | grep -i -E 'oom|killed process', kubectl describe pod (exit code 137), "
        "and give it with --kernel-log",
    )
