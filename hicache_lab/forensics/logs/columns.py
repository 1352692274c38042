"""The batch lines of a log as narrow columns, a few bytes a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hicache_lab.forensics.logs.batch import BOOLEANS, is_integer
from hicache_lab.forensics.logs.rows import NO_TIME, RECORDS, BatchRows

# marks a value that the line does not carry, in columns of whole numbers
MISSING = np.iinfo(np.int32).min
MISSING_FLAG = -1
_FIXED = {
    "at_ms": np.int64,
    "line": np.int32,
    "rank": np.int16,
    "run": np.int16,
    "file": np.int16,
    "iteration": np.int32,
    "fresh": np.bool_,
}
_JOIN = 16

Part = dict[str, npt.NDArray[Any]]


class ColumnStore:
    """Columns by phase, grown in parts; a column that appears late is missing before.

    Whole numbers are int32 (``MISSING`` where absent), fractions float32 (NaN), flags int8 (−1). Rank and file are
    numbers into ``ranks`` and ``files``.
    """

    def __init__(self) -> None:
        self.ranks: list[str] = []
        self.files: list[str] = []
        self._parts: dict[str, list[Part]] = {"decode": [], "prefill": []}
        self._recent: dict[str, list[Part]] = {"decode": [], "prefill": []}

    def add_rows(self, rows: BatchRows, path: str, run: int) -> None:
        """Take batch lines, ``path`` being the file they stand in."""
        number = np.array([self._number(self.ranks, rank.label) for rank in rows.ranks], np.int16)
        recent = self._recent[rows.phase]
        recent.append(
            {
                "at_ms": np.where(rows.at_us == NO_TIME, NO_TIME, rows.at_us // 1000),
                "line": (rows.place // RECORDS).astype(np.int32),
                "rank": number[rows.tag],
                "run": np.full(len(rows), run, np.int16),
                "file": np.full(len(rows), self._number(self.files, path), np.int16),
                "iteration": np.where(rows.iteration < 0, MISSING, rows.iteration).astype(np.int32),
                "fresh": rows.fresh,
                **{name: _narrow(name, values) for name, values in rows.values.items()},
            }
        )
        # large arrays go back to the system when they are freed, the small ones of a part do not
        if len(recent) == _JOIN:
            self._parts[rows.phase].append(_joined(recent))
            recent.clear()

    def columns(self, phase: str) -> dict[str, npt.NDArray[Any]]:
        """All columns of ``decode`` or ``prefill``, each of the phase's length, in the order of the log."""
        out = _joined(self._parts[phase] + self._recent[phase])
        # lines the line parser took may have come before those around them
        place = out["file"].astype(np.int64) << 32 | out["line"]
        if (np.diff(place) < 0).any():
            order = np.argsort(place, kind="stable")
            out = {name: values[order] for name, values in out.items()}
        # one part instead of many from here on
        self._parts[phase], self._recent[phase] = [out] if len(out["line"]) else [], []
        return dict(out)

    @staticmethod
    def _number(names: list[str], name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)


def _joined(parts: Sequence[Part]) -> Part:
    """The parts as one, and empty parts: a column leaves them as it is joined, so that not all are held twice."""
    lengths = [len(part["line"]) for part in parts]
    out: Part = {} if parts else {name: np.empty(0, dtype) for name, dtype in _FIXED.items()}
    for name in dict.fromkeys(name for part in parts for name in part):
        pieces = [
            part.pop(name) if name in part else _narrow(name, np.full(length, np.nan))
            for part, length in zip(parts, lengths, strict=True)
        ]
        if len({piece.dtype for piece in pieces}) > 1:
            # a count beyond 31 bits made one part's column a fraction's: what is missing is NaN then
            pieces = [
                np.where(each == MISSING, np.nan, each).astype(np.float32) if each.dtype == np.int32 else each
                for each in pieces
            ]
        out[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    return out


def _narrow(name: str, values: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    absent = np.isnan(values)
    known = values[~absent] if absent.any() else values
    marker, dtype = (MISSING_FLAG, np.int8) if name in BOOLEANS else (MISSING, np.int32)
    if name in BOOLEANS or (is_integer(name) and max(known.max(initial=0), -known.min(initial=0)) < 2**31 - 1):
        return (values if known is values else np.where(absent, marker, values)).astype(dtype)
    return values.astype(np.float32)
