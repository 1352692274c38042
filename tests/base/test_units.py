from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB, binary_bytes, docker_bytes, format_both, kubernetes_bytes, parse_bytes


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


NUMBERS = st.decimals(0, 10**9, places=3)


@given(NUMBERS, st.sampled_from(["", "b", "k", "m", "g", "t", "GB", "gib", "KiB"]))
def test_docker_counts_in_powers_of_1024_whatever_follows(number: Decimal, suffix: str) -> None:
    power = " kmgt".find(suffix[:1].lower()) if suffix and suffix[0].lower() in "kmgt" else 0
    assert docker_bytes(f"{number}{suffix}", "-m") == min(int(number * 1024**power), 2**63 - 1)


@given(NUMBERS, st.sampled_from(["", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei", "m"]))
def test_kubernetes_quantities(number: Decimal, suffix: str) -> None:
    power = " kMGTPE".replace("k", "kK"[suffix == "Ki"]).find(suffix[:1]) if suffix not in ("", "m") else 0
    factor = Fraction(1024 if suffix.endswith("i") else 1000) ** power / (1000 if suffix == "m" else 1)
    assert kubernetes_bytes(f"{number}{suffix}", "memory") == min(int(Fraction(number) * factor), 2**63 - 1)


@pytest.mark.parametrize("number", ["9" * 5000, "1e999999", "1e99999999999"])
def test_a_number_without_end_is_the_most_that_is_kept(number: str) -> None:
    assert kubernetes_bytes(number, "memory") == 2**63 - 1
    if number.isdigit():
        assert docker_bytes(number + "g", "-m") == binary_bytes(number + "G", "--mem") == 2**63 - 1
        with pytest.raises(UsageError, match="--host-ram"):
            parse_bytes(number + "GB", what="--host-ram")


@pytest.mark.parametrize("parse", [docker_bytes, kubernetes_bytes, binary_bytes])
@pytest.mark.parametrize("text", ["", "G", "-1g", "nan", "1 2", "4x", "inf"])
def test_what_is_no_size_names_its_flag(parse: Callable[[str, str], int], text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        parse(text, "--memory")


def test_slurm_counts_in_mib_unless_it_says_otherwise() -> None:
    assert binary_bytes("400", "--mem", "m") == 400 * 2**20 and binary_bytes("400G", "--mem", "m") == 400 * GIB
