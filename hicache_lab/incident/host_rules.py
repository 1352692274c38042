"""Rules about host memory: how the pools were sized, what the check saw, what the kernel did."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hicache_lab.incident.facts import Amount, Evidence, RunFacts
from hicache_lab.incident.findings import Confidence, Finding
from hicache_lab.logs import events as ev
from hicache_lab.releases import first_release_with
from hicache_lab.units import GB, format_both, format_gb

_KV = frozenset({"kv", "full"})
# below this, pools of a toy model or a rounding difference say nothing
_NOTICEABLE = GB


def _size_for(room_bytes: int, ranks: int) -> int:
    return max(room_bytes // ranks // GB, 0)


def _safe(seen: RunFacts, ranks: int) -> str:
    """Flags that leave the reserve, for the memory that was there."""
    if seen.available is None:
        return "give the size per rank: (available memory − 10 GiB) / ranks, in GB"
    side = _side_factor(seen)
    room = round((seen.available.bytes - seen.reserve_bytes) / side)
    size = _size_for(room, ranks)
    if size < 1:
        return "there is no room for a host tier on this host; launch without --enable-hierarchical-cache"
    kept = f"{ranks} × {size} GB = {ranks * size:,} GB of {format_gb(seen.available.bytes)} available, 10 GiB kept back"
    with_side = "" if side < 1.001 else f", the other pools counted ({side:.2f} × the flag)"
    return f"--hicache-size {size} at most ({kept}{with_side}); less if the server needs more host memory besides"


def _side_factor(seen: RunFacts) -> float:
    by_kind: dict[bool, int] = {True: 0, False: 0}
    for pool in seen.run.host_pools:
        by_kind[pool.pool in _KV] += pool.bytes
    return 1 + by_kind[False] / by_kind[True] if by_kind[True] else 1.0


def _memory_evidence(seen: RunFacts) -> tuple[Evidence, ...]:
    found = [Evidence.of(kill) for kill in seen.kills[:8]] + [Evidence.of(death) for death in seen.deaths[:8]]
    if seen.exhausted is not None:
        found.append(Evidence.of(seen.exhausted))
    return tuple(found)


def _outcome(seen: RunFacts) -> str:
    if seen.kills:
        return f" The kernel killed {len(seen.kills)} process(es)."
    if seen.deaths:
        return f" {len(seen.deaths)} process(es) ended by SIGKILL."
    if seen.exhausted is not None and seen.exhausted.left_bytes is not None:
        return f" Afterwards {format_gb(seen.exhausted.left_bytes)} were left, less than the 10 GiB reserve."
    return " Nothing was killed in what was given."


def per_rank_size(seen: RunFacts) -> Iterator[Finding]:
    """A size that fits the host once and was taken by every rank."""
    size, ranks = seen.size_gb, seen.run.ranks
    refused = any(True for _ in seen.run.of(ev.HostRefusal))
    if size is None or ranks is None or ranks < 2 or refused:
        return
    one, total = round(size * GB), round(size * GB * ranks)
    limit = seen.limit or seen.available
    evidence = seen.size_evidence + seen.pool_evidence + _memory_evidence(seen)
    arithmetic = f"--hicache-size is GB (1e9 bytes) for each rank: {ranks} × {size:g} GB = {format_both(total)}"
    if limit is None:
        if not seen.was_killed:
            return
        yield Finding(
            "per_rank_size",
            seen.run.index,
            "medium",
            evidence,
            f"{arithmetic}. How much RAM the host has is not in what was given (--host-ram states it).{_outcome(seen)}",
            f"divide the total that was meant by {ranks}; {_safe(seen, ranks)}",
        )
        return
    if not one <= limit.bytes < total:
        return
    certain = seen.was_killed or seen.exhausted is not None
    yield Finding(
        "per_rank_size",
        seen.run.index,
        "high" if certain else "medium",
        evidence + limit.evidence,
        f"{arithmetic}; there are {limit}. {size:g} GB fit as a total and not {ranks} times."
        f"{_guard_story(seen, one)}{_outcome(seen)}",
        _safe(seen, ranks),
    )


def _guard_story(seen: RunFacts, one: int) -> str:
    if seen.rule("guard_divides_by_ranks") is not False or seen.available is None:
        return ""
    allowed = seen.available.bytes - seen.reserve_bytes
    if one > allowed:
        return ""
    since = first_release_with("guard_divides_by_ranks", True)
    return (
        f" In {seen.release} each rank compares its own {format_gb(one)} with {format_gb(allowed)} "
        f"({format_gb(seen.available.bytes)} available − 10 GiB) and passes, every one of them if they look before the "
        f"others' memory is taken; from {since} the check divides by the ranks on the host."
    )


def aggregate_overcommit(seen: RunFacts) -> Iterator[Finding]:
    """Every pool passed its own check; together they take more than the check would have left."""
    pools, ranks, available = seen.run.host_pools, seen.run.ranks or 1, seen.available
    if not pools or available is None or seen.rule("guard_divides_by_ranks") is True:
        return
    total = seen.run.projected_host_bytes
    allowed = available.bytes - seen.reserve_bytes
    largest = max(pool.bytes for pool in pools)
    if total <= allowed or largest > allowed or len(pools) < 2 or total < _NOTICEABLE:
        return
    certain = seen.was_killed or seen.exhausted is not None
    shown = len(seen.run.host_bytes_by_rank())
    projected = "" if shown >= ranks else f" ({shown} of {ranks} ranks shown, the rest taken alike)"
    yield Finding(
        "aggregate_overcommit",
        seen.run.index,
        "high" if certain else "medium",
        seen.pool_evidence + available.evidence + _memory_evidence(seen),
        f"Each of {ranks} ranks checked its own pool ({format_gb(largest)} at most) against {format_gb(allowed)} = "
        f"{available} − 10 GiB reserve, and passed. Together they take {format_both(total)}{projected}, "
        f"{format_gb(total - allowed)} more than that check leaves for all. {seen.release} has no check across ranks."
        f"{_outcome(seen)}",
        f"{_safe(seen, ranks)}; or a release from {first_release_with('guard_divides_by_ranks', True)} on, whose check "
        "divides by the ranks",
    )


def guard_meaning(seen: RunFacts, refusal: ev.HostRefusal) -> str:
    """What the free amount of a refusal is, in the releases that could have printed it."""
    ranks = seen.run.ranks or 1
    divides, shown = seen.rule("guard_divides_by_ranks"), seen.rule("shown")
    requested, free = refusal.requested_bytes, refusal.free_bytes
    if divides is True:
        known = ranks if seen.run.ranks else None
        if known and free is not None:
            return (
                f"In {seen.release} the free amount is one rank's share: (available − 10 GiB) / {known} ranks on this host, "
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
        f"What the free amount means depends on the release, which the log does not tell: the host's available memory up "
        f"to 0.4.9, that − 10 GiB before {since}, one rank's share from {since} on (--sglang-version states it)"
    )


def _refusals(seen: RunFacts) -> list[ev.HostRefusal]:
    return list(seen.run.of(ev.HostRefusal))


def guard_refusal(seen: RunFacts) -> Iterator[Finding]:
    """The server's own check refused a pool."""
    refusals = _refusals(seen)
    if not refusals:
        return
    first, ranks = refusals[0], seen.run.ranks or 1
    who = sorted({refusal.rank.label or "the scheduler" for refusal in refusals})
    asked, free = first.requested_bytes, first.free_bytes
    if asked is None or free is None:
        numbers = "No memory is left for the host tier after the reserve"
        remedy = "free host memory, or launch without --enable-hierarchical-cache"
    else:
        numbers = f"The check before the allocation refused {format_gb(asked)} with {format_gb(free)} free ({', '.join(who)})"
        divides = seen.rule("guard_divides_by_ranks") is True
        fits = free if divides else (free - seen.reserve_bytes if asked <= free else free) // ranks
        if seen.run.host_pools and seen.run.host_pools[0].rank == first.rank:
            numbers += f"; {first.pool} comes on top of the flag"
        remedy = (
            f"--hicache-size {_size_for(max(fits, 0), 1)} or less per rank"
            if fits >= GB
            else "no whole GB per rank fits: --hicache-ratio with a small device pool, or more host memory"
        )
        if divides and ranks > 1:
            total = f" A host of this kind needs {format_both(asked * ranks + seen.reserve_bytes)} available for the size asked."
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
    refusals, pools = _refusals(seen), seen.run.host_pools
    passed = {pool.rank for pool in pools if pool.pool in _KV}
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
        f"{len(same)} rank(s) were given {format_gb(asked)} and {len({r.rank for r in late})} were refused the same: each rank "
        f"looks at the machine when it comes to it, and the memory the others had taken by then was gone. {guard_meaning(seen, late[0])}. "
        "The same launch can pass on another day.",
        f"leave room for the ranks that look last: {_safe(seen, ranks)}",
    )


def side_pools(seen: RunFacts) -> Iterator[Finding]:
    """Pools besides the KV pool, which the flag does not count in this release."""
    pools = seen.run.host_pools
    refused = [r for r in _refusals(seen) if r.pool not in (*_KV, "all")]
    side = [pool for pool in pools if pool.pool not in _KV]
    if not side and not refused:
        return
    kv_bytes = sum(pool.bytes for pool in pools if pool.pool in _KV)
    side_bytes = sum(pool.bytes for pool in side)
    names = ", ".join(sorted({pool.pool for pool in side} | {r.pool for r in refused}))
    bound = seen.available or seen.limit
    scale = seen.run.projected_host_bytes / seen.run.host_bytes if seen.run.host_bytes else 1.0
    decisive = (
        bound is not None
        and kv_bytes * scale <= bound.bytes - seen.reserve_bytes < (kv_bytes + side_bytes) * scale
        and side_bytes >= _NOTICEABLE
    )
    if not (refused or decisive or (side_bytes >= _NOTICEABLE and seen.was_killed)):
        return
    share = f" {format_gb(kv_bytes)} of KV pools and {format_gb(side_bytes)} of {names}" if pools else f" {names}"
    size = f" on top of --hicache-size {seen.size_gb:g}" if seen.size_gb else ""
    bounded = f"; without the latter it would have fitted {bound}" if decisive and bound is not None else ""
    yield Finding(
        "side_pools",
        seen.run.index,
        "high" if refused or decisive else "medium",
        tuple(Evidence.of(event) for event in (*refused[:8], *side[:16])) + seen.size_evidence,
        f"Host pools of several kinds were asked for:{share}{size}{bounded}."
        + ("" if decisive or refused else " Their share made the shortage larger.")
        + _outcome(seen),
        _safe(seen, seen.run.ranks or 1) if pools else "lower --hicache-size by the share of the refused pool",
    )


def host_smaller_than_device(seen: RunFacts) -> Iterator[Finding]:
    """The host tier is not larger than the device pool, so it adds nothing or stops the server."""
    events = list(seen.run.of(ev.HostSmaller))
    if not events:
        return
    first = events[0]
    evidence = tuple(Evidence.of(event) for event in events[:8]) + seen.size_evidence
    counts = ""
    if first.host_tokens is not None and first.device_tokens is not None:
        counts = f" ({first.host_tokens:,} tokens in the host pool, {first.device_tokens:,} on the device)"
    if first.fatal:
        tokens = f" of {seen.run.device_tokens:,} tokens" if seen.run.device_tokens else ""
        text = (
            f"The server stops: up to {seen.release if seen.rules else '0.5.14'} the host pool must be larger than the "
            f"device pool{tokens}, and it is not."
        )
        remedy = "--hicache-ratio above 1, or a --hicache-size larger than the device pool of one rank"
    else:
        text = (
            f"The host pool is not larger than the device pool{counts}: with write-through every token on the device is "
            "held by the host too, so a tier of this size keeps nothing that the device does not."
        )
        remedy = "--hicache-ratio 2 or more (or the same as --hicache-size), if the host has the memory"
    yield Finding("host_smaller_than_device", seen.run.index, "high", evidence, text, remedy, "failure" if first.fatal else "degraded")


def power_of_two(seen: RunFacts) -> Iterator[Finding]:
    """Torch's pinned allocator took the next power of two for each buffer."""
    pools = [pool for pool in seen.run.host_pools if pool.bytes >= _NOTICEABLE]
    pinned = seen.rule("pinned_power_of_two")
    bound = seen.available or seen.limit
    if not pools or pinned is False or seen.rules is None:
        return
    possible = any(rules.pinned_power_of_two for rules in seen.rules)
    if not possible:
        return
    scale = seen.run.projected_host_bytes / seen.run.host_bytes
    plain = sum(pool.bytes for pool in pools) * scale
    rounded = sum(1 << math.ceil(math.log2(pool.bytes)) for pool in pools) * scale
    failed = seen.was_killed or any(True for _ in seen.run.of(ev.PinFailure)) or _stopped(seen)
    if rounded < 1.05 * plain or not failed:
        return
    if bound is not None and not plain <= bound.bytes < rounded:
        return
    confidence: Confidence = "medium" if pinned is True and bound is not None else "low"
    one = pools[0]
    there = f"; there are {bound}" if bound is not None else ""
    yield Finding(
        "power_of_two_rounding",
        seen.run.index,
        confidence,
        tuple(Evidence.of(pool) for pool in pools[:8]) + _memory_evidence(seen),
        f"From 0.4.5 to 0.5.4 host buffers come from torch's pinned allocator, which takes the next power of two: "
        f"{format_both(one.bytes)} become {format_both(1 << math.ceil(math.log2(one.bytes)))} a rank, "
        f"{format_both(round(rounded))} in all instead of {format_gb(round(plain))}{there}. The log says {seen.release}.",
        "choose a size just below a power of two in GiB (for example --hicache-size 34 → 32 GiB is 34.36 GB), or a release "
        f"from {first_release_with('allocation', 'host_register')} on, which registers the exact size",
    )


def _stopped(seen: RunFacts) -> bool:
    return bool(seen.run.host_pools) and seen.run.milestone("ready") is None and not seen.run.batches.decode and (
        seen.run.milestone("shutdown") is None
    )


def container_limit(seen: RunFacts) -> Iterator[Finding]:
    """A control group's limit bounds the server, not the host's RAM."""
    limit, total = seen.facts.container_limit, seen.facts.total
    kills = [kill for kill in seen.kills if kill.cgroup]
    headroom = [s for s in seen.run.of(ev.HostSizing) if s.cgroup_bytes is not None and s.host_bytes is not None]
    binding = [s for s in headroom if (s.cgroup_bytes or 0) < (s.host_bytes or 0)]
    refused = bool(_refusals(seen))
    too_small = limit is not None and (total is None or limit.bytes < total.bytes) and seen.run.projected_host_bytes > limit.bytes
    if not kills and not too_small and not (binding and refused):
        return
    known = f" of {format_both(limit.bytes)}" if limit is not None else ""
    host = f"; the host has {format_gb(total.bytes)}" if total is not None else ""
    if kills:
        text = f"The kernel killed inside a control group that had reached its limit{known}{host}."
    elif binding:
        one = binding[0]
        text = (
            f"The container leaves {format_gb(one.cgroup_bytes or 0)} while the host has {format_gb(one.host_bytes or 0)} "
            "available: the check went by the container."
        )
    else:
        text = f"The host pools together take {format_both(seen.run.projected_host_bytes)}; the container's limit is{known}{host}."
    blind = seen.rule("guard_reads_cgroup") is False
    if blind:
        text += f" {seen.release} does not look at containers: its check compared with the whole host."
    evidence = tuple(Evidence.of(e) for e in (*kills[:8], *binding[:4])) + (limit.evidence if limit else ()) + seen.pool_evidence
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
    size = _size_for(round((limit.bytes - seen.reserve_bytes) / _side_factor(seen)), ranks)
    return f"--hicache-size {size} at most, less what the server itself takes"


def hugepages(seen: RunFacts) -> Iterator[Finding]:
    """Reserved huge pages are memory that the check does not see."""
    reserved = seen.facts.hugepages
    refusals = [r for r in _refusals(seen) if r.requested_bytes is not None and r.free_bytes is not None]
    if reserved is None or reserved.bytes < _NOTICEABLE or not (refusals or seen.was_killed):
        return
    evidence = reserved.evidence + tuple(Evidence.of(r) for r in refusals[:4]) + tuple(Evidence.of(k) for k in seen.kills[:4])
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
        f"{format_both(reserved.bytes)} are reserved as huge pages and unused. MemAvailable, from which the check starts, does "
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
        f"Pinning host memory{of} for the GPU failed. The size itself was accepted; the driver, the container's memlock "
        "limit or a virtual machine's limit on pinned memory refused it.",
        "check ulimit -l (container: --ulimit memlock=-1), nvidia-smi and the driver's messages in dmesg; try a smaller "
        "--hicache-size to see whether the size matters",
    )


def kernel_oom_kill(seen: RunFacts) -> Iterator[Finding]:
    """The kernel's own line, or exit code −9 / 137."""
    if not seen.was_killed:
        return
    if seen.kills:
        held = [kill.resident_bytes for kill in seen.kills if kill.resident_bytes]
        most = f", the largest holding {format_both(max(held))}" if held else ""
        scope = " in a control group" if any(kill.cgroup for kill in seen.kills) else ""
        text = f"The kernel ran out of memory{scope} and killed {len(seen.kills)} process(es){most}."
        confidence: Confidence = "high"
    else:
        codes = sorted({death.exit_code for death in seen.deaths if death.exit_code is not None})
        text = (
            f"{len(seen.deaths)} process(es) ended with exit code {', '.join(map(str, codes))}: SIGKILL. Without the kernel's log "
            "it is not certain that the kernel sent it."
        )
        confidence = "medium"
    evidence = tuple(Evidence.of(e) for e in (*seen.kills[:8], *seen.deaths[:8]))
    if seen.exhausted is not None:
        evidence += (Evidence.of(seen.exhausted),)
    yield Finding(
        "kernel_oom_kill",
        seen.run.index,
        confidence,
        evidence,
        text,
        "find what took the memory (the findings before this one); pass the kernel log with --kernel-log and a memory series with --memory",
    )


def stopped_during_allocation(seen: RunFacts) -> Iterator[Finding]:
    """The log ends right after host pools were asked for: nothing says why."""
    if not _stopped(seen) or seen.was_killed or _refusals(seen):
        return
    failed = ("failure", "pin_failure", "gpu_oom", "host_smaller", "process_death", "token_shortage")
    if any(seen.run.counts[kind] for kind in failed) or seen.run.projected_host_bytes < _NOTICEABLE:
        return
    if any(e.kind == "access" for e in seen.run.events) or seen.run.batches.prefill:
        return
    yield Finding(
        "stopped_during_allocation",
        seen.run.index,
        "low",
        seen.pool_evidence[-4:],
        f"The log of this launch ends after host pools of {format_both(seen.run.projected_host_bytes)} were asked for, and the "
        "server never became ready. A kernel kill leaves no line in the log of its victim; so do a lost terminal and a cut file.",
        "look for the kill: dmesg -T | grep -i -E 'oom|killed process', kubectl describe pod (exit code 137), and give it with --kernel-log",
    )
