"""Times as logs, tools and traces print them. A time without a zone stays without one: only its printer knows it."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache

# groups: day and clock, digits after the dot, zone
ISO = r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?"
ISO_WITH_ZONE = ISO + r"\s*(Z|[+-]\d\d:?\d\d)?"
_ISO = re.compile(ISO)
_ISO_WITH_ZONE = re.compile(ISO_WITH_ZONE)
# what `date` prints
_DATE = re.compile(r"^[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d)(?: [AP]M)?(?: [A-Z]{3,5})? (\d{4})")
_MONTHS = {name: number for number, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)}


@lru_cache(maxsize=4096)
def iso_time(stamp: str, fraction: str | None = None, zone: str | None = None) -> datetime | None:
    """``"2026-01-02 03:04:05"``, digits after the dot and a zone → the time, None where there is no such day or hour.

    Digits beyond the microsecond are dropped.
    """
    try:
        at = datetime.fromisoformat(stamp + (zone or ""))
    except ValueError:
        return None
    return at.replace(microsecond=int(fraction[:6].ljust(6, "0"))) if fraction else at


def month_time(year: str | int, month: str, day: str, clock: str) -> datetime | None:
    """``2026``, ``"Jan"``, ``"2"``, ``"03:04:05"`` → the time, as syslog, ``dmesg -T`` and ``date`` print it."""
    return iso_time(f"{int(year):04}-{_MONTHS.get(month, 0):02}-{int(day):02} {clock}")


def parse_time(text: str) -> datetime | None:
    """A text that is one time: ISO 8601 with or without a zone, or RFC 1123; with its zone if it carries one."""
    if match := _ISO_WITH_ZONE.fullmatch(text.strip()):
        return iso_time(match[1], match[2], match[3])
    try:
        return None if text[:1].isdigit() else parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None


def find_time(text: str) -> datetime | None:
    """The first time in a text as it is printed there, without a zone: ISO 8601, or what ``date`` prints."""
    if match := _ISO.search(text):
        return iso_time(match[1], match[2])
    match = _DATE.match(text)
    return month_time(match[4], match[1], match[2], match[3]) if match else None


def epoch_time(seconds: float) -> datetime | None:
    """Seconds since 1970 → UTC without a zone; None outside the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None) if math.isfinite(seconds) else None
    except (OverflowError, OSError, ValueError):
        return None


def in_utc(at: datetime) -> datetime | None:
    """A time with a zone in UTC without one; None for one without a zone, or at the edge of the calendar."""
    try:
        return at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo is not None else None
    except OverflowError:
        return None
