"""The fast path: one pass over the bytes of a chunk turns ordinary batch lines into columns.

A line is taken only if all of it is understood: a dated prefix, "Decode batch" or "Prefill batch", and nothing but
``key: value`` pairs. Every other line is handed back to the patient parser. Keys and rank tags are learned while
reading, so a new field of a new release is a new column, not an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hicache_lab.base.machine_code import loop_of
from hicache_lab.forensics.logs.batch import COLUMNS, column_of
from hicache_lab.forensics.logs.prefix import rank_of
from hicache_lab.forensics.logs.scan_layout import (
    DECODE,
    MAX_COLUMNS,
    MAX_KEYS,
    MAX_TAGS,
    PREFILL,
    SCAN,
    TABLE,
    key_hash,
)


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
        return Rows(
            self.line[cut], self.at_ms[cut], self.tag[cut], self.iteration[cut], self.fresh[cut], values, self.full
        )


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

    rows_max: int = 16424
    others_max: int = 32768
    lines: int = 0
    tags: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._scan_bytes = loop_of("hicache_lab.forensics.logs.scan_kernel", "scan_bytes", SCAN)
        self._key_table = np.zeros(TABLE, np.uint64)
        self._key_of = np.zeros(TABLE, np.int16)
        self._column = np.full(MAX_KEYS, -1, np.int16)
        self._known = np.zeros(MAX_KEYS, np.uint8)
        self._tag_table = np.zeros(TABLE, np.uint64)
        self._tag_of = np.zeros(TABLE, np.int16)
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
            at = int(key_hash(key.encode()) & (TABLE - 1))
            while self._key_table[at] != 0:
                at = (at + 1) & (TABLE - 1)
            self._key_table[at] = np.uint64(key_hash(key.encode()))
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
        position, self.lines = self._scan_bytes(
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
