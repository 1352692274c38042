"""What comes back: the verdict on one launch with its numbers, and the settings to take instead."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from hicache_lab.base.display import Displayed, door, one_line
from hicache_lab.base.errors import missing_packages_named
from hicache_lab.base.units import format_gb, gb
from hicache_lab.preflight.contradictions import Refusal
from hicache_lab.preflight.orders import Order
from hicache_lab.preflight.question import Question
from hicache_lab.sizing.guard import AutoSize, beyond_reserve_bytes
from hicache_lab.sizing.pools import resident_bytes
from hicache_lab.sizing.rank import RankPools

if TYPE_CHECKING:
    from pandas import DataFrame

Verdict = Literal["FITS", "TIGHT", "RACE", "REFUSED", "OOM_RISK", "ASSERT", "UNKNOWN"]


@dataclass(frozen=True)
class Answer(Displayed):
    """A verdict with the arithmetic behind it; every number in it is computed from the stated facts.

    Attributes:
        question: what was asked.
        verdict: FITS, TIGHT (only the reserve is left), RACE (the order of the checks decides), REFUSED (by SGLang's
            check or parser), OOM_RISK (the host runs out of memory), ASSERT (the server stops with an assertion) or
            UNKNOWN.
        ranks: the host pools of each rank; empty where nothing is built.
        orders: what happens where the ranks check together, and where they check one after another.
        refusal: the flag and the message with which the server stops, if it does.
        ratio: the resolved ``--hicache-ratio``; None where a size decides.
        size_gb: ``--hicache-size``, GB (1e9) per rank; None where a ratio decides.
        auto: what the release sizes by itself, where neither flag is given.
        warnings: what the numbers do not cover.
        notes: what was assumed.
        missing: facts without which there is no verdict.
        provenance: how the numbers were found.
    """

    question: Question
    verdict: Verdict
    ranks: tuple[RankPools, ...] = ()
    orders: tuple[Order, ...] = ()
    refusal: Refusal | None = None
    ratio: float | None = None
    size_gb: float | None = None
    auto: AutoSize | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    provenance: str = field(default="computed")

    def __repr__(self) -> str:
        model, release = one_line(self.question.geometry.name), self.question.rules.version
        ranks = f", {self.ranks_on_host} × {format_gb(self.per_rank_bytes)}" if self.per_rank_bytes else ""
        return f"Answer({self.verdict}: {model} on {release}{ranks})"

    @cached_property
    def advice(self) -> Advice:
        """The largest size and ratio that fit the same host."""
        advice: Advice = door().largest(self.question)
        return advice

    @property
    @missing_packages_named()
    def pools(self) -> DataFrame:
        """The host pools of the largest rank, and what all ranks of the host take of each."""
        import pandas as pd

        rows = []
        for place, pool in enumerate(self.rank.pools if self.rank else ()):
            everyone = [rank.pools[place] for rank in self.ranks if place < len(rank.pools)]
            taken_bytes = sum(resident_bytes(one, self.question.rules) for one in everyone)
            rows.append(
                {
                    "pool": pool.spec.label,
                    "bytes a token": pool.spec.bytes_per_token,
                    "tokens a rank": pool.tokens,
                    "asked a rank (GB)": round(gb(pool.requested_bytes), 2),
                    "taken on the host (GB)": round(gb(taken_bytes), 2),
                }
            )
        return pd.DataFrame(rows)

    @property
    def rank(self) -> RankPools | None:
        """The largest rank of this host."""
        return max(self.ranks, key=lambda rank: rank.requested_bytes, default=None)

    @property
    def ranks_on_host(self) -> int:
        """Scheduler processes on the host, data-parallel replicas included."""
        return len(self.ranks)

    @property
    def per_rank_bytes(self) -> int:
        """Bytes that the largest rank asks for, all its pools."""
        return self.rank.requested_bytes if self.rank else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that all ranks of the host ask for."""
        return sum(rank.requested_bytes for rank in self.ranks)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that would really become resident on the host."""
        return sum(rank.resident_bytes(self.question.rules) for rank in self.ranks)

    @property
    def margin_bytes(self) -> int | None:
        """What is left on the host when every rank has its pools; negative when it does not fit."""
        limit = self.question.limit_bytes
        return None if limit is None else limit - self.resident_bytes

    @property
    def over_reserve_bytes(self) -> int | None:
        """What is left beyond the releases' reserve."""
        return None if self.margin_bytes is None else beyond_reserve_bytes(self.margin_bytes)

    @property
    def guaranteed_start_bytes(self) -> int | None:
        """Largest equal share a rank with one pool may ask for and start in whatever order the ranks check."""
        if self.question.host is None or not self.ranks:
            return None
        return self.question.budget().certain_start_bytes(self.ranks_on_host)


@dataclass(frozen=True)
class Advice(Displayed):
    """The largest settings with a verdict no worse than asked for; None where none is.

    Attributes:
        size_gb: whole GB (1e9) per rank, as ``--hicache-size`` wants it.
        size_bytes: what all ranks of the host really take with it.
        ratio: ``--hicache-ratio``, in tenths.
        ratio_bytes: what all ranks of the host really take with it.
        size_answer: the verdict on exactly that size.
        ratio_answer: the verdict on exactly that ratio.
    """

    size_gb: int | None
    size_bytes: int | None
    ratio: float | None
    ratio_bytes: int | None
    size_answer: Answer | None = None
    ratio_answer: Answer | None = None

    def __repr__(self) -> str:
        return f"Advice(--hicache-size {self.size_gb}, --hicache-ratio {self.ratio})"
