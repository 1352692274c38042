"""Arrival times as traces write them: numbers, or ISO 8601 with or without a zone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from datetime import UTC

import numpy as np

from hicache_lab.base.times import ISO_WITH_ZONE, iso_time
from hicache_lab.traffic.traces.trace import Floats

_STAMP = re.compile(ISO_WITH_ZONE)


def seconds(text: str) -> float | None:
    """Seconds of a time stamp, or None; only differences mean anything. A stamp without a zone is taken as UTC."""
    try:
        value = float(text)
    except ValueError:
        pass
    else:
        return value if math.isfinite(value) else None
    stamp = _STAMP.fullmatch(text.strip())
    at = iso_time(stamp[1], None, stamp[3]) if stamp else None
    if stamp is None or at is None:
        return None
    aware = at if at.tzinfo else at.replace(tzinfo=UTC)
    # Azure's traces carry seven decimals, one more than a datetime holds
    return aware.timestamp() + float(f"0.{stamp[2] or 0}")


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
