"""Arrival times as traces write them: numbers, or ISO 8601 with or without a zone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from hicache_lab.traffic.traces.trace import Floats

# Azure's 2023 traces carry seven decimals, those of 2024 a zone; datetime alone reads neither everywhere
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*(Z|[+-]\d\d:?\d\d)?")


def seconds(text: str) -> float | None:
    """Seconds of a time stamp, or None; only differences mean anything. A stamp without a zone is taken as UTC."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        return value if math.isfinite(value) else None
    found = _STAMP.fullmatch(text.strip())
    if found is None:
        return None
    day, clock, fraction, zone = found.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}{zone or ''}")
    except ValueError:
        return None
    aware = whole if whole.tzinfo else whole.replace(tzinfo=UTC)
    return aware.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def arrivals(stamps: Sequence[float | None]) -> tuple[Floats | None, tuple[str, ...]]:
    """Times since the first request, and what a reader of the trace must know about them.

    Args:
        stamps: seconds, None where a record has no time or none that can be read.

    Returns:
        Times of shape (requests,), or None unless every request has one; a note where only some have one.
    """
    known = [stamp for stamp in stamps if stamp is not None]
    if not known:
        return None, ()
    if len(known) < len(stamps):
        missing = len(stamps) - len(known)
        return None, (f"{missing} of {len(stamps)} requests have no time that can be read: all times left out",)
    return np.array(known, np.float64) - known[0], ()
