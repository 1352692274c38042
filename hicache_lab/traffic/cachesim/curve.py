"""The hit rate at every cache size at once, exactly, in one pass over a trace.

Model (``docs``: what it says and what not): blocks are looked up, then all blocks of the request become most recent,
root first; the cache holds ``capacity`` blocks and evicts the least recent. As recency never contradicts the prefix
tree, plain LRU evicts leaves first, and a block is resident only with its whole prefix: the shape of SGLang's radix
cache with ``--radix-eviction-policy lru``. Not modelled here, see ``replay`` for it: eviction of whole tree nodes,
locks of running requests, device slots of running requests, page rounding, one token always recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hicache_lab.base.display import Displayed, one_line
from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.traces import Trace

Ints = npt.NDArray[np.int64]
Count = Literal["blocks", "tokens"]


@dataclass(frozen=True)
class HitCurve(Displayed):
    """Hits at every capacity.

    Attributes:
        hits: hits at capacity ``c`` blocks, shape (largest useful capacity + 1,); ``hits[0]`` is 0.
        references: what was looked up, in the unit of ``hits`` (blocks or tokens).
        requests: requests counted.
        block_tokens: tokens a block.
        count: "blocks" or "tokens".
        origin: the trace's origin.
        basis: "simulated" (exact) or "simulated, sampled".
    """

    hits: npt.NDArray[Any]
    references: int
    requests: int
    block_tokens: int
    count: Count
    origin: str
    basis: str = "simulated"

    def __repr__(self) -> str:
        most = self.largest_useful_blocks * self.block_tokens
        return f"HitCurve({one_line(self.origin)}: up to {self.ceiling:.2%} of {self.count} at {most:,} tokens)"

    @property
    def largest_useful_blocks(self) -> int:
        """From this capacity on, more blocks bring nothing."""
        return len(self.hits) - 1

    @property
    def ceiling(self) -> float:
        """The hit rate of an unlimited cache."""
        return float(self.hits[-1] / self.references) if self.references else 0.0

    def hits_at(self, capacity_blocks: npt.ArrayLike) -> Ints:
        """Hits at one or many capacities in blocks; any shape in, the same shape out."""
        capacity = np.asarray(capacity_blocks, np.int64)
        if (capacity < 0).any():
            raise UsageError("a cache size: expected at least 0 blocks")
        hits: Ints = self.hits[np.minimum(capacity, self.largest_useful_blocks)].astype(np.int64)
        return hits

    def rate_at(self, capacity_blocks: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Hit rates at one or many capacities in blocks."""
        return self.hits_at(capacity_blocks) / max(self.references, 1)

    def rate_at_tokens(self, capacity_tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Hit rates at capacities in tokens; a part of a block holds nothing."""
        return self.rate_at(np.asarray(capacity_tokens, np.int64) // self.block_tokens)

    def blocks_for(self, rate: float) -> int | None:
        """The smallest capacity that reaches a hit rate, or None if none does."""
        needed = int(np.ceil(rate * self.references - 1e-9))
        if needed > int(self.hits[-1]):
            return None
        return int(np.searchsorted(self.hits, needed))


def hit_curve(trace: Trace, *, count: Count = "blocks", count_from: int = 0) -> HitCurve:
    """Compute the hit rate at every capacity.

    Args:
        trace: a workload with prefix information.
        count: what hits count: "blocks", or "tokens" (a last partial block counts its tokens only).
        count_from: requests before this one only warm the cache.

    Returns:
        The curve, exact.

    Raises:
        InputError: the trace holds lengths only.
        UsageError: ``count_from`` leaves no request, or ``count`` is neither.
    """
    from hicache_lab.traffic.cachesim import _loops

    trace.require_prefixes("a hit-rate curve")
    if not 0 <= count_from < trace.requests:
        raise UsageError(f"warm-up: expected 0 to {trace.requests - 1} requests, got {count_from}")
    if count not in ("blocks", "tokens"):
        raise UsageError(f"count: expected blocks or tokens, got {count!r}")
    in_tokens = count == "tokens"
    asked = trace.input_tokens if in_tokens else trace.prompt_blocks
    # half the memory traffic where the numbers allow it; hits_at gives 64-bit numbers either way
    small = trace.references * (trace.block_tokens if in_tokens else 1) < 2**31
    steps: npt.NDArray[Any] = np.zeros(trace.unique_blocks + 3, np.int32 if small else np.int64)
    _loops.stack_distances(
        trace.ids,
        trace.offsets,
        trace.prompt_blocks,
        trace.tail_deficit if in_tokens else np.zeros(0, np.int64),
        trace.block_tokens if in_tokens else 1,
        count_from,
        np.zeros(0, np.int64),
        np.zeros((0, 0), np.int64),
        np.full(trace.unique_blocks, -1, np.int32),
        steps,
    )
    top = _loops.hits_by_capacity(steps)
    # tokens beyond the last whole block are asked for, too, and never hit
    return HitCurve(
        hits=steps[: top + 1],
        references=int(asked[count_from:].sum()),
        requests=trace.requests - count_from,
        block_tokens=trace.block_tokens,
        count=count,
        origin=trace.origin,
    )


def hits_by_request(trace: Trace, capacities_blocks: Sequence[int]) -> Ints:
    """Hit blocks of every request at some capacities, in one pass.

    Args:
        trace: a workload with prefix information.
        capacities_blocks: cache sizes in blocks.

    Returns:
        Hit blocks, shape (requests, capacities); always a leading part of the request's prompt blocks.
    """
    from hicache_lab.traffic.cachesim import _loops

    trace.require_prefixes("hits by request")
    sizes = np.asarray(capacities_blocks, np.int64)
    if sizes.size == 0 or (sizes < 0).any():
        raise UsageError("cache sizes: expected at least one, each of at least 0 blocks")
    hits = np.zeros((trace.requests, sizes.size), np.int64)
    _loops.stack_distances(
        trace.ids,
        trace.offsets,
        trace.prompt_blocks,
        np.zeros(0, np.int64),
        1,
        0,
        sizes,
        hits,
        np.full(trace.unique_blocks, -1, np.int32),
        np.zeros(trace.unique_blocks + 3, np.int64),
    )
    return hits
