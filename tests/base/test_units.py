import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB, format_both, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("449GB", 449 * GB),
        ("449 GB", 449 * GB),
        ("1772GiB", 1772 * GIB),
        ("417Gi", 417 * GIB),
        ("2964436MiB", 2964436 * 2**20),
        ("44.87GB", 44_870_000_000),
        ("2.4TB", 2_400 * GB),
        ("1,024 KiB", 2**20),
        ("0B", 0),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["449", "449G", "", "GB", "-3GB", "4 4GB x", "nanGB", "1e3GB"])
def test_parse_bytes_refuses_what_has_no_clear_unit(text: str) -> None:
    with pytest.raises(UsageError, match="--host-ram"):
        parse_bytes(text, what="--host-ram")


@given(st.integers(0, 10**15), st.sampled_from(["B", "KB", "MiB", "GB", "GiB"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    factor = {"B": 1, "KB": 1000, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}[unit]
    assert parse_bytes(f"{number}{unit}") == number * factor


def test_both_units_side_by_side() -> None:
    assert format_both(300 * GB) == "300.00 GB (279.40 GiB)"
