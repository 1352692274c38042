from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from hicache_lab.base.errors import UnknownFact
from hicache_lab.sglang.launch.flags import known_releases
from hicache_lab.sglang.releases import (
    CHANGES,
    EXAMINED,
    NEWEST,
    READ,
    READ_EQUAL,
    VERIFIED,
    ReleaseRules,
    first_release_where,
    rules_for,
)

# an assertion of the model runner, not of the host tier
UNLIKE = {f"0.4.9.post{number}": {"pp_refuses_mtp"} for number in (3, 4, 5)}


def test_rows_are_in_order_and_name_their_source() -> None:
    order = [Version(since) for since, _, _ in CHANGES]
    assert order == sorted(set(order))
    assert all(".py" in source for _, _, source in CHANGES)


@pytest.mark.parametrize(
    ("version", "era"),
    [
        ("0.4.4", "A"),
        ("0.4.5", "B"),
        ("0.4.6", "C"),
        ("0.4.10.post2", "D"),
        ("0.5.5", "D"),
        ("0.5.5.post3", "E"),
        ("0.5.14", "E"),
        ("0.5.15", "F"),
        ("0.5.18", "F"),
        ("0.5.19", "G"),
        ("0.5.21", "H"),
        ("0.5.22", "I"),
        ("0.5.23", "J"),
    ],
)
def test_eras(version: str, era: str) -> None:
    rules = rules_for(version)
    assert rules.era == era
    assert rules.verified
    assert rules.warning is None


@pytest.mark.parametrize("version", ["0.5.24", "0.6.0rc1", "1.0", "0.5.24.dev7+gabc1234"])
def test_a_newer_release_gets_the_newest_rules_and_says_so(version: str) -> None:
    rules = rules_for(version)
    assert rules.era == "J"
    assert not rules.verified
    assert rules.warning is not None
    assert f"not verified for {version}" in rules.warning


def test_an_unexamined_release_between_two_gets_the_older_rules_and_says_so() -> None:
    rules = rules_for("0.5.15.post2")
    assert (rules.era, rules.verified) == ("F", False)
    assert "0.5.15" in (rules.warning or "")


@pytest.mark.parametrize("version", [*READ_EQUAL, *READ, "0.5.8+cu129", "v0.5.15.post1+rocm700"])
def test_a_release_that_was_read_does_not_warn(version: str) -> None:
    rules = rules_for(version)
    assert (rules.verified, rules.warning) == (True, None)


@pytest.mark.parametrize(("version", "equal"), READ_EQUAL.items())
def test_a_release_read_as_equal_has_the_same_rules(version: str, equal: str) -> None:
    here, there = rules_for(version), rules_for(equal)
    compared = {f.name for f in fields(ReleaseRules)} - {"version", "sources"}
    assert {name for name in compared if getattr(here, name) != getattr(there, name)} <= UNLIKE.get(version, set())


@pytest.mark.parametrize(
    ("rule", "before", "since"),
    [
        ("has_ratio_flag", "0.4.4.post1", "0.4.4.post2"),
        ("mla_bytes_count_layers", "0.4.5", "0.4.5.post1"),
        ("has_size_flag", "0.4.5.post2", "0.4.5.post3"),
        ("shown", "0.4.9.post2", "0.4.9.post3"),
        ("resolution_steps", "0.5.4", "0.5.4.post1"),
        ("allocation", "0.5.4.post1", "0.5.4.post2"),
        ("rounding", "0.5.5.post2", "0.5.5.post3"),
        ("pp_remainder", "0.5.5.post3", "0.5.6"),
        ("dsv4_c128_state", "0.5.12.post1", "0.5.13"),
    ],
)
def test_a_rule_changes_with_the_post_release_that_brought_it(rule: str, before: str, since: str) -> None:
    assert getattr(rules_for(before), rule) != getattr(rules_for(since), rule)


@pytest.mark.parametrize("version", ["0.4.3", "0.1.0"])
def test_releases_without_a_host_tier_are_refused(version: str) -> None:
    with pytest.raises(UnknownFact, match=r"start at 0\.4\.4"):
        rules_for(version)


@pytest.mark.parametrize("version", ["", "latest", "0.5.x", "main", "../../x"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(UnknownFact, match="--sglang-version"):
        rules_for(version)


@given(st.sampled_from(VERIFIED), st.sampled_from(VERIFIED))
def test_what_a_release_gained_it_keeps(one: str, other: str) -> None:
    old, new = sorted((one, other), key=Version)
    before, after = rules_for(old), rules_for(new)
    for gained in ("has_size_flag", "guard_divides_by_ranks", "guard_reads_cgroup", "mamba_host_pool", "size_split"):
        assert getattr(before, gained) <= getattr(after, gained)


def test_first_release_where() -> None:
    assert first_release_where(lambda rules: rules.guard_divides_by_ranks) == "0.5.19"
    assert first_release_where(lambda rules: rules.not_larger == "warn") == "0.5.15"
    assert first_release_where(lambda rules: rules.era == "Z") is None
    assert first_release_where(lambda rules: True) == "0.4.4"


def test_the_examined_releases_are_those_whose_flags_were_read() -> None:
    assert (str(known_releases()[0]), str(known_releases()[-1])) == (VERIFIED[0], NEWEST)
    assert {*VERIFIED, *READ_EQUAL, *READ} <= set(map(str, known_releases()))
    assert f"{VERIFIED[0]} … {NEWEST}" == EXAMINED
