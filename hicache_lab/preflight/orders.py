"""The orders in which the ranks of a host check and take memory, each to its end: all pools, a refusal or a kill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache_lab.preflight.contradictions import Refusal
from hicache_lab.preflight.question import Question
from hicache_lab.sizing.pools import HostPool, check_pool, resident_bytes
from hicache_lab.sizing.rank import RankPools


@dataclass(frozen=True)
class Order:
    """One order in which the ranks of a host check and take memory; it ends at a refusal or where the limit kills.

    Attributes:
        name: which order.
        refusal: what stopped it, if a check did.
        resident_bytes: what all ranks had taken by then.
        killed_rank: the rank whose pool passes what the host (or its container) can give; None if none does. Of
            ranks that take their pools together it is the first in number that finds nothing left.
        passes: whether every rank got through its checks.
    """

    name: Literal["together", "one after another"]
    refusal: Refusal | None
    resident_bytes: int
    killed_rank: int | None = None
    passes: bool = True


def _check(question: Question, pool: HostPool, taken: int, rank: int, booked: int | None) -> Refusal | None:
    done = check_pool(pool, question.rules, question.view(taken), booked_budget_bytes=booked)
    if done.outcome == "ok":
        return None
    meaning = ""
    if done.budget and question.host:
        in_container = question.rules.guard_reads_cgroup and question.host.cgroup
        free = done.budget.meaning("what the container's limit leaves" if in_container else "available memory")
        meaning = f"the free amount it prints is {free}"
    return Refusal(
        flag="--hicache-size" if question.config.hicache_size else "--hicache-ratio",
        error=done.outcome,
        message=done.message or "",
        meaning=meaning,
        requested_bytes=pool.requested_bytes,
        allowed_bytes=done.budget.budget_bytes if done.budget else None,
        rank=rank,
    )


def together(question: Question, ranks: Sequence[RankPools], booked: int | None) -> Order:
    """All ranks check their first pool, then all take it, then the second pool, and so on."""
    taken, limit = 0, question.limit_bytes or 0
    deepest = max(len(rank.pools) for rank in ranks)
    for depth in range(deepest):
        level = [(number, rank.pools[depth]) for number, rank in enumerate(ranks) if depth < len(rank.pools)]
        checked: dict[tuple[int, int], Refusal | None] = {}
        for number, pool in level:
            left = None if booked is None else booked - sum(p.requested_bytes for p in ranks[number].pools[:depth])
            # ranks of one stage ask the same question; one answer serves them all
            key = (id(ranks[number]), depth)
            if key not in checked:
                checked[key] = _check(question, pool, taken, number, left)
            if checked[key] is not None:
                return Order("together", checked[key], taken, passes=False)
        killed = None
        for number, pool in level:
            taken += resident_bytes(pool, question.rules)
            killed = number if killed is None and taken > limit else killed
        if killed is not None:
            return Order("together", None, taken, killed, passes=depth == deepest - 1)
    return Order("together", None, taken)


def one_after_another(question: Question, ranks: Sequence[RankPools]) -> Order:
    """Each rank takes all its pools before the next one checks."""
    taken, limit = 0, question.limit_bytes or 0
    for number, rank in enumerate(ranks):
        for pool in rank.pools:
            refusal = _check(question, pool, taken, number, None)
            if refusal is not None:
                return Order("one after another", refusal, taken, passes=False)
            taken += resident_bytes(pool, question.rules)
            if taken > limit:
                is_last = number == len(ranks) - 1 and pool is rank.pools[-1]
                return Order("one after another", None, taken, number, passes=is_last)
    return Order("one after another", None, taken)
