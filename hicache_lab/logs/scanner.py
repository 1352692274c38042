"""The fast path: one pass over the bytes of a chunk turns ordinary batch lines into columns.

A line is taken only if all of it is understood: a dated prefix, "Decode batch" or "Prefill batch", and nothing but
``key: value`` pairs. Every other line is handed back, by offset, to the patient parser. Keys and rank tags are learned
while reading, so a new field of a new release is a new column, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numba as nb
import numpy as np
import numpy.typing as npt

from hicache_lab.logs.batch import COLUMNS, column_of
from hicache_lab.logs.prefix import rank_of

MAX_KEYS = 192
MAX_COLUMNS = 64
MAX_TAGS = 1024
_TABLE = 2048
_OFFSET_BASIS = 1469598103934665603
_PRIME = 1099511628211
DECODE, PREFILL = 0, 1
NO_ITERATION = -1


def _hash(text: bytes) -> int:
    value = _OFFSET_BASIS
    for byte in text:
        value = ((value ^ byte) * _PRIME) & 0xFFFFFFFFFFFFFFFF
    return value


@nb.njit(cache=True, nogil=True, inline="always")
def _slot(table: npt.NDArray[np.uint64], value: np.uint64) -> int:
    index = np.int64(value & np.uint64(_TABLE - 1))
    while table[index] != 0 and table[index] != value:
        index = (index + np.int64(1)) & np.int64(_TABLE - 1)
    return index


@nb.njit(cache=True, nogil=True, inline="always")
def _two(b: npt.NDArray[np.uint8], i: int) -> int:
    tens, ones = int(b[i]) - 48, int(b[i + 1]) - 48
    if tens < 0 or tens > 9 or ones < 0 or ones > 9:
        return -1
    return tens * 10 + ones


@nb.njit(cache=True, nogil=True)
def _days(year: int, month: int, day: int) -> int:
    # days since 1970-01-01 of a Gregorian date; -1 if there is no such day
    if month < 1 or month > 12 or day < 1 or day > 31:
        return -1
    length = 31
    if month == 4 or month == 6 or month == 9 or month == 11:
        length = 30
    elif month == 2:
        length = 29 if (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)) else 28
    if day > length:
        return -1
    y = year - (1 if month <= 2 else 0)
    era = y // 400
    yoe = y - era * 400
    doy = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + yoe * 365 + yoe // 4 - yoe // 100 + doy - 719468


@nb.njit(cache=True, nogil=True, error_model="numpy")
def _scan(
    b: npt.NDArray[np.uint8],
    n: int,
    position: int,
    line: int,
    key_table: npt.NDArray[np.uint64],
    key_of: npt.NDArray[np.int16],
    column: npt.NDArray[np.int16],
    known: npt.NDArray[np.uint8],
    new_keys: npt.NDArray[np.int64],
    tag_table: npt.NDArray[np.uint64],
    tag_of: npt.NDArray[np.int16],
    new_tags: npt.NDArray[np.int64],
    template: npt.NDArray[np.uint8],
    template_key: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    present: npt.NDArray[np.int64],
    idle: npt.NDArray[np.uint8],
    running_key: int,
    meta: npt.NDArray[np.int64],
    values: npt.NDArray[np.float64],
    others: npt.NDArray[np.int64],
) -> tuple[int, int]:
    # counts: 0 keys, 1 columns, 2 tags, 3 decode rows, 4 prefill rows, 5 other lines, 6 new keys, 7 new tags,
    # 8 access lines with status 200
    # template[kind, f] is the text "key: " that the last line of the kind had as its field f; template_key its length
    # and key number: the next line nearly always has the same, and comparing is cheaper than hashing
    power = np.array([1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15])
    rows_max, others_max = meta.shape[2], others.shape[0]
    last_ymd, last_days = -1, -1
    last_p, last_q, last_stamp = -1, 0, 0
    basis, prime = np.uint64(_OFFSET_BASIS), np.uint64(_PRIME)
    i = position
    while i < n:
        if counts[3] >= rows_max or counts[4] >= rows_max or counts[5] >= others_max:
            return i, line
        start = i
        ok = False
        # the record's bracket: at the line's start, or behind a container's prefix
        p = i
        if b[p] != 91:
            limit = min(n, p + 200)
            while p < limit and b[p] != 10 and not (b[p] == 91 and p + 5 < n and b[p + 5] == 45):
                p += 1
        row, kind, tag = 0, 0, 0
        stamp = 0
        q = p
        if p + 34 < n and b[p] == 91 and b[p + 5] == 45 and b[p + 8] == 45 and b[p + 11] == 32:
            same = last_p >= 0
            k = 1
            while same and k < 24:
                same = b[last_p + k] == b[p + k]
                k += 1
            if same:
                ok, stamp, q = True, last_stamp, p + last_q
            else:
                century, year = _two(b, p + 1), _two(b, p + 3)
                month, day = _two(b, p + 6), _two(b, p + 9)
                hour, minute, second = _two(b, p + 12), _two(b, p + 15), _two(b, p + 18)
                colons = b[p + 14] == 58 and b[p + 17] == 58
                if colons and min(century, year, month, day, hour, minute, second) >= 0:
                    ymd = ((century * 100 + year) * 16 + month) * 32 + day
                    if ymd != last_ymd:
                        last_ymd, last_days = ymd, _days(century * 100 + year, month, day)
                    ok = last_days >= 0 and century * 100 + year >= 1 and hour < 24 and minute < 60 and second < 60
                    stamp = (last_days * 86400 + hour * 3600 + minute * 60 + second) * 1000
                    q = p + 20
                    if ok and (b[q] == 46 or b[q] == 44):
                        ok = q + 4 < n and 48 <= b[q + 1] <= 57 and _two(b, q + 2) >= 0
                        if ok:
                            stamp += int(b[q + 1] - 48) * 100 + _two(b, q + 2)
                            q += 4
                if ok:
                    last_p, last_q, last_stamp = p, q - p, stamp
        if ok:
            # rank tags up to the closing bracket
            h = basis
            first = q
            while q < n and q - first < 100:
                c = b[q]
                if not (c == 32 or c == 46 or c == 95 or 48 <= c <= 57 or 65 <= c <= 90 or 97 <= c <= 122):
                    break
                h = (h ^ np.uint64(c)) * prime
                q += 1
            ok = q + 16 < n and b[q] == 93 and b[q + 1] == 32 and (q == first or b[first] == 32)
            if ok:
                m = q + 2
                if b[m] == 68 and b[m + 1] == 101 and b[m + 2] == 99 and b[m + 3] == 111 and b[m + 4] == 100 and b[m + 5] == 101:
                    kind, m = 0, m + 6
                elif b[m] == 80 and b[m + 1] == 114 and b[m + 2] == 101 and b[m + 3] == 102 and b[m + 4] == 105 and b[m + 5] == 108 and b[m + 6] == 108:
                    kind, m = 1, m + 7
                else:
                    ok = False
                    if b[m] == 73 and b[m + 1] == 78 and b[m + 2] == 70 and b[m + 3] == 79 and b[m + 4] == 58 and q == first:
                        # an access line that ends in 200 OK is only counted
                        e = m
                        clean = True
                        while e < n and b[e] != 10:
                            clean = clean and b[e] != 13 and b[e] != 91
                            e += 1
                        if clean and e < n and b[e - 1] == 75 and b[e - 2] == 79 and b[e - 4] == 48 and b[e - 5] == 48 and b[e - 6] == 50 and b[e - 8] == 34:
                            counts[8] += 1
                            line += 1
                            i = e + 1
                            continue
                if ok:
                    ok = m + 8 < n and b[m] == 32 and b[m + 1] == 98 and b[m + 2] == 97 and b[m + 3] == 116 and b[m + 4] == 99 and b[m + 5] == 104
            if ok:
                at = _slot(tag_table, h)
                if tag_table[at] == 0:
                    if counts[2] >= MAX_TAGS:
                        ok = False
                    else:
                        tag_table[at] = h
                        tag_of[at] = counts[2]
                        new_tags[counts[7], 0], new_tags[counts[7], 1] = first, q - first
                        counts[7] += 1
                        counts[2] += 1
                tag = tag_of[at]
                q = m + 6
        iteration = -1
        if ok and b[q] == 32 and b[q + 1] == 91:
            r = q + 2
            iteration = 0
            while r < n and 48 <= b[r] <= 57 and r - q < 18:
                iteration = iteration * 10 + int(b[r] - 48)
                r += 1
            ok = r < n and b[r] == 93 and r > q + 2
            q = r + 1
        if ok:
            ok = q + 1 < n and (b[q] == 44 or b[q] == 46) and b[q + 1] == 32
            q += 2
        fields, slot = 0, 0
        if ok:
            row = counts[3 + kind]
            for c in range(counts[1]):
                values[kind, c, row] = np.nan
            while True:
                # trailing blanks and the end of the line
                e = q
                while e < n and (b[e] == 32 or b[e] == 13 or b[e] == 44):
                    e += 1
                if e >= n or b[e] == 10:
                    q = e
                    break
                key = -1
                first = q
                length = template_key[kind, slot, 0] if slot < MAX_COLUMNS else 0
                if length > 0 and q + length < n:
                    k = 0
                    while k < length and b[q + k] == template[kind, slot, k]:
                        k += 1
                    if k == length:
                        key = template_key[kind, slot, 1]
                        q += length
                h = basis
                if key < 0:
                    while q < n and q - first < 48:
                        c = b[q]
                        if c == 58 or not (
                            c == 32 or c == 35 or c == 40 or c == 41 or 45 <= c <= 57 or c == 95 or 65 <= c <= 90 or 97 <= c <= 122
                        ):
                            break
                        h = (h ^ np.uint64(c)) * prime
                        q += 1
                    if not (q + 2 < n and q > first and b[q] == 58 and b[q + 1] == 32 and b[first] != 32 and b[q - 1] != 32):
                        ok = False
                        break
                    q += 2
                begin = q
                # the value: a number, a percentage, True or False
                value = 0.0
                if b[q] == 84 and q + 4 < n and b[q + 1] == 114 and b[q + 2] == 117 and b[q + 3] == 101:
                    value, q = 1.0, q + 4
                elif b[q] == 70 and q + 5 < n and b[q + 1] == 97 and b[q + 2] == 108 and b[q + 3] == 115 and b[q + 4] == 101:
                    value, q = 0.0, q + 5
                else:
                    negative = b[q] == 45
                    if negative:
                        q += 1
                    whole = 0
                    digits = 0
                    decimals = 0
                    while q < n and 48 <= b[q] <= 57:
                        whole = whole * 10 + int(b[q] - 48)
                        digits += 1
                        q += 1
                    if digits > 0 and q + 1 < n and b[q] == 46 and 48 <= b[q + 1] <= 57:
                        q += 1
                        while q < n and 48 <= b[q] <= 57:
                            whole = whole * 10 + int(b[q] - 48)
                            decimals += 1
                            q += 1
                    if digits == 0 or digits + decimals > 15:
                        ok = False
                        break
                    value = whole / power[decimals]
                    if negative:
                        value = -value
                    if q < n and b[q] == 37:
                        q += 1
                if q < n and b[q] != 44 and b[q] != 10 and b[q] != 13 and b[q] != 32:
                    ok = False
                    break
                if key < 0:
                    at = _slot(key_table, h)
                    if key_table[at] == 0:
                        if counts[0] >= MAX_KEYS:
                            ok = False
                            break
                        key_table[at] = h
                        key_of[at] = counts[0]
                        new_keys[counts[6], 0], new_keys[counts[6], 1] = first, begin - 2 - first
                        column[counts[0]] = -1
                        counts[6] += 1
                        counts[0] += 1
                    key = key_of[at]
                    if slot < MAX_COLUMNS:
                        for k in range(begin - first):
                            template[kind, slot, k] = b[first + k]
                        template_key[kind, slot, 0] = begin - first
                        template_key[kind, slot, 1] = key
                slot += 1
                target = column[key]
                if target < 0:
                    if counts[1] >= MAX_COLUMNS:
                        ok = False
                        break
                    target = counts[1]
                    column[key] = target
                    counts[1] += 1
                    for kk in range(2):
                        for rr in range(counts[3 + kk] + 1):
                            if rr < rows_max:
                                values[kk, target, rr] = np.nan
                if values[kind, target, row] == values[kind, target, row]:
                    ok = False
                    break
                values[kind, target, row] = value
                present[kind, target] += 1
                fields += known[key]
                if q < n and b[q] == 44:
                    q += 1
                    if q < n and b[q] == 32:
                        q += 1
                    elif q < n and b[q] != 10 and b[q] != 13:
                        ok = False
                        break
                elif q < n and b[q] == 32:
                    # only blanks may follow
                    e = q
                    while e < n and (b[e] == 32 or b[e] == 13):
                        e += 1
                    if e < n and b[e] != 10:
                        ok = False
                        break
        line += 1
        if ok and fields >= 2 and q < n and b[q] == 10:
            meta[kind, 0, row] = line
            meta[kind, 1, row] = stamp
            meta[kind, 2, row] = tag
            meta[kind, 3, row] = iteration
            fresh = 0
            if kind == 1:
                target = column[running_key]
                if target >= 0 and values[1, target, row] == 0.0:
                    idle[tag] = 1
            else:
                fresh = idle[tag]
                idle[tag] = 0
            meta[kind, 4, row] = fresh
            counts[3 + kind] += 1
            i = q + 1
            continue
        if slot > 0:
            # the line had begun like a batch line: its values do not count
            for c in range(counts[1]):
                if values[kind, c, row] == values[kind, c, row]:
                    present[kind, c] -= 1
        q = start
        while q < n and b[q] != 10:
            q += 1
        k = counts[5]
        others[k, 0], others[k, 1], others[k, 2] = start, q, line
        counts[5] += 1
        i = q + 1
    return i, line


@dataclass(frozen=True, slots=True)
class Rows:
    """Batch lines of one phase in one part of a chunk; all arrays have the same length.

    ``values`` maps a column to float64 with NaN where the line does not carry it; ``full`` names columns without NaN.
    """

    line: npt.NDArray[np.int32]
    at_ms: npt.NDArray[np.int64]
    tag: npt.NDArray[np.int16]
    iteration: npt.NDArray[np.int32]
    fresh: npt.NDArray[np.bool_]
    values: dict[str, npt.NDArray[np.float64]]
    full: frozenset[str]

    def __len__(self) -> int:
        return len(self.line)

    def part(self, begin: int, end: int) -> Rows:
        """Rows ``begin`` to ``end`` (exclusive)."""
        if begin == 0 and end == len(self):
            return self
        cut = slice(begin, end)
        values = {name: column[cut] for name, column in self.values.items()}
        return Rows(self.line[cut], self.at_ms[cut], self.tag[cut], self.iteration[cut], self.fresh[cut], values, self.full)


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass found.

    ``others`` are the lines left to the patient parser as (line number, bytes, ended by a newline), ``accesses`` the
    access lines that were only counted, ``samples`` the message of one batch line of each phase.
    """

    decode: Rows
    prefill: Rows
    others: list[tuple[int, bytes, bool]]
    accesses: int
    last_line: int
    samples: dict[str, str]


@dataclass
class Scanner:
    """Keeps what was learned (keys, tags, who was idle) from chunk to chunk of one stream."""

    rows_max: int = 16384
    others_max: int = 32768
    lines: int = 0
    tags: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._key_table = np.zeros(_TABLE, np.uint64)
        self._key_of = np.zeros(_TABLE, np.int16)
        self._column = np.full(MAX_KEYS, -1, np.int16)
        self._known = np.zeros(MAX_KEYS, np.uint8)
        self._tag_table = np.zeros(_TABLE, np.uint64)
        self._tag_of = np.zeros(_TABLE, np.int16)
        self._idle = np.ones(MAX_TAGS, np.uint8)
        self._counts = np.zeros(9, np.int64)
        self._template = np.zeros((2, MAX_COLUMNS, 64), np.uint8)
        self._template_key = np.zeros((2, MAX_COLUMNS, 2), np.int64)
        self._present = np.zeros((2, MAX_COLUMNS), np.int64)
        self._new_keys = np.zeros((MAX_KEYS, 2), np.int64)
        self._new_tags = np.zeros((MAX_TAGS, 2), np.int64)
        self._meta = np.zeros((2, 5, self.rows_max), np.int64)
        self._values = np.empty((2, MAX_COLUMNS, self.rows_max), np.float64)
        self._others = np.zeros((self.others_max, 3), np.int64)
        self._key_names: list[str] = []
        self._running = list(COLUMNS).index("#running-req")
        for key in COLUMNS:
            at = int(_hash(key.encode()) & (_TABLE - 1))
            while self._key_table[at] != 0:
                at = (at + 1) & (_TABLE - 1)
            self._key_table[at] = np.uint64(_hash(key.encode()))
            self._key_of[at] = len(self._key_names)
            self._known[len(self._key_names)] = 1
            self._key_names.append(column_of(key))
        self._counts[0] = len(self._key_names)

    def scan(self, chunk: npt.NDArray[np.uint8], position: int) -> tuple[int, Scan]:
        """Read from ``position`` to the end of the chunk, or until a buffer is full.

        Args:
            chunk: bytes; all but the last line of a stream end with a newline.
            position: where to begin; a line's beginning.

        Returns:
            The position that was reached and what was found.
        """
        begin = position
        self._counts[3:] = 0
        self._present[:] = 0
        position, self.lines = _scan(
            chunk,
            len(chunk),
            position,
            self.lines,
            self._key_table,
            self._key_of,
            self._column,
            self._known,
            self._new_keys,
            self._tag_table,
            self._tag_of,
            self._new_tags,
            self._template,
            self._template_key,
            self._counts,
            self._present,
            self._idle,
            self._running,
            self._meta,
            self._values,
            self._others,
        )
        for at, length in self._new_keys[: self._counts[6]]:
            self._key_names.append(column_of(bytes(chunk[at : at + length]).decode("ascii", "replace")))
        for at, length in self._new_tags[: self._counts[7]]:
            self.tags.append(rank_of(bytes(chunk[at : at + length]).decode("ascii", "replace")).label)
        others = [
            (number, chunk[first:last].tobytes(), last < len(chunk))
            for first, last, number in self._others[: self._counts[5]].tolist()
        ]
        samples = {}
        window = chunk[begin : begin + 65536].tobytes()
        for phase, words in (("decode", b"] Decode batch"), ("prefill", b"] Prefill batch")):
            at = window.find(words)
            if at >= 0 and (end := window.find(b"\n", at)) >= 0:
                samples[phase] = window[at + 2 : end].decode("utf-8", "replace").rstrip("\r")
        accesses = int(self._counts[8])
        return position, Scan(self._rows(DECODE), self._rows(PREFILL), others, accesses, self.lines, samples)

    def _rows(self, kind: int) -> Rows:
        count = int(self._counts[3 + kind])
        line, at_ms, tag, iteration, fresh = self._meta[kind, :, :count]
        values: dict[str, npt.NDArray[np.float64]] = {}
        full: set[str] = set()
        for key, target in enumerate(self._column[: self._counts[0]]):
            if target < 0:
                continue
            present = int(self._present[kind, target])
            if not present:
                continue
            column = self._values[kind, target, :count]
            name = self._key_names[key]
            if name in values:
                values[name] = np.where(np.isnan(values[name]), column, values[name])
                full.discard(name)
            else:
                values[name] = column.copy()
                if present == count:
                    full.add(name)
        return Rows(
            line.astype(np.int32),
            at_ms.copy(),
            tag.astype(np.int16),
            iteration.astype(np.int32),
            fresh.astype(np.bool_),
            values,
            frozenset(full),
        )
