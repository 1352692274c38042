"""The loops over every block id of a trace (compiled; see ``hicache_lab.base.compiled``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_lab.base.compiled import loop

Ids = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]


@loop
def is_chained(ids: Ids, offsets: Ints, parent: npt.NDArray[np.int32]) -> bool:
    """Whether every id always follows the same id (-1: a request's start); ``parent`` is scratch filled with -2."""
    for r in range(offsets.size - 1):
        before = np.int64(-1)
        for i in range(offsets[r], offsets[r + 1]):
            x = np.int64(ids[i])
            if parent[x] == -2:
                parent[x] = before
            elif parent[x] != before:
                return False
            before = x
    return True


@loop
def _chain(ids: Ids, offsets: Ints, slots: Ints, values: Ints) -> np.int64:
    mask = slots.size - 1
    count = np.int64(0)
    for r in range(offsets.size - 1):
        before = np.int64(0)  # 0: the start of a request; chained ids are counted from 1 here
        for i in range(offsets[r], offsets[r + 1]):
            # before < 2**31 and ids < 2**32: the pair is its own key
            key = (before << np.int64(32)) | np.int64(ids[i])
            mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
            slot = np.int64((mixed ^ (mixed >> np.uint64(29))) & np.uint64(mask))
            while slots[slot] != -1 and slots[slot] != key:
                slot = (slot + 1) & mask
            if slots[slot] == -1:
                slots[slot] = key
                count += 1
                values[slot] = count
            before = values[slot]
            ids[i] = before - 1
    return count


def chain(ids: Ids, offsets: Ints) -> tuple[Ids, int]:
    """Turn content ids into prefix ids: equal only when the whole way from the start of the request is equal."""
    size = 1 << max(int(2 * ids.size - 1).bit_length(), 4)
    chained = ids.copy()
    count = _chain(chained, offsets, np.full(size, -1, np.int64), np.zeros(size, np.int64))
    return chained, int(count)


@loop
def fill_requests(ids: Ids, offsets: Ints, shared: Ints, shared_base: Ints, private_base: Ints, tail_ids: Ints) -> None:
    """Write each request's blocks: its shared prefix, then its session's own blocks, then (if not -1) its tail id."""
    for r in range(offsets.size - 1):
        start = offsets[r]
        end = offsets[r + 1]
        body = end - (1 if tail_ids[r] >= 0 else 0)
        edge = min(start + shared[r], body)
        for i in range(start, edge):
            ids[i] = shared_base[r] + (i - start)
        for i in range(edge, body):
            ids[i] = private_base[r] + (i - start - shared[r])
        if tail_ids[r] >= 0:
            ids[body] = tail_ids[r]
