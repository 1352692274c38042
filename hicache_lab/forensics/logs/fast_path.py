"""The fast path: one pass over the bytes of a chunk turns ordinary batch lines into columns.

A line is taken only if all of it is understood: a dated prefix, "Decode batch" or "Prefill batch", and nothing but
``key: value`` pairs, or an access line that ended in 200 OK. Every other line is handed back to the line parser, and
so is the line before one that might continue it: both ways of reading give the same. Keys, rank tags and what
containers put before a record are learned while reading, so a new field of a new release is a new column, not an error.

This module brings numba in: import it where a large log is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_lab.forensics.logs.assemble import is_only_a_prefix
from hicache_lab.forensics.logs.batch import column_of, is_integer
from hicache_lab.forensics.logs.events import Rank
from hicache_lab.forensics.logs.fast_path_loops import (
    ACCESSES,
    DECODE,
    KEYS,
    MAX_COLUMNS,
    MAX_KEYS,
    MAX_TAGS,
    NEW_KEYS,
    NEW_TAGS,
    OTHERS,
    PREFILL,
    PREFIX_LIMIT,
    ROWS,
    TABLE,
    key_hash,
    read_lines,
)
from hicache_lab.forensics.logs.prefix import rank_of
from hicache_lab.forensics.logs.rows import RECORDS, BatchRows, ChunkPart, HandedBack
from hicache_lab.forensics.logs.statements import BATCH_COLUMNS

_DATED = re.compile(rb"\[....-")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_MAX_PREFIXES = 512


@dataclass
class FastPath:
    """Keeps what was learned (keys, tags, prefixes) from chunk to chunk of one stream."""

    rows_max: int = 16424
    others_max: int = 32768
    lines: int = 0
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._key_table = np.zeros(TABLE, np.uint64)
        self._key_of = np.zeros(TABLE, np.int16)
        self._column = np.full(MAX_KEYS, -1, np.int16)
        self._known = np.zeros(MAX_KEYS, np.uint8)
        self._tag_table = np.zeros(TABLE, np.uint64)
        self._tag_of = np.zeros(TABLE, np.int16)
        self._prefix_table = np.zeros(TABLE, np.uint64)
        self._prefixes: set[bytes] = set()
        self._counts = np.zeros(9, np.int64)
        self._template = np.zeros((2, MAX_COLUMNS, 64), np.uint8)
        self._template_key = np.zeros((2, MAX_COLUMNS, 2), np.int64)
        self._present = np.zeros((2, MAX_COLUMNS), np.int64)
        self._new_keys = np.zeros((MAX_KEYS, 2), np.int64)
        self._new_tags = np.zeros((MAX_TAGS, 2), np.int64)
        self._meta = np.zeros((2, 6, self.rows_max), np.int64)
        self._values = np.empty((2, MAX_COLUMNS, self.rows_max), np.float64)
        self._others = np.zeros((self.others_max, 5), np.int64)
        self._accesses = np.zeros(self.others_max, np.int64)
        # keys that name the same column share a number: a line with two of them is handed back
        self._key_names = list(dict.fromkeys(BATCH_COLUMNS.values()))
        for key, name in BATCH_COLUMNS.items():
            at = self._insert(self._key_table, key.encode())
            self._key_of[at] = self._key_names.index(name)
        self._known[: len(self._key_names)] = 1
        self._counts[KEYS] = len(self._key_names)

    @staticmethod
    def _insert(table: npt.NDArray[np.uint64], key: bytes) -> int:
        at = key_hash(key) & (TABLE - 1)
        while table[at] != 0:
            at = (at + 1) & (TABLE - 1)
        table[at] = np.uint64(key_hash(key))
        return at

    def read(self, chunk: npt.NDArray[np.uint8], position: int) -> tuple[int, ChunkPart]:
        """Read from ``position`` to the end of the chunk, or until a buffer is full.

        Args:
            chunk: bytes; all but the last line of a stream end with a newline.
            position: where to begin; a line's beginning.

        Returns:
            The position that was reached and what was found.
        """
        counts = self._counts
        counts[ROWS:] = 0
        self._present[:] = 0
        position, self.lines = read_lines(
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
            self._prefix_table,
            self._template,
            self._template_key,
            counts,
            self._present,
            self._meta,
            self._values,
            self._others,
            self._accesses,
        )
        for at, length in self._new_keys[: counts[NEW_KEYS]]:
            self._key_names.append(column_of(bytes(chunk[at : at + length]).decode("ascii", "replace")))
        for at, length in self._new_tags[: counts[NEW_TAGS]]:
            self.ranks.append(rank_of(bytes(chunk[at : at + length]).decode("ascii", "replace")))
        others = [
            HandedBack(
                number,
                chunk[begin:end].tobytes(),
                end < len(chunk),
                chunk[outer:outer_end].tobytes() if outer >= 0 else b"",
            )
            for begin, end, number, outer, outer_end in self._others[: counts[OTHERS]].tolist()
        ]
        self._learn_prefixes(others)
        rows = [self._rows(chunk, kind, phase) for kind, phase in ((DECODE, "decode"), (PREFILL, "prefill"))]
        accesses = self._accesses[: counts[ACCESSES]].copy()
        return position, ChunkPart(others, self.lines, tuple(each for each in rows if len(each)), accesses)

    def _learn_prefixes(self, others: list[HandedBack]) -> None:
        for line in others:
            if line.raw[:1] == b"[" or (match := _DATED.search(line.raw, 0, PREFIX_LIMIT)) is None:
                continue
            prefix = line.raw[: match.start()].translate(_DIGITS)
            if prefix in self._prefixes or len(self._prefixes) >= _MAX_PREFIXES:
                continue
            self._prefixes.add(prefix)
            if is_only_a_prefix(line.raw[: match.start()].decode("utf-8", "replace")):
                self._insert(self._prefix_table, prefix)

    def _rows(self, chunk: npt.NDArray[np.uint8], kind: int, phase: str) -> BatchRows:
        count = int(self._counts[ROWS + kind])
        line, at_ms, tag, iteration, begin, end = self._meta[kind, :, :count]
        values: dict[str, npt.NDArray[np.float64]] = {}
        for key, target in enumerate(self._column[: self._counts[KEYS]]):
            if target >= 0 and self._present[kind, target]:
                name, column = self._key_names[key], self._values[kind, target, :count]
                if name in values:
                    values[name] = np.where(np.isnan(values[name]), column, values[name])
                else:
                    # the line parser makes whole numbers of counts
                    values[name] = np.trunc(column) if is_integer(name) else column.copy()
        return BatchRows(
            phase=phase,
            text=chunk,
            ranks=self.ranks,
            place=line * RECORDS,
            at_us=at_ms * 1000,
            tag=tag.astype(np.int16),
            iteration=iteration.astype(np.int32),
            begin=begin.copy(),
            end=end.copy(),
            fresh=np.zeros(count, np.bool_),
            values=values,
        )
