"""Which options a release has, and what it refuses."""

import re

import pytest

from hicache_lab.base.errors import UnknownFact
from hicache_lab.sglang.launch import LaunchConfig, parse_launch, refusals

KIMI = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8"


def messages(found: tuple) -> str:
    return "\n".join(one.message for one in found)


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        ("--hicache-size 48", "0.4.5", "--hicache-size does not exist in 0.4.5.*from 0.4.5.post3 on"),
        ("--hicache-ratio 2", "0.4.4", "--hicache-ratio does not exist in 0.4.4.*from 0.4.5 on"),
        ("--hicache-host-memory-fraction 0.5", "0.5.20", "from 0.5.21 on"),
        ("--disable-hicache-numa-detect", "0.5.10", "0.5.8 to 0.5.9"),
        ("--enable-hicache", "0.5.22", "--enable-hicache does not exist in 0.5.22"),
        ("--foo 1", "0.5.8", "--foo is in none of the releases 0.4.4 to 0.5.23"),
    ],
)
def test_options_a_release_does_not_have(options: str, version: str, expected: str) -> None:
    found = messages(refusals(parse_launch(f"{KIMI} {options}"), version))
    assert re.fullmatch(f".*{expected}.*", found)


@pytest.mark.parametrize("version", ["0.5.23", "v0.5.23", "0.9.0", "0.5.16.post1"])
def test_what_the_release_has_is_not_reported(version: str) -> None:
    config = parse_launch(f"{KIMI} --tp 8 --hicache-size 48 --enable-hierarchical-cache --trust-remote-code")
    assert refusals(config, version) == ()


def test_options_of_a_configuration_without_a_paste() -> None:
    found = refusals(LaunchConfig(hicache_size=48, other=(("--foo", None),)), "0.4.5")
    assert [one.flag for one in found] == ["--hicache-size", "--foo"]


def test_an_exact_name_of_later_releases_may_be_an_abbreviation_of_an_earlier_one() -> None:
    config = parse_launch("python -m sglang.launch_server --model m")
    assert refusals(config, "0.4.4") == ()


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        (
            "--hicache-mem-layout page_head",
            "0.5.3",
            "0.5.3 accepts layer_first, page_first, page_first_direct",
        ),
        ("--hicache-write-policy write_around", "0.5.8", "accepts write_back"),
        ("--kv-cache-dtype fp4_e2m1", "0.5.21", "--kv-cache-dtype fp4_e2m1: 0.5.21 accepts"),
        ("--hicache_size 48", "0.5.8", "the server only knows --hicache-size"),
        ("--pp 2", "0.5.8", "--pp: ambiguous in 0.5.8"),
        ("--max-total-tokens 100k", "0.5.8", "only 0.5.10 and later"),
        ("--hicache-size 37.5", "0.5.8", "whole GB"),
    ],
)
def test_what_the_release_refuses(options: str, version: str, expected: str) -> None:
    assert expected in messages(refusals(parse_launch(f"{KIMI} {options}"), version))


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ("--hicache-mem-layout page_head", "0.5.6"),
        ("--kv-cache-dtype fp4_e2m1", "0.5.20"),
        ("--pp 2", "0.4.9"),
        ("--max-total-tokens 100k", "0.5.10"),
    ],
)
def test_what_the_release_accepts(options: str, version: str) -> None:
    assert refusals(parse_launch(f"{KIMI} {options}"), version) == ()


def test_a_release_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownFact, match=r"--sglang-version: expected a release .* got 'main'"):
        refusals(LaunchConfig(), "main")
