"""Which options a release has, and what it refuses."""

import re

import pytest

from hicache_lab.base.errors import UnknownFact
from hicache_lab.sglang.launch import LaunchConfig, parse_launch, refusals

KIMI = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp-size 8"

NO_FORMS = (
    "--no-dcp-replicate-q-proj --no-dllm-fdfo --no-enable-decoder-swa-bounded-replay --no-enable-dsa-fused-indexer "
    "--no-enable-fused-qk-norm-rope --no-enable-tf32-matmul --no-enable-tp-lm-head-all-to-all "
    "--no-experts-shared-outer-loras --no-lora-strict-loading --no-mm-enable-dp-encoder --no-ple-offload-embedding "
    "--no-speculative-enable-w4a4-mxfp4-megamoe"
).split()


def messages(found: tuple) -> str:
    return "\n".join(one.message for one in found)


@pytest.mark.parametrize(
    ("options", "version", "expected"),
    [
        ("--hicache-size 48", "0.4.5", "--hicache-size does not exist in 0.4.5.*from 0.4.5.post3 on"),
        ("--hicache-ratio 2", "0.4.4", "--hicache-ratio does not exist in 0.4.4.*from 0.4.4.post2 on"),
        ("--hicache-host-memory-fraction 0.5", "0.5.20", "from 0.5.21 on"),
        ("--disable-hicache-numa-detect", "0.5.10", "0.5.8 to 0.5.9"),
        ("--enable-hicache", "0.5.22", "--enable-hicache does not exist in 0.5.22.*did you mean --enable-hierarchical"),
        ("--no-dllm-fdfo", "0.5.15", "--no-dllm-fdfo does not exist in 0.5.15; releases that have it: from 0.5.16 on"),
        ("--hicache-sizes 48", "0.5.8", "--hicache-sizes is in none of the releases.*did you mean --hicache-size"),
        ("--router-policy random", "0.5.8", "an option of sglang_router.launch_server; the server itself refuses it"),
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
        (
            "--pp 2",
            "0.5.8",
            "--pp: ambiguous in 0.5.8 (ambiguous option: --pp could match --pp-async-batch-depth, --pp-max",
        ),
        ("--hicache-mem-layout page_first_kv_split", "0.5.5.post2", "0.5.5.post2 accepts layer_first, page_first"),
        ("--moe-runner-backend humming", "0.5.8", "--moe-runner-backend humming: 0.5.8 accepts auto, deep_gemm"),
        ("--enable-ep-moe", "0.5.3", "--enable-ep-moe: 0.5.3 answers it with a text and stops"),
        ("--help", "0.5.8", "--help: 0.5.8 answers it with a text and stops"),
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
        ("--enable-h", "0.5.9"),
        ("--hicache-ratio 2", "0.4.4.post3"),
        ("--enable-eplb", "0.4.8"),
        ("--enable-piecewise-cuda-graph", "0.5.3.post3"),
        ("--mamba-full-memory-ratio 0.5", "0.5.3.post3"),
        ("--kt-method AMXINT4", "0.5.5.post3"),
        ("--hicache-mem-layout page_first_kv_split", "0.5.5.post3"),
        ("--enable-double-sparsity", "0.5.10.post1"),
        ("--enable-nan-detection", "0.5.12.post1"),
        *((form, "0.5.23") for form in NO_FORMS),
    ],
)
def test_what_the_release_accepts(options: str, version: str) -> None:
    assert refusals(parse_launch(f"{KIMI} {options}"), version) == ()


def test_the_launchers_own_options_are_not_the_servers() -> None:
    config = parse_launch("python -m sglang_router.launch_server --model-path m --router-policy random --tp 2")
    assert refusals(config, "0.5.8") == ()
    assert config.notes == (
        "--router-policy is an option of sglang_router.launch_server, which keeps it from the server",
    )


def test_a_release_between_those_that_were_read_is_the_nearest_earlier_one() -> None:
    config = parse_launch(f"{KIMI} --enable-nan-detection")
    assert refusals(config, "0.5.12.post9") == ()
    assert "does not exist" in messages(refusals(config, "0.5.13"))


def test_a_release_that_is_none_is_refused() -> None:
    with pytest.raises(UnknownFact, match=r"--sglang-version: expected a release .* got 'main'"):
        refusals(LaunchConfig(), "main")
