"""The fast path says exactly what the line parser says."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.collect import Log, read_log
from hicache_lab.forensics.logs.fast_path import FastPath
from hicache_lab.forensics.logs.frames import allocations, batches, errors, write_parquet
from hicache_lab.forensics.logs.run import BatchStats
from hicache_lab.forensics.logs.summary import to_json

HERE = Path(__file__).parents[1]
FIXTURES = HERE / "fixtures" / "logs"
EXAMPLES = [row["example"] for row in json.loads((FIXTURES / "catalogue.json").read_text(encoding="utf-8"))]
BATCHES = [line for line in EXAMPLES if " batch" in line]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_log", HERE.parent / "bench" / "gen_log.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(path: Path) -> tuple[Log, Log]:
    return read_log(path, columns=True, fast=False), read_log(path, columns=True, fast=True)


def same(path: Path) -> None:
    by_line, fast = both(path)
    a, b = to_json(by_line), to_json(fast)
    for one, two in zip(a["runs"], b["runs"], strict=True):
        # sums in another order
        assert one["throughput"].pop("mean_token_s") == pytest.approx(two["throughput"].pop("mean_token_s"))
    assert a == b
    assert by_line.own_lines == fast.own_lines and by_line.mentions_sglang == fast.mentions_sglang
    assert [run.lines for run in by_line.runs] == [run.lines for run in fast.runs]
    for phase in ("decode", "prefill"):
        slow, quick = table(by_line, phase), table(fast, phase)
        assert slow.keys() == quick.keys()
        for name in slow:
            assert np.array_equal(slow[name], quick[name], equal_nan=slow[name].dtype.kind == "f"), name


def table(log: Log, phase: str) -> dict[str, npt.NDArray[Any]]:
    """The columns of a phase, with the names of files and ranks instead of their numbers."""
    assert log.columns is not None
    columns = log.columns.columns(phase)
    for name, names in (("file", log.columns.files), ("rank", log.columns.ranks)):
        columns[name] = np.array([names[number] for number in columns[name]], object)
    return columns


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.server.log")), ids=lambda path: path.name)
def test_real_logs(path: Path) -> None:
    same(path)


def written(folder: Path, lines: int) -> Path:
    path = folder / "a.log"
    path.write_text("\n".join(generator().lines(lines, seed=3)) + "\n", encoding="utf-8")
    return path


def test_generated_log_and_every_wording(tmp_path: Path) -> None:
    lines = list(generator().lines(4000, seed=3))
    path = tmp_path / "a.log"
    path.write_text("\n".join([*lines, *BATCHES, *lines[40:60]]) + "\n", encoding="utf-8")
    same(path)


def test_launches_in_one_chunk_keep_their_own_batches(tmp_path: Path) -> None:
    serving = list(generator().lines(200, seed=3))
    cut = serving[60:]  # a rotated file begins in the middle of a launch
    path = tmp_path / "a.log"
    path.write_text("\n".join([*cut, *serving, *serving, *serving[:1]]) + "\n", encoding="utf-8")
    by_line, fast = (to_json(read_log(path, fast=fast))["runs"] for fast in (False, True))
    for name in ("batches", "peaks", "host", "milestones", "first", "last"):
        assert [run.get(name) for run in by_line] == [run.get(name) for run in fast], name
    runs = read_log(path, fast=True).runs
    assert [run.start.line for run in runs] == [1, 141, 341, 541]
    own = [sum(word in line for line in cut) for word in ("Decode batch", "Prefill batch")]
    assert [runs[0].batches.decode, runs[0].batches.prefill] == own
    assert runs[1].batches.by_rank == runs[2].batches.by_rank
    assert all(f"{phase}:" in run.lines for run in runs[:2] for phase in ("decode", "prefill"))


def read(data: bytes) -> tuple[FastPath, list[tuple[int, str, dict[str, float]]], list[int]]:
    fast = FastPath(rows_max=64, others_max=64)
    chunk = np.frombuffer(data, np.uint8)
    rows, others, position = [], [], 0
    while position < len(chunk):
        position, found = fast.read(chunk, position)
        others += [line.number for line in found.others]
        for part in found.rows:
            for index in range(len(part)):
                values = {k: float(v[index]) for k, v in part.values.items() if not np.isnan(v[index])}
                rows.append((part.line(index), part.phase, values))
    return fast, rows, others


@given(
    st.lists(
        st.tuples(st.sampled_from(BATCHES), st.integers(0, 300), st.text(max_size=4), st.integers(0, 5)), max_size=8
    )
)
@settings(max_examples=200, deadline=None)
def test_a_damaged_line_is_taken_only_as_the_line_parser_takes_it(damages: list[tuple[str, int, str, int]]) -> None:
    from hicache_lab.forensics.logs.assemble import Assembler

    lines = []
    for line, at, insert, drop in damages:
        lines.append((line[:at] + insert + line[at + drop :]).replace("\n", " "))
    data = "".join(line + "\n" for line in lines).encode("utf-8", "replace")
    _, rows, others = read(data)
    assert sorted([number for number, _, _ in rows] + others) == list(range(1, len(lines) + 1))
    for number, phase, values in rows:
        assembler = Assembler()
        found = [*assembler.feed(lines[number - 1], ev.SourceLine("x", 1)), *assembler.close()]
        (batch,) = found
        assert isinstance(batch, ev.Batch)
        assert batch.phase == phase
        for name, value in values.items():
            expected = batch.other[name] if name in batch.other else getattr(batch, name)
            assert float(expected) == value


PREFIXES = ["", "", "", "sglang-1  | ", "2026-01-02T03:04:05.678Z stdout F ", "2026-01-02T03:04:05.678Z stdout P ",
            "[pod/sglang-0/sglang] ", "Loading: 10%|# | 1/9\r", "\x1b[36m(Ray pid=7)\x1b[0m ", "#token: 5, ",
            "Jan  2 03:04:05 node sglang[12]: ", "RuntimeError: no ", "Traceback (most recent call last)",
            "  "]  # fmt: skip
EXTRAS = ["", "Traceback (most recent call last):", "RuntimeError: CUDA error: invalid argument",
          "  File x, pin_memory",
          "#queue-req: 3, token usage: 0.75", "Scheduler hit an exception: Traceback (most recent call last):",
          '{"text": "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 8, #token: 5"}',
          '{"log": "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 8, #token: 5\\n", "stream": "stderr"}',
          "sglang-1  | Traceback (most recent call last):", "sglang-2  | ValueError: no", "Exit code: -9",
          "[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):",
          "[2026-01-02 03:04:05 TP1] Scheduler hit an exception: Traceback (most recent call last):",
          "[2026-01-02 03:04:05] Rank 0 scheduler is dead. Please check if there are relevant logs.",
          "[2026-01-02 03:04:05 TP0] Prefill batch, #new-seq: 1, #new-token: 5, #running-req: 0, #queue-req: 0, ",
          "[2026-01-02 03:04:05 TP0] Prefill batch, #new-seq: 1, #new-token: 1e3, #running-req: 0, #queue-req: 0",
          "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 1.5, #token: 5, token usage: 0.5, cpu graph: True",
          "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 1, #token: 5, gen throughput (token/s): inf",
          '[2026-01-02 03:04:05] INFO:     1.2.3.4:5 - "POST /generate HTTP/1.1" 200 OK',
          '[2026-01-02 03:04:05] INFO:     1.2.3.4:5 - "POST /generate HTTP/1.1" 500 Internal Server Error',
          '[2026-01-02 03:04:05] INFO:     said "so" 200 OK',
          "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 1, #token: 5, gen throughput (token/s): 7.5"
          "[2026-01-02 03:04:05 TP0] Prefill batch, #new-seq: 1, #new-token: 5, #running-req: 0"]  # fmt: skip
SERVING = list(generator().lines(60, seed=3))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(PREFIXES),
            st.sampled_from([*SERVING, *BATCHES, *EXTRAS * 4]),
            st.integers(0, 160),
            st.sampled_from(["", "", "", "", " ", ", ", "7", ".", "\r", "\n", "[", "\x1b[0m", "é", '"', "TP1", ": 1"]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=24,
    ),
    st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_both_ways_of_reading_a_damaged_log_agree(damages: list[tuple[str, str, int, str, int]], ended: bool) -> None:
    lines = [
        prefix + line[:at] + insert + line[at + bool(insert) * drop :] for prefix, line, at, insert, drop in damages
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.log"
        path.write_text("\n".join(lines) + "\n" * ended, encoding="utf-8", newline="")
        same(path)


def test_new_fields_and_ranks_are_learned() -> None:
    line = (
        "[2026-01-02 03:04:05.678 DP1 TP3 XY9] Decode batch, #running-req: 8, #token: 5, #brand-new thing: "
        "-4.25, load: 88.10%\n"
    )
    fast, rows, others = read(line.encode() * 2)
    assert others == [2]  # the last line, always
    assert rows == [(1, "decode", {"running_req": 8.0, "token": 5.0, "brand_new_thing": -4.25, "load": 88.1})]
    assert [rank.label for rank in fast.ranks] == ["DP1 TP3 XY9"]


def test_impossible_dates_and_long_numbers_are_left_to_the_line_parser() -> None:
    good = "[2024-02-29 03:04:05 TP0] Decode batch, #running-req: 8, #token: 5\n"
    _, rows, others = read(
        (
            good * 2
            + good.replace("2024", "2023")
            + good.replace("03:04", "25:04")
            + good.replace("token: 5", "token: 12345678901234567")
            + good.rstrip("\n")
        ).encode()
    )
    assert [number for number, _, _ in rows] == [1]
    assert others == [2, 3, 4, 5, 6]  # and the line before the one that has no time


def test_first_decode_after_idling_is_marked(tmp_path: Path) -> None:
    head = "[2026-01-02 03:04:0{} TP0] "
    prefill = "Prefill batch, #new-seq: 1, #new-token: 5, #cached-token: 0, #running-req: {}, #queue-req: 0\n"
    decode = "Decode batch, #running-req: 1, #token: 5, gen throughput (token/s): {}, #queue-req: 0\n"
    text = "".join(
        head.format(i) + line
        for i, line in enumerate(
            [prefill.format(0), decode.format(1.06), decode.format(600), prefill.format(1), decode.format(620),
             prefill.format(0), decode.format(0.5), decode.format(640)]
        )
    )  # fmt: skip
    path = tmp_path / "a.log"
    path.write_text(text)
    for log in both(path):
        assert batches(log, "decode")["fresh"].tolist() == [True, False, False, True, False]
        (run,) = log.runs
        assert run.batches.mean_throughput == pytest.approx(620)
        assert run.batches.throughput_max == 640


def test_frames_and_parquet(tmp_path: Path) -> None:
    import pandas as pd

    log = read_log(FIXTURES / "0.5.10-guard-tp2-size6-touched.server.log", columns=True)
    frame = allocations(log)
    assert frame.loc[frame["tier"] == "host", "bytes"].tolist() == [6_000_000_000] * 2
    assert errors(log).empty
    prefill = batches(log, "prefill")
    assert prefill["at"].tolist() == [pd.Timestamp("2026-11-29 17:10:15")]
    written = write_parquet(log, tmp_path / "out")
    back = pd.read_parquet(written[1])
    assert back["new_token"].tolist() == [19]
    assert not list((tmp_path / "out").glob("*.part"))


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    log = read_log(FIXTURES / "0.5.10-guard-tp2-size6-touched.server.log")
    assert log.columns is None
    noisy = tmp_path / "noisy.log"
    line = (
        "[2026-01-02 03:04:05 TP0] KV cache pool is full. Retract requests. #retracted_reqs: {}, "
        "#new_token_ratio: 0.1 -> 0.2\n"
    )
    noisy.write_text("".join(line.format(i) for i in range(5000)))
    (run,) = read_log(noisy).runs
    assert run.counts["retraction"] == 5000
    assert len(run.events) == 1000
    assert len(run.lines) <= 1000


def test_two_logs_read_at_once_leave_the_process_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path, 4000)
    before, threads = sys.getswitchinterval(), threading.active_count()
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: read_log(path, fast=True), range(12)))
    assert sys.getswitchinterval() == before and threading.active_count() == threads
    assert len({json.dumps(to_json(log)) for log in found}) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize(
    "place", ["hicache_lab.forensics.logs.fast_path.FastPath.read", "hicache_lab.forensics.logs.collect._Stream._add"]
)
def test_what_ends_the_reading_leaves_no_thread_and_no_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], place: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    before, threads = sys.getswitchinterval(), threading.active_count()
    monkeypatch.setattr(place, fail)
    with pytest.raises(error) as kept:
        read_log(written(tmp_path, 100), fast=True)
    assert sys.getswitchinterval() == before and threading.active_count() == threads, kept


@pytest.mark.parametrize("fast", [False, True])
def test_an_interrupt_waits_for_the_chunk_that_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    path = written(tmp_path, 4000)
    whole = read_log(path, fast=fast)
    seen: list[None] = []

    def interrupted(stats: BatchStats, *given: object) -> None:
        if not seen:
            seen.append(os.kill(os.getpid(), signal.SIGINT))
        peak(stats, *given)

    peak = BatchStats.peak
    monkeypatch.setattr(BatchStats, "peak", interrupted)
    log = read_log(path, fast=fast, keep_partial=True)
    assert log.interrupted and seen
    assert log.runs[0].batches == whole.runs[0].batches
    assert log.lines == whole.lines == 4000
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_count_beyond_31_bits_leaves_missing_values_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    line = "[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 1, {}#queue-req: 0\n"
    path.write_text(line.format("#token: 5, ") + line.format("") + line.format(f"#token: {9 * 10**11}, ") * 2 + "end\n")
    same(path)
    token = batches(read_log(path, columns=True, fast=True), "decode")["token"].tolist()
    assert token[0] == 5 and token[1] != token[1] and token[2:] == pytest.approx([9e11, 9e11])
