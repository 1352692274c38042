"""The fast path's compiled loops; ``fast_path`` owns the buffers and gives them names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hicache_lab.base.compiled import loop, part

MAX_KEYS = 192
MAX_COLUMNS = 64
MAX_TAGS = 1024
TABLE = 2048
KEY_LENGTH = 48
BASIS = 1469598103934665603
PRIME = 1099511628211
DECODE, PREFILL, ACCESS = 0, 1, 2
# places in ``counts``
KEYS, COLUMNS_USED, TAGS, ROWS, OTHERS, NEW_KEYS, NEW_TAGS, ACCESSES = 0, 1, 2, 3, 5, 6, 7, 8
# a record stands at the line's start or behind what a container puts before it
PREFIX_LIMIT = 200
_TAGS_LIMIT = 100

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Shorts = npt.NDArray[np.int16]
Words = npt.NDArray[np.uint64]

_NEWLINE, _RETURN, _SPACE, _COMMA, _DASH, _DOT, _COLON, _OPEN, _CLOSE = 10, 13, 32, 44, 45, 46, 58, 91, 93
_DECODE = np.frombuffer(b"Decode batch", np.uint8)
_PREFILL = np.frombuffer(b"Prefill batch", np.uint8)
_INFO = np.frombuffer(b"INFO:", np.uint8)
_OK = np.frombuffer(b'" 200 OK\n', np.uint8)
_QUOTE = np.frombuffer(b' - "', np.uint8)
_HTTP = np.frombuffer(b" HTTP/", np.uint8)
_TRUE = np.frombuffer(b"True", np.uint8)
_FALSE = np.frombuffer(b"False", np.uint8)
_POWERS = 10.0 ** np.arange(16)
_LENGTHS = np.array([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])
# days of the year before a month
_BEFORE = np.cumsum(np.append(0, _LENGTHS))


@part
def _slot(table: Words, value: np.uint64) -> np.int64:
    index = np.int64(value & np.uint64(TABLE - 1))
    while table[index] != 0 and table[index] != value:
        index = (index + np.int64(1)) & np.int64(TABLE - 1)
    return index


@part
def _is(b: Bytes, n: int, i: int, word: Bytes) -> bool:
    if i + len(word) > n:
        return False
    for k in range(len(word)):  # noqa: SIM110 - compiled: a loop, no generator
        if b[i + k] != word[k]:
            return False
    return True


@part
def _digit(c: int) -> bool:
    return 48 <= c <= 57


@part
def _letter(c: int) -> bool:
    return 65 <= c <= 90 or 97 <= c <= 122


@part
def _two(b: Bytes, i: int) -> int:
    tens, ones = int(b[i]) - 48, int(b[i + 1]) - 48
    if tens < 0 or tens > 9 or ones < 0 or ones > 9:
        return -1
    return tens * 10 + ones


@part
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 of a Gregorian date, −1 if there is no such day."""
    leap = 1 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 0
    if year < 1 or month < 1 or month > 12 or day < 1 or day > _LENGTHS[month] + (leap if month == 2 else 0):
        return -1
    past = year - 1
    before = past * 365 + past // 4 - past // 100 + past // 400 + int(_BEFORE[month]) + (leap if month > 2 else 0)
    return before + day - 719163


@part
def _stamp(b: Bytes, n: int, p: int) -> tuple[int, int]:
    """Milliseconds since 1970 of ``[YYYY-MM-DD HH:MM:SS[.mmm]`` at ``p`` and the place behind it; −1 if it is none."""
    century, year = _two(b, p + 1), _two(b, p + 3)
    month, day = _two(b, p + 6), _two(b, p + 9)
    hour, minute, second = _two(b, p + 12), _two(b, p + 15), _two(b, p + 18)
    if b[p + 14] != _COLON or b[p + 17] != _COLON or min(century, year, month, day, hour, minute, second) < 0:
        return 0, -1
    days = _days(century * 100 + year, month, day)
    if (days == -1 and century * 100 + year != 1969) or hour > 23 or minute > 59 or second > 59:
        return 0, -1
    ms = (days * 86400 + hour * 3600 + minute * 60 + second) * 1000
    q = p + 20
    if b[q] == _DOT or b[q] == _COMMA:
        if q + 4 >= n or not _digit(b[q + 1]) or _two(b, q + 2) < 0:
            return 0, -1
        ms += int(b[q + 1] - 48) * 100 + _two(b, q + 2)
        q += 4
    return ms, q


@part
def _number(b: Bytes, n: int, q: int) -> tuple[float, int]:
    """A number, a percentage, True or False at ``q`` and the place behind it; −1 if it is none."""
    if b[q] == _TRUE[0] or b[q] == _FALSE[0]:
        if _is(b, n, q, _TRUE):
            return 1.0, q + 4
        return 0.0, (q + 5 if _is(b, n, q, _FALSE) else -1)
    negative = b[q] == _DASH
    if negative:
        q += 1
    whole, digits, decimals = 0, 0, 0
    while q < n and _digit(b[q]):
        whole = whole * 10 + int(b[q] - 48)
        digits += 1
        q += 1
    if digits > 0 and q + 1 < n and b[q] == _DOT and _digit(b[q + 1]):
        q += 1
        while q < n and _digit(b[q]):
            whole = whole * 10 + int(b[q] - 48)
            decimals += 1
            q += 1
    # 15 digits are exact in a double
    if digits == 0 or digits + decimals > 15:
        return 0.0, -1
    value = float(whole)
    if decimals > 0:
        value /= _POWERS[decimals]
    if q < n and b[q] == 37:
        q += 1
    return -value if negative else value, q


@part
def _key(b: Bytes, n: int, q: int) -> tuple[np.uint64, int]:
    """The hash of the key at ``q`` and the place behind its ``": "``; −1 if there is no key."""
    first = q
    h = np.uint64(BASIS)
    while q < n and q - first < KEY_LENGTH:
        c = b[q]
        # letters, digits, "#", "_", blanks, brackets, "-./"
        mark = c == _SPACE or c == 35 or c == 40 or c == 41 or c == 95
        if not (mark or _letter(c) or _DASH <= c <= 57):
            break
        h = (h ^ np.uint64(c)) * np.uint64(PRIME)
        q += 1
    if q + 2 >= n or q == first or b[q] != _COLON or b[q + 1] != _SPACE:
        return h, -1
    if b[first] == _SPACE or b[q - 1] == _SPACE:
        return h, -1
    return h, q + 2


@part
def _after_value(b: Bytes, n: int, q: int) -> int:
    """The next key's place behind a value, the line's end, or −1 if something else follows."""
    if q + 2 < n and b[q] == _COMMA and b[q + 1] == _SPACE and (b[q + 2] > _COMMA or b[q + 2] == 35):
        return q + 2
    if q < n and b[q] == _NEWLINE:
        return q
    if q < n and b[q] == _COMMA:
        q += 1
        if q < n and b[q] == _SPACE:
            q += 1
        elif q < n and b[q] != _NEWLINE and b[q] != _RETURN:
            return -1
    e = q
    while e < n and (b[e] == _SPACE or b[e] == _RETURN or b[e] == _COMMA):
        e += 1
    if e >= n or b[e] == _NEWLINE:
        return e
    # blanks before anything but the line's end are not a separator
    return q if b[q - 1] == _SPACE and b[q - 2] == _COMMA and e == q else -1


@part
def _learn(
    h: np.uint64,
    first: int,
    length: int,
    table: Words,
    number_of: Shorts,
    new: Ints,
    counts: Ints,
    of: int,
    new_of: int,
) -> int:
    """The number of a key or a rank tag; a new one is noted with its place in the chunk. −1 when there are too many.

    ``of`` and ``new_of`` are the places in ``counts`` of how many are known and how many are new.
    """
    at = _slot(table, h)
    if table[at] == 0:
        if counts[of] >= len(new):
            return -1
        table[at] = h
        number_of[at] = counts[of]
        new[counts[new_of], 0], new[counts[new_of], 1] = first, length
        counts[new_of] += 1
        counts[of] += 1
    return int(number_of[at])


@part
def _fields(
    b: Bytes, n: int, q: int, kind: int,
    key_table: Words, key_of: Shorts, column: Shorts, known: Bytes, new_keys: Ints,
    template: npt.NDArray[np.uint8], template_key: Ints,
    counts: Ints, present: Ints, values: npt.NDArray[np.float64],
) -> tuple[int, int, int]:  # fmt: skip
    """Read ``key: value, …`` into the next row.

    Returns the place of the line's end (−1: not understood), how many known keys there were, and how many fields.
    ``template[kind, f]`` is the text "key: " that the last line of the kind had as its field ``f``: the next line
    nearly always has the same, and comparing is cheaper than hashing.
    """
    row, rows_max = counts[ROWS + kind], values.shape[2]
    known_keys = 0
    slot = 0
    for c in range(counts[COLUMNS_USED]):
        values[kind, c, row] = np.nan
    while q < n and b[q] != _NEWLINE:
        key = -1
        length = template_key[kind, slot, 0] if slot < MAX_COLUMNS else 0
        if length > 0 and q + length < n:
            k = 0
            while k < length and b[q + k] == template[kind, slot, k]:
                k += 1
            if k == length:
                key = template_key[kind, slot, 1]
                begin = q + length
        if key < 0:
            h, begin = _key(b, n, q)
            if begin < 0:
                return -1, known_keys, slot
            key = _learn(h, q, begin - 2 - q, key_table, key_of, new_keys, counts, KEYS, NEW_KEYS)
            if key < 0:
                return -1, known_keys, slot
            if slot < MAX_COLUMNS:
                for k in range(begin - q):
                    template[kind, slot, k] = b[q + k]
                template_key[kind, slot, 0], template_key[kind, slot, 1] = begin - q, key
        value, q = _number(b, n, begin)
        if q < 0:
            return -1, known_keys, slot
        target = column[key]
        if target < 0:
            if counts[COLUMNS_USED] >= MAX_COLUMNS:
                return -1, known_keys, slot
            target = counts[COLUMNS_USED]
            column[key] = target
            counts[COLUMNS_USED] += 1
            for kk in range(2):
                for rr in range(min(counts[ROWS + kk] + 1, rows_max)):
                    values[kk, target, rr] = np.nan
        if not np.isnan(values[kind, target, row]):
            return -1, known_keys, slot
        values[kind, target, row] = value
        present[kind, target] += 1
        known_keys += known[key]
        slot += 1
        q = _after_value(b, n, q)
        if q < 0:
            return -1, known_keys, slot
    return q, known_keys, slot


@part
def _past_visible(b: Bytes, n: int, q: int) -> int:
    """The place behind the visible ASCII characters at ``q``."""
    while q < n and 33 <= b[q] <= 126:
        q += 1
    return q


@part
def _is_ok_access(b: Bytes, n: int, m: int) -> int:
    """The end of ``INFO: client - "METHOD path HTTP/1.1" 200 OK`` at ``m``; −1 for any other line."""
    if not _is(b, n, m, _INFO):
        return -1
    client = m + len(_INFO)
    while client < n and b[client] == _SPACE:
        client += 1
    q = _past_visible(b, n, client)
    if client == m + len(_INFO) or q == client or not _is(b, n, q, _QUOTE):
        return -1
    q += len(_QUOTE)
    method = q
    while q < n and 65 <= b[q] <= 90:
        q += 1
    if q == method or q >= n or b[q] != _SPACE:
        return -1
    path = q + 1
    q = _past_visible(b, n, path)
    if q == path or not _is(b, n, q, _HTTP):
        return -1
    q += len(_HTTP)
    version = q
    while q < n and (_digit(b[q]) or b[q] == _DOT):
        q += 1
    return q + len(_OK) - 1 if q > version and _is(b, n, q, _OK) else -1


@part
def _hand_back(others: Ints, counts: Ints, begin: int, end: int, line: int, outer: int, outer_end: int) -> None:
    at = counts[OTHERS]
    others[at, 0], others[at, 1], others[at, 2], others[at, 3], others[at, 4] = begin, end, line, outer, outer_end
    counts[OTHERS] += 1


@part
def _drop_row(kind: int, row: int, counts: Ints, present: Ints, values: npt.NDArray[np.float64]) -> None:
    """The row's values do not count after all."""
    for c in range(counts[COLUMNS_USED]):
        if not np.isnan(values[kind, c, row]):
            present[kind, c] -= 1


@part
def _head(b: Bytes, n: int, q: int) -> tuple[int, int]:
    """The place behind "batch, " or "batch [17]. " at ``q`` (−1: none) and the iteration number (−1: none)."""
    iteration = -1
    if q + 2 < n and b[q] == _SPACE and b[q + 1] == _OPEN:
        r = q + 2
        iteration = 0
        while r < n and _digit(b[r]) and r - q < 18:
            iteration = iteration * 10 + int(b[r] - 48)
            r += 1
        if r >= n or b[r] != _CLOSE or r == q + 2:
            return -1, -1
        q = r + 1
    if q + 1 >= n or (b[q] != _COMMA and b[q] != _DOT) or b[q + 1] != _SPACE:
        return -1, -1
    return q + 2, iteration


@loop
def read_lines(
    b: Bytes, n: int, position: int, line: int,
    key_table: Words, key_of: Shorts, column: Shorts, known: Bytes, new_keys: Ints,
    tag_table: Words, tag_of: Shorts, new_tags: Ints, prefix_table: Words,
    template: npt.NDArray[np.uint8], template_key: Ints,
    counts: Ints, present: Ints,
    meta: Ints, values: npt.NDArray[np.float64], others: Ints, accesses: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Read lines until the chunk ends or a buffer is full; returns the place and the number of the last line read.

    The last line read is always handed back, and so is a line below which something stands that might continue it:
    what continues a record is for the line parser to say.
    """
    rows_max, others_max = meta.shape[2], others.shape[0]
    last_p, last_q, last_ms = -1, 0, 0
    # the last line if it was taken, and the prefixes of taken lines that the line parser has not been told of
    taken, taken_begin, taken_end = -1, 0, 0
    outer, outer_end, outer_before, outer_before_end = -1, -1, -1, -1
    i = position
    full = False
    while i < n and not full:
        full = (
            counts[ROWS] >= rows_max - 1
            or counts[ROWS + 1] >= rows_max - 1
            or counts[OTHERS] >= others_max - 4
            or counts[ACCESSES] >= others_max - 1
        )
        p = i
        is_known = True
        if b[p] != _OPEN:
            limit = min(n, p + PREFIX_LIMIT)
            h = np.uint64(BASIS)
            while p < limit and b[p] != _NEWLINE and not (b[p] == _OPEN and p + 5 < n and b[p + 5] == _DASH):
                c = b[p]
                h = (h ^ np.uint64(48 if _digit(c) else c)) * np.uint64(PRIME)
                p += 1
            is_known = prefix_table[_slot(prefix_table, h)] != 0
        end, ms, q, tag, kind, slot = -1, 0, -1, -1, -1, 0
        iteration, m = -1, 0
        is_record = False
        if (
            is_known
            and p + 34 < n
            and b[p] == _OPEN
            and b[p + 5] == _DASH
            and b[p + 8] == _DASH
            and b[p + 11] == _SPACE
        ):
            # neighbours nearly always carry the same second
            k = 1 if last_p >= 0 else 99
            while k < 24 and b[last_p + k] == b[p + k]:
                k += 1
            if k == 24:
                ms, q = last_ms, p + last_q
            else:
                ms, q = _stamp(b, n, p)
                if q >= 0:
                    last_p, last_q, last_ms = p, q - p, ms
        begin = 0
        if q >= 0:
            first = q
            h = np.uint64(BASIS)
            while q < n and q - first < _TAGS_LIMIT:
                c = b[q]
                if not (_letter(c) or _digit(c) or c == _SPACE or c == 46 or c == 95):
                    break
                h = (h ^ np.uint64(c)) * np.uint64(PRIME)
                q += 1
            is_record = q + 16 < n and b[q] == _CLOSE and b[q + 1] == _SPACE and (q == first or b[first] == _SPACE)
            if is_record and not full:
                begin = m = q + 2
                if b[m] == _DECODE[0] and _is(b, n, m, _DECODE):
                    kind, m = DECODE, m + len(_DECODE)
                elif b[m] == _PREFILL[0] and _is(b, n, m, _PREFILL):
                    kind, m = PREFILL, m + len(_PREFILL)
                elif q == first:
                    end = _is_ok_access(b, n, m)
                    kind = ACCESS if end >= 0 else -1
                if kind >= 0 and kind != ACCESS:
                    m, iteration = _head(b, n, m)
                    if m >= 0:
                        tag = _learn(h, first, q - first, tag_table, tag_of, new_tags, counts, TAGS, NEW_TAGS)
                    if tag >= 0:
                        end, known_keys, slot = _fields(
                            b, n, m, kind, key_table, key_of, column, known, new_keys,
                            template, template_key, counts, present, values,
                        )  # fmt: skip
                        if known_keys < 2:
                            end = -1
        line += 1
        if end >= 0 and end + 1 < n:
            if kind == ACCESS:
                accesses[counts[ACCESSES]] = line
                counts[ACCESSES] += 1
            else:
                row = counts[ROWS + kind]
                meta[kind, 0, row], meta[kind, 1, row], meta[kind, 2, row] = line, ms, tag
                meta[kind, 3, row], meta[kind, 4, row], meta[kind, 5, row] = iteration, begin, end
                counts[ROWS + kind] += 1
            taken, taken_begin, taken_end = kind, i, end
            outer_before, outer_before_end = outer, outer_end
            if p > i:
                outer, outer_end = i, p
            i = end + 1
            continue
        if slot > 0:
            # the line had begun like a batch line
            _drop_row(kind, counts[ROWS + kind], counts, present, values)
        if taken >= 0 and not is_record:
            if taken == ACCESS:
                counts[ACCESSES] -= 1
            else:
                counts[ROWS + taken] -= 1
                _drop_row(taken, counts[ROWS + taken], counts, present, values)
            _hand_back(others, counts, taken_begin, taken_end, line - 1, outer_before, outer_before_end)
            outer = outer_end = -1
        end = i
        while end < n and b[end] != _NEWLINE:
            end += 1
        _hand_back(others, counts, i, end, line, outer, outer_end)
        taken = outer = outer_end = -1
        i = end + 1
    return i, line


def key_hash(text: bytes) -> int:
    """FNV-1a of a key."""
    value = BASIS
    for byte in text:
        value = ((value ^ byte) * PRIME) & 0xFFFFFFFFFFFFFFFF
    return value
