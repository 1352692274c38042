"""Printed times, in all the forms that logs, tools and traces use."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.times import epoch_time, find_time, in_utc, iso_time, month_time, parse_time

MOMENTS = st.datetimes(datetime(1971, 1, 1), datetime(2400, 1, 1))
ZONES = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(MOMENTS, st.sampled_from("T "), st.sampled_from(".,"))
def test_what_is_printed_is_read_back(at: datetime, gap: str, dot: str) -> None:
    text = f"{at:%Y-%m-%d}{gap}{at:%H:%M:%S}{dot}{at.microsecond:06}"
    assert parse_time(text) == at == find_time(f"rank 3 | {text} INFO")
    assert iso_time(text[:19], text[20:]) == at
    assert iso_time(text[:19], text[20:] + "987") == at


@given(MOMENTS, ZONES)
def test_zones_count_in_parse_and_not_in_find(at: datetime, zone: timezone) -> None:
    zoned = at.replace(tzinfo=zone)
    parsed = parse_time(zoned.isoformat())
    assert parsed == zoned
    assert in_utc(zoned) == zoned.astimezone(UTC).replace(tzinfo=None)
    assert find_time(zoned.isoformat()) == at
    assert in_utc(at) is None


@given(MOMENTS)
def test_months_by_name(at: datetime) -> None:
    at = at.replace(microsecond=0)
    assert month_time(at.year, f"{at:%b}", f"{at.day}", f"{at:%H:%M:%S}") == at
    assert find_time(f"{at:%a %b} {at.day:2} {at:%H:%M:%S} CET {at:%Y}") == at
    assert parse_time(f"{at:%a, %d %b %Y %H:%M:%S} +0000") == at.replace(tzinfo=UTC)


@given(MOMENTS)
def test_seconds_since_1970(at: datetime) -> None:
    assert epoch_time(at.replace(tzinfo=UTC, microsecond=0).timestamp()) == at.replace(microsecond=0)


@pytest.mark.parametrize("text", ["", "2026-02-30 00:00:00", "2026-01-01 25:00:00", "2026-01-01", "12", "yesterday"])
def test_what_is_no_time_is_none(text: str) -> None:
    assert parse_time(text) is None and find_time(text) is None


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    parse_time(text)
    find_time(text)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1e30, 1e30])
def test_no_calendar_reaches_there(seconds: float) -> None:
    assert epoch_time(seconds) is None
    assert month_time(2026, "Foo", "1", "00:00:00") is None and month_time(0, "Jan", "1", "00:00:00") is None
    assert in_utc(datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))) is None
