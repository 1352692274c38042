import json
import os
import re
from pathlib import Path

import pytest

from hicache_lab.base.resources import data_dir
from hicache_lab.cli import main

TRACE = str(data_dir() / "traces" / "mooncake_synthetic.jsonl.zst")
KIMI = ["--model", "kimi-k2.5", "--sglang-version", "0.5.8", "--tp-size", "8", "--device-tokens", "116_000"]

SMALL = ["simulate", TRACE, "--device-tokens", "90000"]


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_curve_of_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "curve", TRACE, "--points", "5", "--count", "blocks")
    assert found["provenance"] == "simulated"
    assert round(found["ceiling"], 3) == 0.640  # type: ignore[call-overload]
    points = found["curve"]
    assert [point["hit_rate"] for point in points] == sorted(point["hit_rate"] for point in points)  # type: ignore[attr-defined]
    assert main(["curve", TRACE]) == 0
    out = capsys.readouterr().out
    assert "3,993 requests" in out and "an unlimited cache hits 65.12% of tokens" in out


def test_curve_compares_host_tiers_in_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["curve", TRACE, *KIMI, "--sizes-gb", "48,300", "--ratios", "2.5", "--host-ram", "449GB"]
    words += ["--available", "445GB", "--prefill-tokens-per-s", "20000", "--load-back-gb-per-s", "20"]
    tiers = answered(capsys, *words, "--mean-resident-tokens", "4000")
    rows = {row["label"]: row for row in tiers["tiers"]["sizes"]}  # type: ignore[index]
    assert rows["--hicache-size 48"]["host_tokens"] == 683_061
    assert rows["--hicache-size 48"]["host_bytes"] == 384_000_500_736
    assert rows["--hicache-size 300"]["verdict"] == "OOM_RISK"
    assert rows["--hicache-ratio 2.5"]["host_tokens"] == 290_001
    assert tiers["tiers"]["largest_safe"]["host_bytes"] < 445e9  # type: ignore[index]
    assert rows["--hicache-size 48"]["hit_rate"] > rows["--hicache-ratio 2.5"]["hit_rate"]
    assert rows["--hicache-size 48"]["ttft_saved_mean_s"] > 0
    assert tiers["concurrent_requests"] == 29
    assert main([*words]) == 0
    out = capsys.readouterr().out
    assert "2,400.00 GB on the host, OOM_RISK" in out and "largest safe" in out


def test_server_flags_are_told_from_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["curve", "--hicache-write-policy", "write_back", TRACE, "--device-tokens", "1000000"]
    found = answered(capsys, *words, "--host-tokens", "1000000,4000000")
    assert found["tiers"]["write_policy"] == "write_back"  # type: ignore[index]
    through = answered(capsys, "curve", TRACE, "--device-tokens", "1000000", "--host-tokens", "1000000")
    assert through["tiers"]["sizes"][0]["host_hit_rate"] == 0  # type: ignore[index]


def test_curve_from_a_sample_shows_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "curve", TRACE, "--sample", "0.3")
    assert found["provenance"] == "simulated, sampled"
    assert found["head_error_max"] > 0  # type: ignore[operator]
    assert main(["curve", TRACE, "--sample", "0.3", "--points", "3"]) == 0
    assert "measured error on the first 3,993 requests" in capsys.readouterr().out


def test_a_sample_takes_what_the_exact_curve_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"input_length": 1024, "output_length": 5, "hash_ids": [%d, %d]}'
    good = "\n".join(line % (n % 3, 100 + n % 3) for n in range(60))
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{good}\nbroken\n")
    assert main(["curve", str(path), "--sample", "0.5"]) == 1  # nothing is dropped silently
    assert "trace.jsonl:61: not JSON" in capsys.readouterr().err
    found = answered(capsys, "curve", str(path), "--sample", "0.5", "--skip-bad-lines")
    assert found["skipped"] == {"bad line": 1} and found["count"] == "blocks" and found["references"] == 120
    points: list[dict[str, float]] = found["curve"]  # type: ignore[assignment]
    assert min(point["capacity_tokens"] for point in points) == 2 * 512  # one sampled block stands for two
    with path.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["curve", "-", "--sample", "0.5", "--skip-bad-lines"]) == 0
    assert capsys.readouterr().out.startswith("measured: standard input: 120 block references")
    path.write_text("\n".join(json.dumps({"prompt": "x" * 900}) for _ in range(20)))
    assert answered(capsys, "curve", str(path), "--sample", "1")["references"] == 60


def test_what_one_cache_does_not_show_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    launch = [TRACE, "--device-tokens", "900000", "--dp-size", "4"]
    assert "every data-parallel rank" in str(answered(capsys, "curve", *launch)["warnings"])
    assert "every data-parallel rank" in str(answered(capsys, "simulate", *launch)["warnings"])


def test_a_ratio_is_taken_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, "curve", TRACE, "--device-tokens", "1000000", "--hicache-ratio", "3")
    assert [row["host_tokens"] for row in found["tiers"]["sizes"]] == [3_000_000]  # type: ignore[index]


def test_simulate_by_the_rules_of_a_release(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    words = ["simulate", "--generate", "multi_turn", "--param", "sessions=60", *KIMI, "--hicache-ratio", "2.5"]
    found = answered(capsys, *words, "--page-size", "64", "--by-request", str(rows), "--concurrency", "4")
    assert found["provenance"] == "replayed" and found["rules"] == "nodes, sglang 0.5.8"
    assert found["host_tokens"] == 290_048 and (found["concurrency"], found["turnaround_steps"]) == (4, 2)
    lines = rows.read_text().splitlines()
    assert len(lines) == found["trace"]["requests"] + 1  # type: ignore[index]
    cached = sum(int(line.split(",")[2]) + int(line.split(",")[3]) for line in lines[1:])
    assert cached / found["trace"]["input_tokens"] == pytest.approx(found["hit_rate"])  # type: ignore[index]
    assert main(words) == 0
    assert "replayed (nodes, sglang 0.5.8)" in capsys.readouterr().out


def test_simulate_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(
        capsys, "simulate", TRACE, "--device-tokens", "2000000", "--host-tokens", "9000000", "--rules", "blocks"
    )
    assert found["provenance"] == "simulated" and 0 < found["host_hit_rate"] < found["hit_rate"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (["curve"], 2, "expected a TRACE file"),
        (["curve", "absent.jsonl"], 2, "no such trace file"),
        (["curve", TRACE, "--generate", "rag"], 2, "not both"),
        (["curve", TRACE, "--param", "seed=3"], 2, "--param belongs to --generate"),
        (["curve", "--generate", "rag", "--param", "seed"], 2, "expected KEY=VALUE"),
        (["curve", TRACE, "--hicache-rato", "2"], 2, "unknown argument"),
        (["curve", TRACE, "--hicache-write-policy", "write_sideways"], 2, "accepts write_back"),
        (["curve", TRACE, "--host-tokens", "5"], 2, "--device-tokens"),
        (["curve", TRACE, "--device-tokens", "5", "--host-ram", "1GB"], 2, "--host-ram needs --model"),
        (["curve", TRACE, "--warm-up", "1.5"], 2, "--warm-up"),
        (["curve", TRACE, "--sample", "2"], 2, "--sample"),
        (["curve", TRACE, "--device-tokens", "500000", "--prefill-tokens-per-s", "5"], 2, "time saved needs"),
        (["curve", TRACE, "--block-tokens", "16"], 1, "does not fit 16"),
        (["simulate", TRACE], 2, "--device-tokens"),
        (["simulate", TRACE, "--device-tokens", "90000", "--hicache-ratio", "2"], 2, "need --model"),
        (["simulate", TRACE, "--device-tokens", "90000", "--host-tokens", "1,2"], 2, "takes one size"),
        (["simulate", TRACE, "--device-tokens", "90000", "--page-size", "48"], 2, "neither a divisor"),
        ([*SMALL, "--radix-eviction-policy", "tlru", "--sglang-version", "0.5.8"], 2, "0.5.8 accepts lru, lfu"),
        ([*SMALL, "--radix-eviction-policy-config", "nope"], 2, "expected JSON"),
        (["curve", TRACE, "--device-tokens", "0"], 2, "at least 1"),
        (["curve", TRACE, "--points", "0"], 2, "at least 1"),
        (["curve", TRACE, "--device-tokens", "9", "--host-tokens=-5"], 2, "at least 0"),
        (["curve", TRACE, "--device-tokens", "9", "--ratios", "nan"], 2, "above 0"),
        (["curve", TRACE, "--device-tokens", "9", "--ratios=-1"], 2, "above 0"),
        (["curve", TRACE, "--device-tokens", "9", "--ratios", "inf"], 2, "above 0"),
        (["curve", TRACE, *KIMI, "--sizes-gb", "0"], 2, "at least 1"),
        (["curve", TRACE, *KIMI, "--hicache-ratio", "nan"], 2, "--hicache-ratio"),
        (["curve", TRACE, "--device-tokens", "9", "--mean-resident-tokens", "0"], 2, "above 0"),
        (["curve", TRACE, "--hicache-ratio", "3"], 2, "--device-tokens"),
        (["curve", TRACE, "--device-tokens", "9", "--hicache-size", "3"], 2, "--hicache-size needs --model"),
        (["curve", TRACE, "--device-tokens", "9", "--disable-radix-cache"], 2, "--disable-radix-cache"),
        (["curve", TRACE, "--radix-eviction-policy", "lfu"], 2, "curve is exact for lru"),
        (["curve", TRACE, "--sample", "0.1", "--device-tokens", "9"], 2, "--device-tokens: --sample estimates"),
        (["curve", "--generate", "multi_turn", "--param", "sessions_per_s=0"], 2, "above 0"),
        (["curve", "--generate", "multi_turn", "--param", "turns=nan"], 2, "above 0"),
        (["curve", "--generate", "multi_turn", "--param", "block_tokens=0"], 2, "at least 1"),
        (["curve", "--generate", "rag", "--param", "requests=99999999999999"], 2, "does not fit into memory"),
        ([*SMALL, "--page-size", "0"], 2, "--page-size"),
        ([*SMALL, "--rules", "blocks", "--radix-eviction-policy", "lfu"], 2, "--rules nodes"),
        ([*SMALL, "--rules", "blocks", "--concurrency", "4"], 2, "--rules nodes"),
        ([*SMALL, "--rules", "blocks", "--turnaround-steps", "1"], 2, "--rules nodes"),
        ([*SMALL, "--concurrency", "4", "--turnaround-steps", "x"], 2, "expected a whole number, got 'x'"),
        (["simulate", TRACE, "--device-tokens", "1e5"], 2, "expected a whole number, got '1e5'"),
        (["curve", TRACE, "--device-tokens", "9", "--host-tokens", ","], 2, "expected a number, or several"),
        (["curve", TRACE, "--device-tokens", "9", "--ratios", "2,x"], 2, "expected a number above 0, got x"),
        ([*SMALL, "--page-size", "64", "--chunked-prefill-size", "100"], 2, "multiples of the page of 64 tokens"),
        ([*SMALL, "--turnaround-steps", "1"], 2, "give --concurrency too"),
        ([*SMALL, "--concurrency", "4", "--turnaround-steps=-1"], 2, "--turnaround-steps: expected at least 0"),
        ([*SMALL, "--host-tokens", "100000", "--hicache-ratio", "3"], 2, "--host-tokens"),
        (["simulate", TRACE, "--device-tokens", "90000", "--by-request", "{tmp}/missing/rows.csv"], 2, "--by-request"),
    ],
)  # fmt: skip
def test_bad_input_is_named(
    words: list[str], code: int, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{tmp}", str(tmp_path)) for word in words]) == code
    assert complaint in capsys.readouterr().err


def keys(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value))
    return set(value).union(*map(keys, value.values())) if isinstance(value, dict) else set()


def test_every_key_that_is_printed_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulate-json.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([a-z][a-z0-9_]*)`", page))
    speeds = ["--prefill-tokens-per-s", "20000", "--load-back-gb-per-s", "20"]
    small = ["--generate", "multi_turn", "--param", "sessions=9", *KIMI, *speeds]
    whole = answered(capsys, "curve", *small, "--host-ram", "449GB", "--mean-resident-tokens", "4000")
    printed = (
        keys(whole)
        | keys(answered(capsys, "simulate", *small))
        | keys(answered(capsys, "curve", TRACE, "--sample", "0.3"))
    )
    assert printed - explained == set()


def test_rows_that_cannot_be_written_are_refused_before_the_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder, pipe, trace = tmp_path / "rows", tmp_path / "pipe", tmp_path / "trace.jsonl"
    folder.mkdir()
    os.mkfifo(pipe)  # as /dev/null: a rename would put a file in its place
    trace.write_text("no trace, and never read")
    for path, complaint in ((folder, "is a folder or a device"), (pipe, "or a device"), (trace, "is the trace itself")):
        assert main(["simulate", str(trace), "--device-tokens", "90000", "--by-request", str(path)]) == 2
        assert complaint in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [pipe, folder, trace] and pipe.is_fifo()


def test_rows_go_where_a_link_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    link.symlink_to(target)
    answered(capsys, "simulate", "--generate", "cyclic_scan", "--device-tokens", "9000", "--by-request", str(link))
    assert link.is_symlink() and target.read_text().startswith("request,input_tokens")
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_chunk_of_nothing_is_a_prefill_without_bound(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--generate", "agentic", "--param", "sessions=10", "--device-tokens", "400000"]
    rates = [
        answered(capsys, *words, "--concurrency", "8", "--chunked-prefill-size", size)["device_hit_rate"]
        for size in ("0", "-1", "8192")
    ]
    assert rates[0] == rates[1] != rates[2]


def test_a_trace_of_lengths_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    for command in (["curve", str(path)], ["simulate", str(path), "--device-tokens", "1000"]):
        assert main(command) == 1
        assert "no prefix information" in capsys.readouterr().err
