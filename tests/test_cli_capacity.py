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
        (["vectors", "/no/such/file.jsonl"], 1, "/no/such/file.jsonl"),
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
