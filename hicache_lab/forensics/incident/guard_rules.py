"""Rules about the server's own check, the container, the driver and the kernel."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_lab.base.units import GB, format_both, format_gb
from hicache_lab.forensics.incident.facts import Amount, Evidence, RunFacts
from hicache_lab.forensics.incident.findings import Confidence, Finding
from hicache_lab.forensics.incident.oom_reports import teller_of
from hicache_lab.forensics.incident.room import (
    KV,
    NOTICEABLE,
    refused_pools,
    safe_size,
    side_factor,
    size_after_refusal,
    size_for,
    stopped_early,
)
from hicache_lab.forensics.logs import events as ev
from hicache_lab.sglang.releases import first_release_with


def guard_meaning(seen: RunFacts, refusal: ev.HostRefusal) -> str:
    """What the free amount of a refusal is, in the releases that could have printed it."""
    ranks = seen.run.ranks or 1
    divides, shown = seen.rule("guard_divides_by_ranks"), seen.rule("shown")
    requested, free = refusal.requested_bytes, refusal.free_bytes
    if divides is True:
        known = ranks if seen.run.ranks else None
        if known and free is not None:
            return (
                f"In {seen.release} the free amount is one rank's share: (available − 10 GiB) / {known} ranks on "
                f"this host, "
                f"so all of them together may take {format_gb(free * known)} and about "
                f"{format_gb(free * known + seen.reserve_bytes)} were available"
            )
        return f"In {seen.release} the free amount is one rank's share: (available − 10 GiB) / ranks on this host"
    if shown == "available" or (requested is not None and free is not None and requested <= free):
        kept = f": {format_gb(free - seen.reserve_bytes)} could be taken" if free is not None else ""
        return f"The free amount is what was available; the 10 GiB reserve is kept back but not subtracted in it{kept}"
    if divides is False and shown == "allowance":
        whole = f" ({format_gb(free + seen.reserve_bytes)} were available)" if free is not None else ""
        return f"In {seen.release} the free amount is the host's available memory − 10 GiB, not divided by ranks{whole}"
    since = first_release_with("guard_divides_by_ranks", True)
    return (
        f"What the free amount means depends on the release, which the log does not tell: the host's available "
        f"memory up "
        f"to 0.4.9, that − 10 GiB before {since}, one rank's share from {since} on (--sglang-version states it)"
    )


def guard_refusal(seen: RunFacts) -> Iterator[Finding]:
    """The server's own check refused a pool."""
    refusals = refused_pools(seen)
    if not refusals:
        return
    first, ranks = refusals[0], seen.run.ranks or 1
    who = sorted({refusal.rank.label or "the scheduler" for refusal in refusals})
    asked, free = first.requested_bytes, first.free_bytes
    if asked is None or free is None:
        numbers = "No memory is left for the host tier after the reserve"
        remedy = "free host memory, or launch without --enable-hierarchical-cache"
    else:
        numbers = (
            f"The check before the allocation refused {format_gb(asked)} with {format_gb(free)} free ({', '.join(who)})"
        )
        if seen.run.host_pools and seen.run.host_pools[0].rank == first.rank:
            numbers += f"; {first.pool} comes on top of the flag"
        remedy = size_after_refusal(seen, first)
        if seen.rule("guard_divides_by_ranks") is True and ranks > 1 and first.pool in KV:
            total = (
                f" A host of this kind needs {format_both(asked * ranks + seen.reserve_bytes)} available for "
                f"the size asked."
            )
            remedy += "." + total
    yield Finding(
        "guard_refusal",
        seen.run.index,
        "high",
        tuple(Evidence.of(refusal) for refusal in refusals[:16]) + seen.size_evidence,
        f"{numbers}. {guard_meaning(seen, first)}.",
        remedy,
    )


def staggered_refusal(seen: RunFacts) -> Iterator[Finding]:
    """Some ranks got their pool and others, looking later, were refused the same size."""
    refusals, pools = refused_pools(seen), seen.run.host_pools
    passed = {pool.rank for pool in pools if pool.pool in KV}
    late = [r for r in refusals if r.rank not in passed and r.requested_bytes]
    if not passed or not late or len({pool.rank for pool in pools} | {r.rank for r in late}) < 2:
        return
    asked = late[0].requested_bytes or 0
    same = [pool for pool in pools if abs(pool.bytes - asked) <= GB // 100]
    if not same:
        return
    ranks = seen.run.ranks or len(passed) + len({r.rank for r in late})
    yield Finding(
        "staggered_refusal",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in (*same[:8], *late[:8])),
        f"{len(same)} rank(s) were given {format_gb(asked)} and {len({r.rank for r in late})} were refused the "
        f"same: each rank "
        f"looks at the machine when it comes to it, and the memory the others had taken by then was gone. "
        f"{guard_meaning(seen, late[0])}. "
        "The same launch can pass on another day.",
        f"leave room for the ranks that look last: {safe_size(seen, ranks)}",
    )


def container_limit(seen: RunFacts) -> Iterator[Finding]:
    """A control group's limit bounds the server, not the host's RAM."""
    limit, total = seen.facts.container_limit, seen.facts.total
    kills = [kill for kill in seen.kills if kill.cgroup]
    headroom = [s for s in seen.run.of(ev.HostSizing) if s.cgroup_bytes is not None and s.host_bytes is not None]
    binding = [s for s in headroom if (s.cgroup_bytes or 0) < (s.host_bytes or 0)]
    refused = bool(refused_pools(seen))
    too_small = (
        limit is not None
        and (total is None or limit.bytes < total.bytes)
        and seen.run.projected_host_bytes > limit.bytes
    )
    if not kills and not too_small and not (binding and refused):
        return
    known = f" of {format_both(limit.bytes)}" if limit is not None else ""
    host = f"; the host has {format_gb(total.bytes)}" if total is not None else ""
    if kills:
        text = f"The kernel killed inside a control group that had reached its limit{known}{host}."
    elif binding:
        one = binding[0]
        text = (
            f"The container leaves {format_gb(one.cgroup_bytes or 0)} while the host has "
            f"{format_gb(one.host_bytes or 0)} "
            "available: the check went by the container."
        )
    else:
        text = (
            f"The host pools together take {format_both(seen.run.projected_host_bytes)}; the container's limit "
            f"is{known}{host}."
        )
    blind = seen.rule("guard_reads_cgroup") is False
    if blind:
        text += f" {seen.release} does not look at containers: its check compared with the whole host."
    evidence = (
        tuple(Evidence.of(e) for e in (*kills[:8], *binding[:4]))
        + (limit.evidence if limit else ())
        + seen.pool_evidence
    )
    yield Finding(
        "container_limit",
        seen.run.index,
        "high" if kills or binding else "medium",
        evidence,
        text,
        f"raise the container's memory limit, or size by it: {_by_limit(seen, limit)}",
    )


def _by_limit(seen: RunFacts, limit: Amount | None) -> str:
    ranks = seen.run.ranks
    if limit is None or not ranks:
        return "(limit − the server's own memory − 10 GiB) / ranks, in GB"
    size = size_for(round((limit.bytes - seen.reserve_bytes) / side_factor(seen)), ranks)
    return f"--hicache-size {size} at most, less what the server itself takes"


def hugepages(seen: RunFacts) -> Iterator[Finding]:
    """Reserved huge pages are memory that the check does not see."""
    reserved = seen.facts.hugepages
    refusals = [r for r in refused_pools(seen) if r.requested_bytes is not None and r.free_bytes is not None]
    if reserved is None or reserved.bytes < NOTICEABLE or not (refusals or seen.was_killed):
        return
    evidence = (
        reserved.evidence + tuple(Evidence.of(r) for r in refusals[:4]) + tuple(Evidence.of(k) for k in seen.kills[:4])
    )
    confidence: Confidence = "medium"
    missing = ""
    if refusals:
        ranks = (seen.run.ranks or 1) if seen.rule("guard_divides_by_ranks") else 1
        short = ((refusals[0].requested_bytes or 0) - (refusals[0].free_bytes or 0)) * ranks
        confidence = "high" if reserved.bytes >= short else "low"
        missing = f" {format_gb(short)} were missing in the check."
    yield Finding(
        "hugepages",
        seen.run.index,
        confidence,
        evidence,
        f"{format_both(reserved.bytes)} are reserved as huge pages and unused. MemAvailable, from which the check "
        f"starts, does "
        f"not count them, and ordinary allocations cannot use them.{missing}",
        "release the reservation before the launch: sysctl vm.nr_hugepages=0 (and the sizes below "
        "/sys/kernel/mm/hugepages), or have the server use it where the release can",
    )


def pinning_failure(seen: RunFacts) -> Iterator[Finding]:
    """The driver refused to pin the host pool."""
    events = list(seen.run.of(ev.PinFailure))
    if not events:
        return
    size = next((event.size_bytes for event in events if event.size_bytes), None)
    of = f" of {format_both(size)}" if size else ""
    yield Finding(
        "pinning_failure",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in events[:8]),
        f"Pinning host memory{of} for the GPU failed. The size itself was accepted; the driver, the container's "
        f"memlock "
        "limit or a virtual machine's limit on pinned memory refused it.",
        "check ulimit -l (container: --ulimit memlock=-1), nvidia-smi and the driver's messages in dmesg; try a "
        "smaller "
        "--hicache-size to see whether the size matters",
    )


def kernel_oom_kill(seen: RunFacts) -> Iterator[Finding]:
    """The kernel's own line, or exit code −9 / 137."""
    if not seen.was_killed:
        yield from _distant_kill(seen)
        return
    if seen.kills:
        held = [kill.resident_bytes for kill in seen.kills if kill.resident_bytes]
        most = f", the largest holding {format_both(max(held))}" if held else ""
        scope = " in a control group" if any(kill.cgroup for kill in seen.kills) else ""
        names = ", ".join(sorted({kill.comm for kill in seen.kills if kill.comm}))
        named = f" ({names})" if names else ""
        text = f"The kernel ran out of memory{scope} and killed {len(seen.kills)} process(es){named}{most}."
        confidence: Confidence = "high"
        if seen.kill_shift:
            confidence = "medium"
            hours = seen.kill_shift.total_seconds() / 3600
            text += (
                f" By the clock of the kernel log that was {abs(hours):g} h {'before' if hours > 0 else 'after'} the "
                f"end of the server log: taken for two time zones."
            )
        tellers = sorted({teller for kill in seen.kills if (teller := teller_of(kill)) is not None})
        if tellers:
            confidence = "medium"
            verb = "tell" if len(tellers) > 1 else "tells"
            text += (
                f" That is what {' and '.join(tellers)} {verb}; the node's own kernel log (dmesg -T) says which "
                f"process, how large, and whose limit."
            )
    else:
        codes = sorted({death.exit_code for death in seen.deaths if death.exit_code is not None})
        text = (
            f"{len(seen.deaths)} process(es) ended with exit code {', '.join(map(str, codes))}: SIGKILL. Without "
            f"the kernel's log "
            "it is not certain that the kernel sent it."
        )
        confidence = "medium"
    pools, limit = seen.run.projected_host_bytes, seen.limit
    if pools >= NOTICEABLE and limit is not None and pools < limit.bytes - seen.reserve_bytes:
        text += (
            f" The host pools alone ({format_gb(pools)}) fit {limit}: something else took memory, or a container's "
            f"limit is lower (/sys/fs/cgroup/memory.max, kubectl describe pod)."
        )
    evidence = tuple(Evidence.of(e) for e in (*seen.kills[:8], *seen.deaths[:8]))
    if seen.exhausted is not None:
        evidence += (Evidence.of(seen.exhausted),)
    yield Finding(
        "kernel_oom_kill",
        seen.run.index,
        confidence,
        evidence,
        text,
        "find what took the memory (the findings before this one); pass the kernel log with --kernel-log and a "
        "memory series with --memory",
    )


def _distant_kill(seen: RunFacts) -> Iterator[Finding]:
    kills = seen.distant_kills
    if not kills or kills[0].at is None or seen.run.last is None:
        return
    yield Finding(
        "kernel_oom_kill",
        seen.run.index,
        "low",
        tuple(Evidence.of(kill) for kill in kills[:8]),
        f"The kernel killed {len(kills)} process(es) of such a server, the first at {kills[0].at:%Y-%m-%d %H:%M:%S}; "
        f"the server log ends at {seen.run.last:%Y-%m-%d %H:%M:%S}, and no difference of time zones "
        f"brings them together.",
        "find out whether this is the launch that was killed: compare the clocks of both logs and the process ids",
        "note",
    )


def stopped_during_allocation(seen: RunFacts) -> Iterator[Finding]:
    """The log ends right after host pools were asked for: nothing says why."""
    if not stopped_early(seen) or seen.was_killed or refused_pools(seen):
        return
    failed = ("failure", "pin_failure", "gpu_oom", "host_smaller", "process_death", "token_shortage")
    if any(seen.run.counts[kind] for kind in failed) or seen.run.projected_host_bytes < NOTICEABLE:
        return
    if any(e.kind == "access" for e in seen.run.events) or seen.run.batches.prefill:
        return
    yield Finding(
        "stopped_during_allocation",
        seen.run.index,
        "low",
        seen.pool_evidence[-4:],
        f"The log of this launch ends after host pools of {format_both(seen.run.projected_host_bytes)} were asked "
        f"for{_per_rank(seen)}, and the "
        "server never became ready. A kernel kill leaves no line in the log of its victim; so do a lost terminal "
        "and a cut file.",
        "look for the kill: dmesg -T | grep -i -E 'oom|killed process', kubectl describe pod (exit code 137), and "
        "give it with --kernel-log",
    )


def _per_rank(seen: RunFacts) -> str:
    ranks = seen.run.ranks
    return f" ({ranks} × {seen.size_gb:g} GB: the flag is per rank)" if seen.size_gb and ranks and ranks > 1 else ""
