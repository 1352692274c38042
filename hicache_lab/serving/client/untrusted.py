"""What comes from a server, made safe to keep: JSON, counts and words that nothing later can trip over."""

from __future__ import annotations

import json
import math
from typing import Any

_MOST = 2**63 - 1  # what a parquet column of whole numbers holds


def read_json(text: str | bytes) -> Any:
    """JSON, with null for NaN and infinities.

    Raises:
        ValueError: it is not JSON, or nested beyond reason.
    """
    try:
        return json.loads(text, parse_constant=lambda _name: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and abs(value) <= _MOST else None


def whole(value: object) -> int | None:
    """A whole number (a decimal is cut), or None."""
    return None if (known := number(value)) is None else int(value if isinstance(value, int) else known)


def count(value: object) -> int | None:
    """A whole number from 0 on that was written as one, or None."""
    known = whole(value) if isinstance(value, int) else None
    return None if known is None or known < 0 else known


def printable(text: str) -> str:
    """One line without control characters, which a terminal would obey."""
    return " ".join("".join(c if c.isprintable() or c.isspace() else "?" for c in text).split())
