"""What was left of host memory, and what would have fitted: parts of several rules."""

from __future__ import annotations

from hicache_lab.base.units import GB, format_gb
from hicache_lab.forensics.incident.facts import Evidence, RunFacts
from hicache_lab.forensics.logs import events as ev

KV = frozenset({"kv", "full"})


# below this, pools of a toy model or a rounding difference say nothing
NOTICEABLE = GB


def size_for(room_bytes: int, ranks: int) -> int:
    """Whole GB a rank if this room is shared."""
    return max(room_bytes // ranks // GB, 0)


def safe_size(seen: RunFacts, ranks: int) -> str:
    """Flags that leave the reserve, for the memory that was there."""
    bound, there = seen.available, "available"
    if bound is None:
        bound, there = seen.limit, "there in all, as if nothing else used it"
    if bound is None:
        return "give the size per rank: (available memory − 10 GiB) / ranks, in GB"
    side = side_factor(seen)
    room = round((bound.bytes - seen.reserve_bytes) / side)
    size = size_for(room, ranks)
    if size < 1:
        return "there is no room for a host tier on this host; launch without --enable-hierarchical-cache"
    kept = f"{ranks} × {size} GB = {ranks * size:,} GB of {format_gb(bound.bytes)} {there}, 10 GiB kept back"
    with_side = "" if side < 1.001 else f", the other pools counted ({side:.2f} × the flag)"
    return f"--hicache-size {size} at most ({kept}{with_side}); less if the server needs more host memory besides"


def side_factor(seen: RunFacts) -> float:
    """All host pools of a rank, one that was refused among them, over those that the flag counts."""
    by_rank: dict[str, list[int]] = {}
    asked = {(r.rank.label, r.pool): r.requested_bytes or 0 for r in refused_pools(seen)}
    given = [(pool.rank.label, pool.pool, pool.bytes) for pool in seen.run.host_pools]
    for rank, name, size in [*given, *((rank, name, size) for (rank, name), size in asked.items() if name not in KV)]:
        by_rank.setdefault(rank, [0, 0])[name not in KV] += size
    return max((1 + side / kv for kv, side in by_rank.values() if kv), default=1.0)


def size_after_refusal(seen: RunFacts, refusal: ev.HostRefusal) -> str:
    """The size per rank that would have passed, from what the refusal says was free."""
    free, asked, ranks = refusal.free_bytes or 0, refusal.requested_bytes or 0, seen.run.ranks or 1
    divides = seen.rule("guard_divides_by_ranks") is True
    room = free * ranks if divides else free - seen.reserve_bytes if asked <= free else free
    own = sum(pool.bytes for pool in seen.run.host_pools if pool.rank == refusal.rank)
    factor = side_factor(seen)
    # this rank's other pools were in memory by then for certain, those of the others perhaps
    least = size_for(round((room + own) / factor), ranks)
    if least < 1:
        return "no whole GB per rank fits: --hicache-ratio with a small device pool, or more host memory"
    most = size_for(round((room + seen.run.host_bytes) / factor), ranks)
    counted = f", the other pools counted ({factor:.2f} × the flag)" if factor > 1.001 else ""
    more = f"; up to {most} if all pools shown were in memory by then" if own and most > least else ""
    return f"--hicache-size {least} or less per rank{counted}{more}"


def memory_evidence(seen: RunFacts) -> tuple[Evidence, ...]:
    """Kills, deaths and the emptiest sample."""
    found = [Evidence.of(kill) for kill in seen.kills[:8]] + [Evidence.of(death) for death in seen.deaths[:8]]
    if seen.exhausted is not None:
        found.append(Evidence.of(seen.exhausted))
    return tuple(found)


def outcome(seen: RunFacts) -> str:
    """How it ended, as far as it is shown; a sentence to append."""
    if seen.kills:
        return f" The kernel killed {len(seen.kills)} process(es)."
    if seen.deaths:
        return f" {len(seen.deaths)} process(es) ended by SIGKILL."
    if seen.exhausted is not None and seen.exhausted.left_bytes is not None:
        return f" Afterwards {format_gb(seen.exhausted.left_bytes)} were left, less than the 10 GiB reserve."
    return " Nothing was killed in what was given."


def refused_pools(seen: RunFacts) -> list[ev.HostRefusal]:
    """What the server's own check refused."""
    return list(seen.run.of(ev.HostRefusal))


def stopped_early(seen: RunFacts) -> bool:
    """Host pools were asked for and the server neither became ready nor was told to stop."""
    return (
        bool(seen.run.host_pools)
        and seen.run.milestone("ready") is None
        and not seen.run.batches.decode
        and (seen.run.milestone("shutdown") is None)
    )


def failed_early(seen: RunFacts) -> bool:
    """``stopped_early``, and the log itself shows that a process ended: it was not merely cut there."""
    quits = any(event.name == "sigquit" for event in seen.run.of(ev.Stall))
    return stopped_early(seen) and bool(quits or seen.run.counts["process_death"] or seen.run.counts["defunct"])
