"""Prefill and decode lines: fields by key, whatever their number and order in a release."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from hicache_lab.forensics.logs.events import Batch, Event
from hicache_lab.forensics.logs.statements import BATCH_COLUMNS

# the columns that have an attribute of their own
FIELDS = tuple(
    each.name for each in fields(Batch)[len(fields(Event)) :] if each.name not in ("phase", "iteration", "other")
)
BOOLEANS = frozenset({"graph"})
_COUNTS = {"mamba_num", "largest_len"} | {column for key, column in BATCH_COLUMNS.items() if key.startswith("#")}

_BATCH = re.compile(r"(Decode|Prefill) batch(?: \[(\d{1,18})\])?[.,] ?")
_VALUE = re.compile(r"(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|inf|nan)%?$|True$|False$")


def column_of(key: str) -> str:
    """The column of a printed key: ``"#running-req"`` → ``running_req``."""
    return BATCH_COLUMNS.get(key) or re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")


def is_integer(column: str) -> bool:
    """Whether a column counts things (``#`` marks a count in every release)."""
    return column in _COUNTS


@dataclass(frozen=True, slots=True)
class BatchFields:
    """What a batch line carries: its phase, its iteration number if printed, and its values by column."""

    phase: str
    iteration: int | None
    values: dict[str, float]


def parse_batch(message: str, *, cut: bool = False) -> BatchFields | None:
    """Read a batch message.

    Args:
        message: the text after the record's prefix.
        cut: the line is known to be cut; its last value may be the beginning of a longer one and is dropped.

    Returns:
        The fields, or None if this is not a batch line with at least two fields that some release prints.
    """
    begin = _BATCH.match(message)
    if begin is None:
        return None
    values: dict[str, float] = {}
    known = 0
    base = ""
    pieces = message[begin.end() :].rstrip().rstrip(",").split(", ")
    if cut:
        pieces.pop()
    for piece in pieces:
        key, found, text = piece.partition(": ")
        if found:
            base = key.strip()
        else:
            key, text = base, piece
        label, equals, inner = text.partition("=")
        if equals and base.startswith(("#token", "token usage")):
            key = f"#{label} token" if base == "#token" else f"{label} {base}"
            text = inner
        elif not found:
            continue
        key, text = key.strip(), text.strip()
        if not _VALUE.match(text):
            continue
        known += key in BATCH_COLUMNS
        values.setdefault(column_of(key), _number(text))
    if known < (1 if cut else 2):
        return None
    return BatchFields(begin[1].lower(), int(begin[2]) if begin[2] else None, values)


def _number(text: str) -> float:
    if text in ("True", "False"):
        return float(text == "True")
    return float(text.rstrip("%"))
