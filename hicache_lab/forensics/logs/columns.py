"""The batch lines of a log as narrow columns, a few bytes a value."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.batch import BOOLEANS, is_integer

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.fast_path import BatchRows

# marks a value that the line does not carry, in columns of whole numbers
MISSING = np.iinfo(np.int32).min
MISSING_FLAG = -1
_FIXED = ("at_ms", "line", "rank", "run", "file", "iteration", "fresh")
_PART = 65536
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
        self._loose: dict[str, list[dict[str, float]]] = {"decode": [], "prefill": []}

    def add_rows(self, rows: BatchRows, phase: str, tags: Sequence[str], path: str, run: int) -> None:
        """Take rows of the fast path."""
        self._settle(phase)
        number = np.array([self._number(self.ranks, tag) for tag in tags] or [0], np.int16)
        part: dict[str, npt.NDArray[Any]] = {
            "at_ms": rows.at_ms,
            "line": rows.line,
            "rank": number[rows.tag],
            "run": np.full(len(rows), run, np.int16),
            "file": np.full(len(rows), self._number(self.files, path), np.int16),
            "iteration": np.where(rows.iteration < 0, MISSING, rows.iteration).astype(np.int32),
            "fresh": rows.fresh,
        }
        for name, values in rows.values.items():
            part[name] = _narrow(name, values, full=name in rows.full)
        self._add(phase, part)

    def add_event(self, batch: ev.Batch, fresh: bool, run: int) -> None:
        """Take one batch event of the line parser."""
        at = batch.at.replace(tzinfo=UTC).timestamp() * 1000 if batch.at else float("nan")
        row: dict[str, float] = {
            "at_ms": at,
            "line": batch.where.line,
            "rank": self._number(self.ranks, batch.rank.label),
            "run": run,
            "file": self._number(self.files, batch.where.file),
            "iteration": float("nan") if batch.iteration is None else batch.iteration,
            "fresh": fresh,
            **batch.other,
        }
        for name in ("running_req", "queue_req", "token", "new_seq", "new_token", "cached_token", "token_usage",
                     "full_token_usage", "swa_token_usage", "gen_throughput", "input_throughput", "graph"):  # fmt: skip
            value = getattr(batch, name)
            if value is not None:
                row[name] = float(value)
        loose = self._loose[batch.phase]
        loose.append(row)
        if len(loose) >= _PART:
            self._settle(batch.phase)

    def columns(self, phase: str) -> dict[str, npt.NDArray[Any]]:
        """All columns of ``decode`` or ``prefill``, each of the phase's length, in the order of the log."""
        self._settle(phase)
        out = _joined(self._parts[phase] + self._recent[phase])
        # lines the line parser took may have come before those around them
        place = out["file"].astype(np.int64) << 32 | out["line"]
        if (np.diff(place) < 0).any():
            order = np.argsort(place, kind="stable")
            out = {name: values[order] for name, values in out.items()}
        # one part instead of many from here on
        self._parts[phase], self._recent[phase] = [out] if len(out["line"]) else [], []
        return dict(out)

    def __len__(self) -> int:
        kept = [*self._parts.values(), *self._recent.values()]
        return sum(len(part["line"]) for parts in kept for part in parts) + sum(map(len, self._loose.values()))

    @staticmethod
    def _number(names: list[str], name: str) -> int:
        if name not in names:
            names.append(name)
        return names.index(name)

    def _settle(self, phase: str) -> None:
        loose = self._loose[phase]
        if not loose:
            return
        nan = float("nan")
        part: dict[str, npt.NDArray[Any]] = {}
        for name in dict.fromkeys(name for row in loose for name in row):
            values = np.array([row.get(name, nan) for row in loose])
            if name == "at_ms":
                part[name] = np.where(np.isnan(values), np.iinfo(np.int64).min, values).astype(np.int64)
            elif name in ("rank", "run", "file"):
                part[name] = values.astype(np.int16)
            elif name == "fresh":
                part[name] = values.astype(np.bool_)
            else:
                part[name] = _narrow(name, values)
        self._add(phase, part)
        self._loose[phase] = []

    def _add(self, phase: str, part: Part) -> None:
        recent = self._recent[phase]
        recent.append(part)
        # large arrays go back to the system when they are freed, the small ones of a scan do not
        if len(recent) == _JOIN:
            self._parts[phase].append(_joined(recent))
            recent.clear()


def _joined(parts: Sequence[Part]) -> Part:
    """The parts as one, and empty parts: a column leaves them as it is joined, so that not all are held twice."""
    names = dict.fromkeys(_FIXED) | dict.fromkeys(name for part in parts for name in part)
    lengths = [len(part["line"]) for part in parts]
    out: dict[str, npt.NDArray[Any]] = {}
    for name in names:
        pieces = [
            part.pop(name) if name in part else _absent(name, length)
            for part, length in zip(parts, lengths, strict=True)
        ]
        if len({piece.dtype for piece in pieces}) > 1:
            # a count beyond 31 bits made one part's column a fraction's: what is missing is NaN then
            pieces = [_as_fractions(piece) for piece in pieces]
        out[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else _absent(name, 0)
    return out


def _as_fractions(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.where(values == MISSING, np.nan, values).astype(np.float32) if values.dtype == np.int32 else values


def _narrow(name: str, values: npt.NDArray[np.float64], *, full: bool = False) -> npt.NDArray[Any]:
    if full:
        if name in BOOLEANS:
            return values.astype(np.int8)
        return values.astype(np.int32 if is_integer(name) and values.max() < 2**31 - 1 else np.float32)
    absent = np.isnan(values)
    if name in BOOLEANS:
        return np.where(absent, MISSING_FLAG, values).astype(np.int8)
    if name in ("line", "iteration") or (is_integer(name) and not (np.abs(values[~absent]) >= 2**31 - 1).any()):
        return np.where(absent, MISSING, values).astype(np.int32)
    return values.astype(np.float32)


def _absent(name: str, length: int) -> npt.NDArray[Any]:
    kinds: dict[str, tuple[float, Any]] = {
        "at_ms": (0, np.int64),
        "rank": (0, np.int16),
        "run": (0, np.int16),
        "file": (0, np.int16),
        "fresh": (0, np.bool_),
    }
    if name in kinds:
        value, dtype = kinds[name]
    elif name in BOOLEANS:
        value, dtype = MISSING_FLAG, np.int8
    elif name in ("line", "iteration") or is_integer(name):
        value, dtype = MISSING, np.int32
    else:
        value, dtype = float("nan"), np.float32
    return np.full(length, value, dtype)
