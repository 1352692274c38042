"""Exact stack distances in one pass (compiled; see ``hicache_lab.base.compiled``).

A request looks its blocks up, then makes them most recent, the root most recent of all. So the blocks last touched by
request ``p`` are always a suffix of ``p``'s block list, and the blocks of a new request fall into runs, each last
touched by one older request. The distance of a block at depth ``i`` of a run owned by ``p`` is

    (live blocks of requests newer than p) + (i - first live depth of p) + 1

with a tree of sums over requests for the first term, sixteen to a node (short contiguous sums beat a Fenwick tree's
scattered ones): one query and one update for a run instead of one for a block.
(Mattson et al. 1970 for stack distances; the run compression uses that ids are chained prefixes, see ``traces``.)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_lab.base.compiled import loop, part

Ids = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]


@part
def _newer(sums: Ints, starts: Ints, live: np.int64, owner: np.int64) -> np.int64:
    """Live blocks of requests newer than ``owner``: all of them, minus those up to it, summed level by level."""
    total = np.int64(0)
    end = owner + 1
    for level in range(starts.size - 1):
        begin = (end >> 4) << 4
        for k in range(starts[level] + begin, starts[level] + end):
            total += sums[k]
        end = begin >> 4
    for k in range(starts[starts.size - 1], starts[starts.size - 1] + end):
        total += sums[k]
    return live - total


@part
def _add(sums: Ints, starts: Ints, owner: np.int64, amount: np.int64) -> None:
    for level in range(starts.size):
        sums[starts[level] + owner] += amount
        owner >>= 4


@part
def _levels(requests: int) -> Ints:
    """Where each level of the sums begins: single requests, sixteens, 256s, …; the last entry is the whole size."""
    starts = np.zeros(20, np.int64)
    count = 0
    width = np.int64(requests)
    while True:
        count += 1
        starts[count] = starts[count - 1] + width
        if width <= 16:
            return starts[: count + 1]
        width = (width + 15) >> 4


@loop
def stack_distances(
    ids: Ids,
    offsets: Ints,
    looked_up: Ints,
    deficits: Ints,
    unit: int,
    count_from: int,
    sizes: Ints,
    hits_at: Ints,
    last: npt.NDArray[np.int32],
    steps: Ints | npt.NDArray[np.int32],
) -> None:
    """Walk a trace once.

    Args:
        ids: chained block ids.
        offsets: request bounds, shape (requests + 1,).
        looked_up: blocks of each request that count as references.
        deficits: tokens missing in each request's last looked-up block (used when ``unit`` counts tokens), or empty.
        unit: what a hit block counts: 1, or tokens a block.
        count_from: requests before this one warm the cache and count for nothing.
        sizes: capacities whose hits are wanted request by request, or empty.
        hits_at: receives hit blocks, shape (requests, len(sizes)); untouched when ``sizes`` is empty.
        last: scratch filled with -1, shape (id space,): the request that touched a block last.
        steps: receives hits as differences of differences (see ``hits_by_capacity``), shape (id space + 3,).
    """
    requests = offsets.size - 1
    bounds = _levels(requests)
    starts = bounds[:-1]
    sums = np.zeros(bounds[-1], np.int64)
    first_live = np.zeros(requests, np.int64)
    longest = np.int64(0)
    for r in range(requests):
        longest = max(longest, offsets[r + 1] - offsets[r])
    run_ends = np.empty(longest + 1, np.int64)
    owners = np.empty(longest + 1, np.int64)
    live = np.int64(0)
    for r in range(requests):
        start = offsets[r]
        length = offsets[r + 1] - start
        wanted = looked_up[r]
        counts = r >= count_from
        runs = 0
        i = np.int64(0)
        while i < length:
            owner = np.int64(last[ids[start + i]])
            if owner < 0:
                break
            j = i + 1
            while j < length and last[ids[start + j]] == owner:
                j += 1
            if i < wanted:
                distance = _newer(sums, starts, live, owner) + (i - first_live[owner]) + 1
                run = min(j, wanted) - i
                for k in range(sizes.size):
                    hits_at[r, k] += min(max(sizes[k] - distance + 1, 0), run)
                if counts:
                    steps[distance] += unit
                    steps[distance + run] -= unit
                    if j >= wanted and deficits.size > 0 and deficits[r] > 0:
                        steps[distance + run - 1] -= deficits[r]
                        steps[distance + run] += deficits[r]
            run_ends[runs] = j
            owners[runs] = owner
            runs += 1
            i = j
        seen = i
        for k in range(runs):
            begin = run_ends[k - 1] if k > 0 else np.int64(0)
            _add(sums, starts, np.int64(owners[k]), begin - run_ends[k])
            first_live[owners[k]] = run_ends[k]
        for k in range(start, start + length):
            last[ids[k]] = r
        live += length - seen
        _add(sums, starts, np.int64(r), length)


@loop
def hits_by_capacity(steps: Ints | npt.NDArray[np.int32]) -> np.int64:
    """Turn the differences of ``stack_distances`` into hits at every capacity, in place; the highest useful index."""
    distance_count = np.int64(0)
    total = np.int64(0)
    top = np.int64(0)
    for d in range(steps.size):
        distance_count += steps[d]
        if distance_count != 0:
            top = np.int64(d)
        total += distance_count
        steps[d] = total
    return top


@loop
def keep_sampled(
    ids: Ints,
    offsets: Ints,
    looked_up: Ints,
    threshold: np.uint64,
    seed: np.uint64,
    kept: Ints,
    bounds: Ints,
    wanted: Ints,
) -> np.int64:
    """Copy the blocks whose hash lies below ``threshold`` (spatial sampling, Waldspurger et al., FAST'15).

    Args:
        ids: block ids as recorded.
        offsets: request bounds.
        looked_up: blocks of each request that count as references.
        threshold: of the 64-bit hash.
        seed: varies the sample.
        kept: receives the kept ids.
        bounds: receives request bounds in ``kept``; ``bounds[0]`` is set by the caller.
        wanted: receives how many kept blocks of each request count as references.

    Returns:
        The number of kept blocks.
    """
    count = np.int64(0)
    for r in range(offsets.size - 1):
        edge = offsets[r] + looked_up[r]
        wanted[r] = 0
        for i in range(offsets[r], offsets[r + 1]):
            z = (np.uint64(ids[i]) + seed) * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
            if z < threshold:
                kept[count] = ids[i]
                count += 1
                if i < edge:
                    wanted[r] += 1
        bounds[r + 1] = bounds[0] + count
    return count
