"""A hit-rate curve from a sample of the blocks, for traces too large to hold, with its measured error.

Exact is the default everywhere: below some 10⁸ references the exact curve takes seconds. Sampling by block hash
(SHARDS with the adjustment of its first bucket, Waldspurger et al., FAST'15) reads a file once, chunk by chunk, and
keeps only the sampled ids. Whole sessions and very hot first blocks are in a sample or not, so prefix traces sample
badly: the error is measured, twice, and is part of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.cachesim.curve import hit_curve
from hicache_lab.traffic.traces import Trace
from hicache_lab.traffic.traces.files import Skips
from hicache_lab.traffic.traces.hashed import HashedChunk, choose_block, join_chunks, stream_hashed

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_HEAD_REQUESTS = 20_000
_COMPARED_SIZES = 60


@dataclass(frozen=True)
class SampledCurve:
    """Estimated hit rates.

    Attributes:
        hits: scaled hits at every sampled capacity, one array a sample.
        rate: share of blocks in a sample.
        references: blocks looked up in the whole trace.
        block_tokens: tokens a block.
        origin: the trace's origin.
        head_requests: requests at the beginning for which the exact curve was computed as well.
        head_error_mean: mean absolute error of the hit rate there, over sizes from one block to all.
        head_error_max: the largest error there.
        basis: how it was found.
        skipped: reason → number of lines left out.
    """

    hits: tuple[Floats, ...]
    rate: float
    references: int
    block_tokens: int
    origin: str
    head_requests: int
    head_error_mean: float
    head_error_max: float
    basis: str = "simulated, sampled"
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def smallest_blocks(self) -> int:
        """The smallest capacity a sample can tell from nothing: one sampled block stands for so many."""
        return int(np.ceil(1 / self.rate))

    def rate_at(self, capacity_blocks: npt.ArrayLike) -> Floats:
        """Mean estimated hit rate of the samples."""
        mean: Floats = self._each(capacity_blocks).mean(axis=0)
        return mean

    def spread_at(self, capacity_blocks: npt.ArrayLike) -> Floats:
        """Standard deviation between the samples: what another seed would give."""
        spread: Floats = self._each(capacity_blocks).std(axis=0, ddof=1)
        return spread

    def _each(self, capacity_blocks: npt.ArrayLike) -> Floats:
        capacity = np.floor(np.asarray(capacity_blocks, np.float64) * self.rate + 1e-9).astype(np.int64)
        return np.stack([one[np.minimum(capacity, len(one) - 1)] / max(self.references, 1) for one in self.hits])


def sampled_curve(
    source: Path | Trace,
    rate: float,
    *,
    seeds: Sequence[int] = (1, 2, 3, 4),
    block_tokens: int | None = None,
    skip_bad: bool = False,
) -> SampledCurve:
    """Estimate a curve from samples.

    Args:
        source: a JSONL file with hash_ids (read as a stream), or a trace at hand.
        rate: share of blocks to keep, above 0 and at most 1.
        seeds: one sample each, at least two.
        block_tokens: tokens a block of the file; None: as ``read_hashed`` finds it.
        skip_bad: count bad lines of the file instead of stopping at the first.

    Raises:
        UsageError: a rate or number of seeds that cannot be.
        InputError: a bad line, or the trace holds no prefix information.
    """
    if not 0 < rate <= 1:
        raise UsageError(f"--sample: expected a share above 0 and at most 1, got {rate}")
    if len(seeds) < 2:
        raise UsageError("--sample: expected at least two seeds, or the error cannot be measured")
    if isinstance(source, Trace):
        source.require_prefixes("a hit-rate curve")
    head = _head(source, block_tokens, Skips(skip_bad))
    exact = hit_curve(head)
    estimates = _estimate(_pieces(head, Skips()), rate, seeds)[0]
    sizes = np.unique(np.geomspace(1, max(exact.largest_useful_blocks, 1), _COMPARED_SIZES).astype(np.int64))
    probe = SampledCurve(tuple(estimates), rate, exact.references, head.block_tokens, "", head.requests, 0.0, 0.0)
    error = np.abs(probe.rate_at(sizes) - exact.rate_at(sizes))
    skips = Skips(skip_bad)
    hits, references = _estimate(_pieces(source, skips), rate, seeds)
    return SampledCurve(
        hits=tuple(hits),
        rate=rate,
        references=references,
        block_tokens=head.block_tokens,
        origin=source.origin if isinstance(source, Trace) else f"measured: {source.name}",
        head_requests=head.requests,
        head_error_mean=float(error.mean()),
        head_error_max=float(error.max()),
        skipped=skips.counts,
    )


@dataclass(frozen=True)
class _Piece:
    ids: Ints
    offsets: Ints
    looked_up: Ints


def _pieces(source: Path | Trace, skips: Skips) -> Iterator[_Piece]:
    if isinstance(source, Trace):
        yield _Piece(source.ids.astype(np.int64), source.offsets, source.prompt_blocks)
        return
    for chunk in stream_hashed(source, skips):
        yield _Piece(chunk.raw_ids.astype(np.int64), chunk.offsets, chunk.counts)


def _head(source: Path | Trace, block_tokens: int | None, skips: Skips) -> Trace:
    if isinstance(source, Trace):
        return source.head(_HEAD_REQUESTS)
    chunks: list[HashedChunk] = []
    for chunk in stream_hashed(source, skips):
        chunks.append(chunk)
        if sum(part.input_tokens.size for part in chunks) >= _HEAD_REQUESTS:
            break
    requests = join_chunks(source, chunks)
    return Trace.build(
        requests.raw_ids,
        requests.offsets,
        block_tokens=choose_block(source, requests, block_tokens),
        input_tokens=requests.input_tokens,
    ).head(_HEAD_REQUESTS)


def _estimate(pieces: Iterable[_Piece], rate: float, seeds: Sequence[int]) -> tuple[list[Floats], int]:
    """One pass over the trace, all samples side by side: (scaled hits of each, references of the whole)."""
    from hicache_lab.traffic.cachesim import _loops

    threshold = np.uint64(min(int(rate * 2**64), 2**64 - 1))
    kept: list[list[Ints]] = [[] for _ in seeds]
    bounds: list[list[Ints]] = [[np.zeros(1, np.int64)] for _ in seeds]
    lookups: list[list[Ints]] = [[] for _ in seeds]
    references = 0
    for piece in pieces:
        references += int(piece.looked_up.sum())
        requests = len(piece.offsets) - 1
        for index, seed in enumerate(seeds):
            ids = np.empty(piece.ids.size, np.int64)
            ends = np.empty(requests + 1, np.int64)
            ends[0] = bounds[index][-1][-1]
            looked_up = np.empty(requests, np.int64)
            mixed = np.uint64((seed * 0xD1B54A32D192ED03) % 2**64)
            count = _loops.keep_sampled(
                piece.ids, piece.offsets, piece.looked_up, threshold, mixed, ids, ends, looked_up
            )
            kept[index].append(ids[:count].copy())
            bounds[index].append(ends[1:])
            lookups[index].append(looked_up)
    estimates = []
    for index in range(len(seeds)):
        looked_up = np.concatenate(lookups[index])
        sample = Trace.build(
            np.concatenate(kept[index]),
            np.concatenate(bounds[index]),
            block_tokens=1,
            input_tokens=looked_up,
            prompt_blocks=looked_up,
        )
        hits = hit_curve(sample).hits.astype(np.float64) if sample.references else np.zeros(2)
        # the sample's size differs from its expectation: SHARDS adds the difference to the smallest distance
        hits[1:] += references * rate - sample.references
        estimates.append(np.clip(hits, 0, None) / rate)
    return estimates, references
