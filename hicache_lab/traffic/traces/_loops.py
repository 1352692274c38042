"""The loops over every block id or every byte of a trace (compiled; see ``hicache_lab.base.compiled``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_lab.base.compiled import njit

Ids = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]


@njit
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


@njit
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


# Keys of a flat JSON object that the scanner knows; what it cannot read goes, line by line, to the json module.
TIMESTAMP, INPUT, OUTPUT, HASHES, BLOCK, OTHER = 0, 1, 2, 3, 4, 5


@njit
def _key_kind(text: npt.NDArray[np.uint8], start: int, end: int, names: npt.NDArray[np.uint8], bounds: Ints) -> int:
    for kind in range(bounds.size - 1):
        length = bounds[kind + 1] - bounds[kind]
        if length == end - start:
            same = True
            for j in range(length):
                if text[start + j] != names[bounds[kind] + j]:
                    same = False
                    break
            if same:
                return kind
    return OTHER


@njit
def _skip(text: npt.NDArray[np.uint8], i: int, n: int) -> int:
    while i < n and (text[i] == 32 or text[i] == 9 or text[i] == 13):
        i += 1
    return i


@njit
def _number(text: npt.NDArray[np.uint8], i: int, n: int) -> tuple[int, np.int64, np.float64]:
    """Read a JSON number without exponent: (position after it or -1, its whole part, its value)."""
    negative = text[i] == 45
    if negative:
        i += 1
    start = i
    whole = np.int64(0)
    while i < n and 48 <= text[i] <= 57:
        whole = whole * 10 + np.int64(text[i] - 48)
        i += 1
    digits = i - start
    if digits == 0 or digits > 18:
        return -1, np.int64(0), np.float64(0.0)
    value = np.float64(whole)
    if i < n and text[i] == 46:
        i += 1
        scale = 0.1
        while i < n and 48 <= text[i] <= 57:
            value += scale * (text[i] - 48)
            scale *= 0.1
            i += 1
        whole = np.int64(-1)  # a fraction where a count is wanted is not for the fast way
    if i < n and (text[i] == 101 or text[i] == 69):
        return -1, np.int64(0), np.float64(0.0)
    if negative:
        return i, -whole, -value
    return i, whole, value


@njit
def _id_list(text: npt.NDArray[np.uint8], i: int, n: int, ids: Ints, at: int) -> tuple[int, int]:
    """Read ``[1, 2, 3]``: (position after it or -1, new length of ``ids``)."""
    i = _skip(text, i + 1, n)
    if i < n and text[i] == 93:
        return i + 1, at
    while i < n:
        end, whole, _ = _number(text, i, n)
        if end < 0 or whole < 0:
            return -1, at
        ids[at] = whole
        at += 1
        i = _skip(text, end, n)
        if i < n and text[i] == 44:
            i = _skip(text, i + 1, n)
        elif i < n and text[i] == 93:
            return i + 1, at
        else:
            return -1, at
    return -1, at


@njit
def _plain_value(text: npt.NDArray[np.uint8], i: int, n: int) -> int:
    """Step over a value nobody needs: a string without escapes, a number, true, false, null; -1 for anything else."""
    if text[i] == 34:
        i += 1
        while i < n and text[i] != 34 and text[i] != 92:
            i += 1
        return i + 1 if i < n and text[i] == 34 else -1
    if text[i] == 91 or text[i] == 123:
        return -1
    while i < n and text[i] != 44 and text[i] != 125:
        i += 1
    return i


@njit
def _scan_line(
    text: npt.NDArray[np.uint8],
    i: int,
    n: int,
    names: npt.NDArray[np.uint8],
    bounds: Ints,
    ids: Ints,
    at: int,
    row: npt.NDArray[np.float64],
) -> int:
    """Read one line into ``row`` (timestamp, input, output, hashes seen, block size); new length of ids, or -1."""
    row[:] = -1.0
    i = _skip(text, i, n)
    if i >= n or text[i] != 123:
        return -1
    i = _skip(text, i + 1, n)
    while i < n and text[i] == 34:
        start = i + 1
        i = start
        while i < n and text[i] != 34 and text[i] != 92:
            i += 1
        if i >= n or text[i] == 92:
            return -1
        kind = _key_kind(text, start, i, names, bounds)
        i = _skip(text, i + 1, n)
        if i >= n or text[i] != 58:
            return -1
        i = _skip(text, i + 1, n)
        if i >= n:
            return -1
        if kind == HASHES:
            if text[i] != 91 or row[HASHES] >= 0:
                return -1
            i, at = _id_list(text, i, n, ids, at)
            row[HASHES] = 1.0
        elif kind == OTHER:
            i = _plain_value(text, i, n)
        else:
            i, whole, value = _number(text, i, n)
            if i >= 0 and (value < 0 or (kind != TIMESTAMP and whole < 0)):
                return -1
            row[kind] = value
        if i < 0:
            return -1
        i = _skip(text, i, n)
        if i < n and text[i] == 44:
            i = _skip(text, i + 1, n)
        elif i < n and text[i] == 125:
            i = _skip(text, i + 1, n)
            return at if i == n and row[HASHES] >= 0 and row[INPUT] >= 0 else -1
        else:
            return -1
    return -1


@njit
def scan_lines(
    text: npt.NDArray[np.uint8],
    names: npt.NDArray[np.uint8],
    bounds: Ints,
    ids: Ints,
    ends: Ints,
    rows: npt.NDArray[np.float64],
    lines: Ints,
) -> int:
    """Read the lines of a chunk.

    Args:
        text: whole lines.
        names: the known keys, one after the other, and
        bounds: where each begins.
        ids: receives block ids.
        ends: receives, per line, the length of ``ids`` after it, or -1 for a line that the json module must read.
        rows: receives, per line, timestamp, input, output, hashes seen, block size (-1: absent).
        lines: receives, per line, its start and end in ``text``, shape (lines, 2).

    Returns:
        The number of lines, blank ones left out (their number shows in ``lines``' gaps).
    """
    n = text.size
    count = 0
    at = 0
    i = 0
    while i < n:
        end = i
        while end < n and text[end] != 10:
            end += 1
        if _skip(text, i, end) < end:
            after = _scan_line(text, i, end, names, bounds, ids, at, rows[count])
            lines[count, 0] = i
            lines[count, 1] = end
            ends[count] = after
            if after >= 0:
                at = after
            count += 1
        i = end + 1
    return count


@njit
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
