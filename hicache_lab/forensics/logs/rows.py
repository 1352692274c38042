"""Batch lines as arrays: what a part of a log holds, and which decode lines come first after idling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from hicache_lab.forensics.logs.batch import FIELDS
from hicache_lab.forensics.logs.events import Batch, Rank

# records that one line can hold, and more
RECORDS = 1 << 12
NO_TIME = np.iinfo(np.int64).min
EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Batch lines of one phase in one part of a log; all arrays have the same length.

    ``place`` is the line's number × ``RECORDS``, plus the record's number within the line; ``at_us`` microseconds since
    1970 as printed, or ``NO_TIME``; ``tag`` a number into ``ranks``; ``iteration`` −1 where none is printed;
    ``begin`` and ``end`` the place of the message in ``text``; ``fresh`` (first decode line after idling) is filled in
    by ``Idleness``.
    ``values`` maps a column to float64 with NaN where the line does not carry it.
    """

    phase: str
    text: npt.NDArray[np.uint8]
    ranks: list[Rank]
    place: npt.NDArray[np.int64]
    at_us: npt.NDArray[np.int64]
    tag: npt.NDArray[np.int16]
    iteration: npt.NDArray[np.int32]
    begin: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    fresh: npt.NDArray[np.bool_]
    values: dict[str, npt.NDArray[np.float64]]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> BatchRows:
        """The line parser's batches of one phase, in their order."""
        ranks = list(dict.fromkeys(batch.rank for batch in batches))
        firsts = (batch.where.line * RECORDS for batch in batches)
        times = ((batch.at - EPOCH) // timedelta(microseconds=1) if batch.at else NO_TIME for batch in batches)
        texts = [batch.text.encode() for batch in batches]
        ends = np.cumsum([len(text) for text in texts])
        rows = [_values(batch) for batch in batches]
        nan = float("nan")
        return cls(
            phase=batches[0].phase,
            text=np.frombuffer(b"".join(texts), np.uint8),
            place=np.array([*accumulate(firsts, lambda last, first: max(first, last + 1))], np.int64),
            at_us=np.array([*times], np.int64),
            ranks=ranks,
            tag=np.array([ranks.index(batch.rank) for batch in batches], np.int16),
            iteration=np.array([-1 if each.iteration is None else each.iteration for each in batches], np.int64).astype(
                np.int32
            ),
            begin=np.concatenate(([0], ends[:-1])),
            end=ends,
            fresh=np.zeros(len(batches), np.bool_),
            values={
                name: np.array([row.get(name, nan) for row in rows], np.float64)
                for name in dict.fromkeys(name for row in rows for name in row)
            },
        )

    def line(self, index: int) -> int:
        """The number of a row's line."""
        return int(self.place[index]) // RECORDS

    def __len__(self) -> int:
        return len(self.place)

    def part(self, begin: int, end: int) -> BatchRows:
        """Rows ``begin`` to ``end`` (exclusive); their arrays are views."""
        cut = slice(begin, end)
        arrays = {each.name: getattr(self, each.name)[cut] for each in fields(self)[3:-1]}
        return replace(self, **arrays, values={name: column[cut] for name, column in self.values.items()})

    def index(self, *lines: int) -> list[int]:
        """How many rows stand before each of the lines."""
        return [int(place) for place in np.searchsorted(self.place, np.array(lines, np.int64) * RECORDS)]

    def message(self, index: int) -> str:
        """The message of a row."""
        return self.text[self.begin[index] : self.end[index]].tobytes().decode("utf-8", "replace").strip()


def _values(batch: Batch) -> dict[str, float]:
    own = {name: getattr(batch, name) for name in FIELDS}
    return {**batch.other, **{name: value for name, value in own.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class HandedBack:
    """A line for the line parser; ``outer`` stood before the last record that was taken since the line before it."""

    number: int
    raw: bytes
    ended: bool
    outer: bytes = b""


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """What a chunk, or a part of it, holds: rows of the fast path, the numbers of access lines, and all other lines."""

    others: list[HandedBack]
    last_line: int
    rows: tuple[BatchRows, ...] = ()
    accesses: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class Idleness:
    """Which decode lines come first after idling: SGLang averages since the line before, so theirs includes the pause.

    A rank is idle before its first decode line, and after a prefill line that shows no running request.
    """

    _idle: dict[Rank, bool] = field(default_factory=dict)

    def mark(self, several: Sequence[BatchRows]) -> None:
        """Fill ``fresh`` of the decode rows in; all rows of one part of a log come at once, in any order."""
        number: dict[Rank, int] = {}

        def placed(rows: BatchRows, chosen: npt.NDArray[np.bool_] | slice) -> npt.NDArray[np.int64]:
            tags = np.array([number.setdefault(rank, len(number)) for rank in rows.ranks])[rows.tag[chosen]]
            return np.stack((rows.place[chosen], tags))

        decode = [rows for rows in several if rows.phase == "decode"]
        idle = [rows for rows in several if rows.phase == "prefill" and "running_req" in rows.values]
        none = np.empty((2, 0), np.int64)
        place, tag = np.hstack([none, *(placed(rows, slice(None)) for rows in decode)])
        idle_place, idle_tag = np.hstack([none, *(placed(rows, rows.values["running_req"] == 0) for rows in idle)])
        ranks, fresh = list(number), np.zeros(len(place), np.bool_)
        for index in np.union1d(tag, idle_tag):
            rank = ranks[index]
            mine = np.flatnonzero(tag == index)
            mine = mine[np.argsort(place[mine], kind="stable")]
            idling = np.sort(idle_place[idle_tag == index])
            following = np.searchsorted(place[mine], idling)
            fresh[mine[following[following < len(mine)]]] = True
            if len(mine) and self._idle.get(rank, True):
                fresh[mine[0]] = True
            self._idle[rank] = bool(len(idling)) and bool(following[-1] == len(mine))
        begin = 0
        for rows in decode:
            rows.fresh[:] = fresh[begin : begin + len(rows)]
            begin += len(rows)
