"""Rules about how the host pools were sized."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hicache_lab.base.units import GB, format_both, format_gb
from hicache_lab.forensics.incident.facts import Evidence, RunFacts
from hicache_lab.forensics.incident.findings import Confidence, Finding
from hicache_lab.forensics.incident.room import (
    KV,
    NOTICEABLE,
    failed_early,
    memory_evidence,
    outcome,
    refused_pools,
    safe_size,
    size_after_refusal,
)
from hicache_lab.forensics.logs import events as ev
from hicache_lab.sglang.releases import first_release_with


def per_rank_size(seen: RunFacts) -> Iterator[Finding]:
    """A size that fits the host once and was taken by every rank."""
    size, ranks = seen.size_gb, seen.run.ranks
    refused = any(True for _ in seen.run.of(ev.HostRefusal))
    if size is None or ranks is None or ranks < 2 or refused:
        return
    one, total = round(size * GB), round(size * GB * ranks)
    limit = seen.limit or seen.available
    evidence = seen.size_evidence + seen.pool_evidence + memory_evidence(seen)
    arithmetic = f"--hicache-size is GB (1e9 bytes) for each rank: {ranks} × {size:g} GB = {format_both(total)}"
    if limit is None:
        other = ("failure", "pin_failure", "gpu_oom", "host_smaller", "token_shortage")
        unexplained = failed_early(seen) and not any(seen.run.counts[kind] for kind in other)
        if not seen.was_killed and not unexplained:
            return
        yield Finding(
            "per_rank_size",
            seen.run.index,
            "medium" if seen.was_killed else "low",
            evidence,
            f"{arithmetic}. How much RAM the host has is not in what was given (--host-ram states it).{outcome(seen)}",
            f"divide the total that was meant by {ranks}; {safe_size(seen, ranks)}",
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
        f"{_guard_story(seen, one)}{outcome(seen)}",
        safe_size(seen, ranks),
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
    pools, ranks = seen.run.host_pools, seen.run.ranks or 1
    # what was available tells it exactly; more than the whole host has is too much in any case
    bound = seen.available or seen.limit
    if not pools or bound is None or seen.rule("guard_divides_by_ranks") is True:
        return
    total = seen.run.projected_host_bytes
    allowed = bound.bytes - seen.reserve_bytes
    largest = max(pool.bytes for pool in pools)
    if total <= allowed or largest > allowed or len(pools) < 2 or total < NOTICEABLE:
        return
    if seen.available is None and total <= bound.bytes:
        return
    certain = seen.was_killed or seen.exhausted is not None
    shown = len(seen.run.host_bytes_by_rank())
    projected = "" if shown >= ranks else f" ({shown} of {ranks} ranks shown, the rest taken alike)"
    check = (
        f"Each of {ranks} ranks checked its own pool ({format_gb(largest)} at most) against {format_gb(allowed)} = "
        f"{bound} − 10 GiB reserve, and passed. Together they take {format_both(total)}{projected}, "
        f"{format_gb(total - allowed)} more than that check leaves for all."
        if seen.available is not None
        else f"Each of {ranks} ranks asked for its own pool ({format_gb(largest)} at most). Together they take "
        f"{format_both(total)}{projected}; there are {bound} in all."
    )
    yield Finding(
        "aggregate_overcommit",
        seen.run.index,
        "high" if certain else "medium",
        seen.pool_evidence + bound.evidence + memory_evidence(seen),
        f"{check} {seen.release} has no check across ranks.{outcome(seen)}",
        f"{safe_size(seen, ranks)}; or a release from {first_release_with('guard_divides_by_ranks', True)} on, "
        f"whose check divides by the ranks",
    )


def side_pools(seen: RunFacts) -> Iterator[Finding]:
    """Pools besides the KV pool, which the flag does not count in this release."""
    pools = seen.run.host_pools
    refused = [r for r in refused_pools(seen) if r.pool not in (*KV, "all")]
    side = [pool for pool in pools if pool.pool not in KV]
    if not side and not refused:
        return
    kv_bytes = sum(pool.bytes for pool in pools if pool.pool in KV)
    side_bytes = sum(pool.bytes for pool in side)
    names = ", ".join(sorted({pool.pool for pool in side} | {r.pool for r in refused}))
    bound = seen.available or seen.limit
    scale = seen.run.projected_host_bytes / seen.run.host_bytes if seen.run.host_bytes else 1.0
    decisive = (
        bound is not None
        and kv_bytes * scale <= bound.bytes - seen.reserve_bytes < (kv_bytes + side_bytes) * scale
        and side_bytes >= NOTICEABLE
    )
    if not (refused or decisive or (side_bytes >= NOTICEABLE and seen.was_killed)):
        return
    given = f" {format_gb(kv_bytes)} of KV pools and {format_gb(side_bytes)} of {names}"
    late = ", ".join(
        f"{format_gb(r.requested_bytes)} of {r.pool}" for r in refused[:1] if r.requested_bytes is not None
    )
    if refused:
        given = f" {format_gb(kv_bytes)} of KV pools" if pools else ""
        given += f"{' and then' if pools else ''} {late or names}, which the check refused"
    share = given
    size = f" on top of --hicache-size {seen.size_gb:g}" if seen.size_gb else ""
    bounded = f"; without the latter it would have fitted {bound}" if decisive and bound is not None else ""
    yield Finding(
        "side_pools",
        seen.run.index,
        "high" if refused or decisive else "medium",
        tuple(Evidence.of(event) for event in (*refused[:8], *side[:16])) + seen.size_evidence,
        f"Host pools of several kinds were asked for:{share}{size}{bounded}."
        + ("" if decisive or refused else " Their share made the shortage larger.")
        + ("" if refused else outcome(seen)),
        size_after_refusal(seen, refused[0])
        if refused and refused[0].free_bytes is not None
        else safe_size(seen, seen.run.ranks or 1),
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
            f"The server stops: in {seen.release if seen.rules else 'releases up to 0.5.14'} the host pool must be "
            f"larger than the device pool{tokens}, and it is not."
        )
        remedy = "--hicache-ratio above 1, or a --hicache-size larger than the device pool of one rank"
    else:
        text = (
            f"The host pool is not larger than the device pool{counts}: with write-through every token on the "
            f"device is "
            "held by the host too, so a tier of this size keeps nothing that the device does not."
        )
        remedy = "--hicache-ratio 2 or more (or the same as --hicache-size), if the host has the memory"
    yield Finding(
        "host_smaller_than_device",
        seen.run.index,
        "high",
        evidence,
        text,
        remedy,
        "failure" if first.fatal else "degraded",
    )


def power_of_two(seen: RunFacts) -> Iterator[Finding]:
    """Torch's pinned allocator took the next power of two for each buffer."""
    pools = [pool for pool in seen.run.host_pools if pool.bytes >= NOTICEABLE]
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
    failed = seen.was_killed or any(True for _ in seen.run.of(ev.PinFailure)) or failed_early(seen)
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
        tuple(Evidence.of(pool) for pool in pools[:8]) + memory_evidence(seen),
        f"From 0.4.5 to 0.5.4 host buffers come from torch's pinned allocator, which takes the next power of two: "
        f"{format_both(one.bytes)} become {format_both(1 << math.ceil(math.log2(one.bytes)))} a rank, "
        f"{format_both(round(rounded))} in all instead of {format_gb(round(plain))}{there}. The log says "
        f"{seen.release}.",
        "choose a size just below a power of two in GiB (for example --hicache-size 34 → 32 GiB is 34.36 GB), or a "
        "release "
        f"from {first_release_with('allocation', 'host_register')} on, which registers the exact size",
    )
