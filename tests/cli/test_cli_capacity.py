"""The command line as a user types it: exit codes, JSON keys, words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_lab.cli import main

KIMI = [
    "--model",
    "kimi-k2.5",
    "--tp-size",
    "8",
    "--device-tokens",
    "116000",
    "--host-ram",
    "449GB",
    "--available",
    "445GB",
]


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["plan", *KIMI, *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_plan_of_the_incident(capsys: pytest.CaptureFixture[str]) -> None:
    code, record = plan(capsys, "--sglang-version", "0.5.8", "--hicache-size", "300")
    assert (code, record["verdict"], record["per_rank_tokens"]) == (3, "OOM_RISK", 4_269_126)
    assert (round(record["per_rank_gb"], 2), round(record["host_gb"])) == (300.0, 2400)
    code, record = plan(capsys, "--sglang-version", "0.5.19", "--hicache-size", "300")
    assert (code, record["verdict"]) == (3, "REFUSED")
    assert "54.28" in record["message"]
    code, record = plan(capsys, "--sglang-version", "0.5.8", "--hicache-size=48")
    assert (code, record["per_rank_tokens"], round(record["host_gb"], 1)) == (0, 683_061, 384.0)


def test_preflight_reads_a_pasted_line_and_corrects_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "docker run --gpus all -m 400g lmsysorg/sglang:v0.5.8-cu126 \\\n"
        "  python3 -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 \\\n"
        "  --enable-hierarchical-cache --hicache-size=300\n"
    )
    code = main(["preflight", "--host-ram", "449GB", "--device-tokens", "116000", "--json", "--from", str(script)])
    record = json.loads(capsys.readouterr().out)
    assert (code, record["verdict"], record["sglang_version"]) == (3, "OOM_RISK", "0.5.8")
    assert record["available_bytes"] < 449 * 10**9
    corrected = record["corrected_launch"]
    assert f"--hicache-size={record['advice']['hicache_size_gb']}" in corrected
    assert "--hicache-size=300" not in corrected


def test_preflight_after_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    line = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --tp 8 --enable-hierarchical-cache"
    words = ["preflight", "--sglang-version", "0.5.8", "--host-ram", "449GB", "--device-tokens", "116000", "--"]
    assert main([*words, *line.split(), "--hicache-ratio", "2.5"]) == 0
    assert "163.0" in capsys.readouterr().out
    assert main([*words, *line.replace(" --enable-hierarchical-cache", "").split()]) == 0
    assert "no host tier" in capsys.readouterr().out


def test_a_fractional_size_is_refused_as_the_server_does(capsys: pytest.CaptureFixture[str]) -> None:
    line = "python -m sglang.launch_server --model-path moonshotai/Kimi-K2.5 --enable-hierarchical-cache"
    words = ["preflight", "--sglang-version", "0.5.8", "--host-ram", "449GB", "--", *line.split()]
    code = main([*words, "--hicache-size", "37.5"])
    assert code == 3
    assert "37.5" in capsys.readouterr().out


def test_max(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max", *KIMI, "--sglang-version", "0.5.8", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["comfortable"]["hicache_size_gb"] == 48
    assert record["leaving_only_the_reserve"]["hicache_size_gb"] == 54
    assert main(["max", *KIMI, "--sglang-version", "0.5.21"]) == 0
    assert "auto-size" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["plan"], 2, "--model"),
        (["plan", "--model", "kimi-k2.5"], 2, "--sglang-version"),
        (["plan", "--model", "nope", "--sglang-version", "0.5.8"], 1, "nope"),
        (["plan", "--model", "kimi-k2.5", "--sglang-version", "0.1"], 1, "0.4.4"),
        (["plan", "--model", "kimi-k2.5", "--sglang-version", "0.5.8", "--host-ram", "449"], 2, "--host-ram"),
        (["plan", "--model", "{", "--sglang-version", "0.5.8"], 2, "--model"),
        (["max", "--model", "kimi-k2.5", "--sglang-version", "0.5.8"], 2, "--host-ram"),
        (["preflight", "--sglang-version", "0.5.8"], 2, "launch line"),
        (["preflight", "--from", "/no/such/file"], 1, "/no/such/file"),
        (["teapot"], 2, "teapot"),
        ([], 2, "COMMAND"),
    ],
)
def test_errors_name_what_is_wrong(capsys: pytest.CaptureFixture[str], words: list[str], code: int, named: str) -> None:
    assert main(words) == code
    assert named in capsys.readouterr().err


def test_this_host_reads_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(
        ["plan", "--model", "llama-3.1-8b", "--sglang-version", "0.5.8", "--hicache-size", "1", "--this-host", "--json"]
    )
    record = json.loads(capsys.readouterr().out)
    assert code in (0, 3)
    assert record["available_bytes"] > 0


def test_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hicache_lab", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("hicache-lab ")


LLAMA = ["--model", "llama-3.1-8b", "--sglang-version", "0.5.8", "--host-ram", "100GB"]


@pytest.mark.parametrize(
    "words",
    [
        ["--device-kv-gb", "nan"],
        ["--device-kv-gb", "inf"],
        ["--tp-size", "99999999"],
        ["--dp-size", "1000000000"],
        ["--page-size", "10000000000000000000000"],
        ["--swa-full-tokens-ratio", "0"],
        ["--swa-full-tokens-ratio", "1.5"],
        ["--mamba-full-memory-ratio", "-1"],
        ["--max-mamba-cache-size", "0"],
        ["--draft-model", "deepseek-v4-pro"],
        ["--kv-cache-dtype", "fp4_e2m1"],
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA, "--hicache-size", "3", *words]) == 2
    captured = capsys.readouterr()
    assert words[0] in captured.err
    assert captured.out == ""


def test_a_decode_server_builds_a_host_pool_without_hicache(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--", "python", "-m", "sglang.launch_server", "--model-path", "llama-3.1-8b", "--tp", "8"]
    decode = [*line, "--disaggregation-mode", "decode"]
    found = {}
    for version in ("0.5.17", "0.5.18", "0.5.19"):
        facts = ["--sglang-version", version, "--host-ram", "1000GB", "--device-tokens", "100000", "--json"]
        assert main(["preflight", *facts, *decode]) == 0
        found[version] = json.loads(capsys.readouterr().out)
    assert found["0.5.17"]["host_bytes"] == 0
    assert found["0.5.18"]["resolved_ratio"] == 1.0
    assert found["0.5.19"]["resolved_ratio"] == 0.2
    assert any("retracted" in note for note in found["0.5.18"]["launch_notes"])
    chosen = [*decode, "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    facts = ["--sglang-version", "0.5.18", "--host-ram", "1000GB", "--device-tokens", "100000", "--json"]
    assert main(["preflight", *facts, *chosen]) == 0
    assert json.loads(capsys.readouterr().out)["host_bytes"] == 0


def test_a_decode_pool_holds_one_request_from_0_5_21_on(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--", "python", "-m", "sglang.launch_server", "--model-path", "llama-3.1-8b", "--context-length", "65537"]
    facts = ["--sglang-version", "0.5.22", "--host-ram", "1000GB", "--device-tokens", "131072", "--json"]
    assert main(["preflight", *facts, *line, "--disaggregation-mode", "decode"]) == 0
    assert json.loads(capsys.readouterr().out)["resolved_ratio"] == pytest.approx(0.5)


def test_the_container_of_a_pasted_line_limits_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    line = "docker run --memory 64m lmsysorg/sglang:v0.5.18 python -m sglang.launch_server --model-path llama-3.1-8b"
    words = ["preflight", "--this-host", "--json", "--", *line.split(), "--enable-hierarchical-cache"]
    assert main([*words, "--hicache-size", "1"]) == 3
    assert json.loads(capsys.readouterr().out)["available_bytes"] <= 64 * 2**20


def test_max_says_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max", "--model", "phi-4", "--tp-size", "4", "--sglang-version", "0.5.23", "--host-ram", "500GB"]) == 3
    assert "10 KV heads" in capsys.readouterr().out
    v4 = ["max", "--model", "deepseek-v4-pro", "--sglang-version", "0.5.17", "--host-ram", "999GB"]
    assert main([*v4, "--device-tokens", "100000"]) == 0
    assert "take no --hicache-size" in capsys.readouterr().out


def test_a_flag_that_the_release_does_not_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.1-8b", "--host-ram", "100GB", "--device-tokens", "1000", "--json"]
    assert main([*words, "--sglang-version", "0.4.5.post2", "--hicache-size", "3"]) == 3
    assert "unrecognized arguments: --hicache-size" in json.loads(capsys.readouterr().out)["message"]
    assert main([*words, "--sglang-version", "0.4.5.post2"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == []


def test_nothing_is_advised_for_a_host_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--sglang-version", "0.5.8", "--hicache-size", "3"]) == 1
    out = capsys.readouterr().out
    assert "1 rank × 3.00 GB" in out
    assert "do:" not in out
