"""Every wording of 30 releases, every prefix, every irregularity; no crash and no invented event on damaged input."""

from __future__ import annotations

import bz2
import contextlib
import copy
import gzip
import io
import json
import lzma
import os
import pickle
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import GB, GIB, KIB, MIB
from hicache_lab.cli import main
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.assemble import Assembler
from hicache_lab.forensics.logs.collect import follow_events, read_log
from hicache_lab.forensics.logs.prefix import records
from hicache_lab.forensics.logs.reader import arrays, chunks, sources
from hicache_lab.forensics.logs.summary import to_json

FIXTURES = Path(__file__).parents[1] / "fixtures" / "logs"
CATALOGUE: list[dict[str, Any]] = json.loads((FIXTURES / "catalogue.json").read_text(encoding="utf-8"))
REAL = sorted(FIXTURES.glob("*.server.log"))

# name in the catalogue → (attribute, factor)
NAMES: dict[str, tuple[str, float]] = {
    "mem_usage_gib": ("usage_bytes", GIB),
    "avail_gib": ("avail_bytes", GIB),
    "free_gib": ("avail_bytes", GIB),
    "mem_gib": ("kv_bytes", GIB),
    "k_gib": ("k_bytes", GIB),
    "v_gib": ("v_bytes", GIB),
    "kv_gib": ("kv_bytes", GIB),
    "conv_gib": ("conv_bytes", GIB),
    "ssm_gib": ("ssm_bytes", GIB),
    "intermediate_ssm_gib": ("intermediate_ssm_bytes", GIB),
    "intermediate_conv_gib": ("intermediate_conv_bytes", GIB),
    "available_gpu_mem_gib": ("available_gpu_bytes", GIB),
    "budget_gib": ("budget_bytes", GIB),
    "pools_gib": ("pools_bytes", GIB),
    "total_gib": ("total_bytes", GIB),
    "tried_mib": ("tried_bytes", MIB),
    "free_mib": ("free_bytes", MIB),
    "shmem_rss_kb": ("shmem_rss_bytes", KIB),
    "requested_gb": ("requested_bytes", GB),
    "free_gb": ("free_bytes", GB),
    "gb": ("bytes", GB),
    "timeout_ms": ("timeout_s", 0.001),
    "running": ("running_req", 1),
    "queue": ("queue_req", 1),
    "cuda_graph": ("graph", 1),
    "full_tokens": ("tokens", 1),
    "full_layer_tokens": ("tokens", 1),
    "swa_layer_tokens": ("swa_tokens", 1),
    "tokens_upper_bound": ("tokens", 1),
    "max_states": ("states", 1),
    "seconds": ("elapsed_s", 1),
    "bs": ("batch_sizes", 1),
    "rank": ("index", 1),
    "prealloc": ("prealloc_req", 1),
    "inflight": ("inflight_req", 1),
    "bootstrap": ("bootstrap_req", 1),
    "transfer": ("transfer_req", 1),
    "retracted": ("retracted_req", 1),
    "unbootstrapped": ("unbootstrapped_req", 1),
    "transferring": ("transferring_req", 1),
}
# facts that are the event's class or follow from the release, checked by name below
CLASSES: dict[str, type[ev.Event]] = {
    "ready": ev.Milestone,
    "error": ev.Event,
    "event": ev.Event,
    "kind": ev.HostPool,
    "oom_kill": ev.ProcessDeath,
    "free_includes_reserve": ev.HostRefusal,
    "free_is_per_rank_share": ev.HostRefusal,
    "pool": ev.HostRefusal,
}
ERRORS: dict[str, type[ev.Event]] = {
    "host_smaller_than_device": ev.HostSmaller,
    "no_host_memory_left": ev.HostRefusal,
    "decode_oom": ev.TokenShortage,
    "prefill_oom": ev.TokenShortage,
    "decode_oom_abort": ev.TokenShortage,
    "device_memory_insufficient": ev.TokenShortage,
    "queue_full": ev.RequestRejected,
    "scheduler_exception": ev.Failure,
    "detokenizer_exception": ev.Failure,
    "watchdog": ev.Stall,
    "health_check_failed": ev.Stall,
    "sigquit": ev.Stall,
    "scheduler_dead": ev.ProcessDeath,
    "scheduler_died": ev.ProcessDeath,
    "subprocess_crashed": ev.ProcessDeath,
    "graph_capture_failed": ev.GpuOom,
    "cuda_oom": ev.GpuOom,
    "host_pin_failed": ev.Failure,  # only the traceback around it says that it was pinning
    "nccl_timeout": ev.Stall,
    "kernel_oom_kill": ev.KernelOom,
    "defunct": ev.Defunct,
    "host_pressure_drop": ev.HostPressure,
    "prefetch_page_failed": ev.Storage,
    "flush_refused": ev.RequestRejected,
}


def every_event(path: Path) -> Iterator[ev.Event]:
    """The events of one file, batch lines included, by the line parser."""
    assembler = Assembler()
    lines = b"".join(chunks(str(path))).decode("utf-8", "replace").split("\n")
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        where = ev.SourceLine(str(path), number)
        yield from assembler.feed(line.rstrip("\r"), where, ended=number < len(lines))
    yield from assembler.close()


def parse(text: str) -> list[ev.Event]:
    assembler = Assembler()
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        found += list(assembler.feed(line, ev.SourceLine("log", number)))
    return found + list(assembler.close())


def value_of(event: ev.Event, name: str) -> Any:
    if hasattr(event, name):
        return getattr(event, name)
    return event.other[name] if isinstance(event, ev.Batch) else None


@pytest.mark.parametrize("row", CATALOGUE, ids=lambda row: row["id"])
def test_catalogue_example_gives_one_event_with_its_values(row: dict[str, Any]) -> None:
    (event,) = parse(row["example"])
    for name, expected in row["parsed"].items():
        if name == "ts":
            assert event.at == datetime.fromisoformat(expected)
        elif name == "ranks" and isinstance(expected, dict):
            assert dict(event.rank.tags) == expected
        elif name == "pid" and isinstance(event, ev.Milestone):
            assert "pid" not in event.text  # the logger's own brackets are gone
        elif name == "http":
            assert isinstance(event, ev.Access)
            assert {key: getattr(event, key) for key in expected} == expected
        elif name == "server_args":
            assert isinstance(event, ev.ServerArgs)
            assert {key: event.args[key] for key in expected} == expected
        elif name in ("error", "event"):
            assert isinstance(event, ERRORS[expected])
        elif name in CLASSES:
            assert isinstance(event, CLASSES[name])
        elif name == "name" and not isinstance(event, ev.ProcessDeath):
            assert expected in (value_of(event, "label"), value_of(event, "process"),
                                value_of(event, "pool").split(":")[-1]
                                if isinstance(event, ev.HostPool) else None)  # fmt: skip
        elif name == "label":
            assert value_of(event, "pool") == expected
        else:
            attribute, factor = NAMES.get(name, (name, 1))
            attribute = {(ev.SettingChanged, "layout"): "value", (ev.Stall, "seconds"): "timeout_s"}.get(
                (type(event), name), attribute
            )
            if isinstance(event, ev.Retraction | ev.HostPressure | ev.Storage | ev.TokenShortage) and hasattr(
                event, name
            ):
                attribute = name
            got = value_of(event, attribute)
            if isinstance(expected, list):
                assert list(got) == expected
            elif isinstance(expected, bool | str):
                assert got == expected
            else:
                assert got == pytest.approx(expected * factor, rel=1e-9, abs=0.5 if factor > 1000 else 1e-9)


RECORD = "[2026-01-02 03:04:05 TP1] Allocating 300.00 GB host memory for hierarchical KV cache."
PREFIXES = [
    "",
    "2026-01-02T03:04:05.678901234Z ",
    "sglang-1  | ",
    "2026-01-02T03:04:05.678901234+00:00 stderr F ",
    "Jan 02 03:04:05 host python3[1]: ",
    "2026-01-02T03:04:05+0000 host python3[17]: ",
    "(Actor pid=1, ip=10.0.0.1) ",
    "\x1b[36m(Actor pid=1)\x1b[0m ",
    "[pod/sglang-0/server] ",
    "Loading:  90%|####      | 9/10 [00:18<00:01, 15.22it/s]",
    "Loading:  0/30 [00:00<?]\rLoading: 90%|█▌| [00:10<00:02,  2.75s/it]\r",
    "server.log:17:",
    "3: ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_record_behind_any_prefix(prefix: str) -> None:
    (event,) = parse(prefix + RECORD)
    assert isinstance(event, ev.HostPool)
    assert (event.bytes, event.rank.label, event.at) == (300 * GB, "TP1", datetime(2026, 1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    ("line", "rank", "at"),
    [
        ("2026-01-02T03:04:05.123Z pod-x INFO TP0] Decode batch, #running-req: 8, #token: 5", "TP0", 123),
        ("2026-01-02T03:04:05.678901Z  INFO sglang.scheduler: Decode batch, #running-req: 8, #token: 5", "", 678),
        ("2026-01-02 03:04:05,173 - sglang.srt - INFO - Decode batch, #running-req: 8, #token: 5", "", 173),
        ("2026-01-02 03:04:05 TP3] Decode batch, #running-req: 8, #token: 5", "TP3", 0),
        ("[2026-01-02 03:04:05 DisaggregationMode.PREFILL TP1] Decode batch, #running-req: 8, #token: 5", "TP1", 0),
        ("[2026-01-02 03:04:05 FOO7 TP1] Decode batch, #running-req: 8, #token: 5", "FOO7 TP1", 0),
    ],
)
def test_eaten_and_foreign_prefixes(line: str, rank: str, at: int) -> None:
    (event,) = parse(line)
    assert isinstance(event, ev.Batch)
    assert (event.running_req, event.token, event.rank.label) == (8, 5, rank)
    assert event.at is not None
    assert event.at.microsecond // 1000 == at


def test_undated_record_needs_a_rank() -> None:
    (event,) = parse("[03:04:05 TP2] Decode batch. #running-req: 8, #token: 5, token usage: 0.43")
    assert event.at is None
    assert event.rank.label == "TP2"
    assert parse("[00:10<00:02,  2.75s/it] 0/30 [00:00 something]") == []


def test_two_records_on_one_line_and_a_split_write() -> None:
    both = parse("[2026-01-02 03:04:05 TP1] Alloc" + RECORD.replace("TP1", "TP2"))
    assert [event.rank.label for event in both] == ["TP2"]
    both = parse(RECORD + RECORD.replace("TP1", "TP2"))
    assert [event.rank.label for event in both] == ["TP1", "TP2"]


def test_wrapped_line_is_joined_and_elided_line_read_by_key() -> None:
    (event,) = parse(
        "[2026-01-02 03:04:05 TP0] Allocating kv hierarchical KV host pool: 3035904 tokens, 40.41 GB host memory,\n"
        "  packed MTP KV layers: target_layers=12, draft_layers=1, total_layers=13."
    )
    assert isinstance(event, ev.HostPool)
    assert (event.tokens, event.draft_layers) == (3035904, 1)
    (event,) = parse("[2026-01-02 03:04:05 TP0] Decode batch, #running-req: 8, ..., token usage: 0.43, ...")
    assert isinstance(event, ev.Batch)
    assert (event.running_req, event.token, event.token_usage) == (8, None, 0.43)


def test_cut_last_line_drops_the_value_it_was_cut_in(tmp_path: Path) -> None:
    whole = "[2026-01-02 03:04:05 TP0] Prefill batch, #new-seq: 1, #new-token: 512, #cached-token: 20, #queue-req: 5\n"
    cut = "[2026-01-02 03:04:06 TP0] Prefill batch, #new-seq: 1, #new-token: 51"
    (tmp_path / "a.log").write_text(whole + cut)
    first, last = every_event(tmp_path / "a.log")
    assert isinstance(first, ev.Batch)
    assert isinstance(last, ev.Batch)
    assert (first.new_token, last.new_seq, last.new_token) == (512, 1, None)
    # nothing before it shows that fields are missing: the value is as printed
    (tmp_path / "b.log").write_text(whole.rstrip("\n"))
    (only,) = every_event(tmp_path / "b.log")
    assert isinstance(only, ev.Batch)
    assert only.queue_req == 5


def test_interleaved_tracebacks_keep_their_rank() -> None:
    events = parse(
        "[2026-01-02 03:04:05 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "scheduler.py", line 1, in run\n'
        "[2026-01-02 03:04:05 TP1] Decode batch, #running-req: 8, #token: 5\n"
        "    raise ValueError(\n"
        "ValueError: Not enough host memory available. Requesting 300.00 GB but only have 120.00 GB free. Please "
        "reduce\n"
        "\n"
        "[2026-01-02 03:04:06] Received sigquit from a child process. It usually means the child failed.\n"
    )
    batch, refusal, sigquit = events
    assert isinstance(batch, ev.Batch)
    assert isinstance(refusal, ev.HostRefusal)
    assert (refusal.rank.label, refusal.where.line, refusal.free_bytes) == ("TP3", 5, 120 * GB)
    assert isinstance(sigquit, ev.Stall)


def test_pinning_failure_needs_its_traceback() -> None:
    text = (
        "[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "memory_pool_host.py", line 1, in init_kv_buffer\n'
        "RuntimeError: CUDA error: invalid argument\n"
    )
    assert isinstance(parse(text)[0], ev.PinFailure)
    assert isinstance(parse(text.replace("memory_pool_host", "x").replace("init_kv_buffer", "y"))[0], ev.Failure)


def test_docker_json_and_cri_parts_are_joined() -> None:
    half, rest = RECORD[:40], RECORD[40:]
    docker = "\n".join(
        json.dumps({"log": part, "stream": "stderr", "time": "2026-01-02T03:04:05Z"}) for part in (half, rest + "\n")
    )
    cri = f"2026-01-02T03:04:05Z stderr P {half}\n2026-01-02T03:04:05Z stderr F {rest}"
    for text in (docker, cri):
        (event,) = parse(text)
        assert isinstance(event, ev.HostPool)
        assert event.rank.label == "TP1"


def test_look_alikes_are_not_batch_lines() -> None:
    (event,) = parse(
        "[2026-01-02 03:04:05 TP0] Cache not flushed because there are pending requests. #queue-req: 2, #running-req: 7"
    )
    assert isinstance(event, ev.RequestRejected)
    for line in (
        "we saw #queue-req: 2, #running-req: 7 in the log and token usage: 0.9",
        "Input token throughput (tok/s):          8570.96",
        "INFO 01-02 03:04:05 [loggers.py:116] Engine 000: Avg prompt throughput: 0.0 tokens/s, GPU KV cache usage: "
        "0.0%",
        "I think Allocating 300.00 GB host memory for hierarchical KV cache. is per rank",
        "[aiter] Decode batch, #running-req: 8, #token: 5",
        "If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
    ):
        assert parse(line) == [], line


def test_record_quoted_in_a_prompt_is_not_one() -> None:
    line = f"[2026-01-02 03:04:05] Receive: obj=GenerateReqInput(text='why {RECORD}')"
    assert parse(line) == []


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-le", "utf-8-sig", "crlf", "gz", "zst"])
def test_encoding_and_compression_change_nothing(path: Path, encoding: str, tmp_path: Path) -> None:
    text = path.read_bytes().decode()
    copy = tmp_path / path.name
    if encoding == "gz":
        copy.write_bytes(gzip.compress(text.encode()))
    elif encoding == "zst":
        copy.write_bytes(zstandard.compress(text.encode()))
    elif encoding == "crlf":
        copy.write_bytes(text.replace("\n", "\r\n").encode())
    else:
        copy.write_bytes(text.encode(encoding))
    strip = [(e.where.line, e.kind, e.text) for e in every_event(path)]
    assert [(e.where.line, e.kind, e.text) for e in every_event(copy)] == strip
    assert len(strip) > 8


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress, zstandard.compress])
def test_standard_input_and_a_pipe_are_unpacked_too(
    pack: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = pack((FIXTURES / "0.5.10-guard-tp2-size5.server.log").read_bytes())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))  # type: ignore[arg-type]
    assert main(["parse", "-"]) == 0
    assert "-: 74 lines, 18 recognised" in capsys.readouterr().out
    # what the shell makes of <(zcat server.log.gz)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(data,))
    writer.start()
    assert main(["diagnose", str(pipe), "--json"]) == 0
    writer.join()
    assert json.loads(capsys.readouterr().out)["lines"] == 74


def test_a_cut_or_damaged_compressed_file_gives_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FIXTURES / "0.5.23-llama-tp2-hicache.server.log").read_bytes()
    packed = gzip.compress(text)
    path = tmp_path / "a.log.gz"
    cut = packed[: len(packed) * 9 // 10]
    held = zlib.decompressobj(31).decompress(cut).count(b"\n") + 1
    assert held > 100
    for content, lines, says in (
        (cut, held, "ends early; using what could be read"),
        (packed[:-8] + b"\0" * 8, text.count(b"\n"), "damaged: CRC check failed"),
    ):
        path.write_bytes(content)
        log = read_log(path)
        assert (log.lines, len(log.runs)) == (lines, 1)
        assert says in capsys.readouterr().err
    path.write_bytes(b"\x1f\x8bnothing of the kind")
    with pytest.raises(InputError, match="cannot be read"):
        read_log(path)


def test_real_two_rank_log() -> None:
    log = read_log(FIXTURES / "0.5.10-guard-tp2-size6-touched.server.log")
    (run,) = log.runs
    assert run.host_bytes_by_rank() == {"TP1": 6 * GB, "TP0": 6 * GB}
    assert (run.ranks_seen, run.expected_ranks, run.device_tokens) == (["TP0", "TP1"], 2, 2048)
    assert run.args["hicache_size"] == 6
    releases = run.releases
    assert releases is not None
    assert (releases.first, releases.last) == ("0.5.10", "0.5.12")


def test_rotated_set_is_one_stream_in_order_of_time(tmp_path: Path) -> None:
    lines = (FIXTURES / "0.5.10-mla-tp2-hicache.server.log").read_bytes().splitlines(keepends=True)
    (tmp_path / "s.log.2.gz").write_bytes(gzip.compress(b"".join(lines[:100])))
    (tmp_path / "s.log.1").write_bytes(b"".join(lines[100:200]))
    (tmp_path / "s.log").write_bytes(b"".join(lines[200:]))
    (source,) = sources([str(tmp_path / name) for name in ("s.log", "s.log.1", "s.log.2.gz")])
    assert [Path(path).name for path in source.paths] == ["s.log.2.gz", "s.log.1", "s.log"]
    log = read_log(tmp_path)
    whole = read_log(FIXTURES / "0.5.10-mla-tp2-hicache.server.log")
    assert len(log.runs) == 1
    assert log.runs[0].batches == whole.runs[0].batches or log.runs[0].batches.decode == whole.runs[0].batches.decode
    assert log.recognised_lines == whole.recognised_lines


@pytest.mark.parametrize("fast", [True, False])
def test_a_record_cut_by_the_rotation_is_joined(fast: bool, tmp_path: Path) -> None:
    whole = (FIXTURES / "0.5.23-llama-tp2-hicache.server.log").read_bytes()
    for cut in (20_000, 30_001, whole.index(b"Allocating") + 12):
        (tmp_path / "s.log.1").write_bytes(whole[:cut])
        (tmp_path / "s.log").write_bytes(whole[cut:])
        log, same = read_log(tmp_path, fast=fast), read_log(FIXTURES / "0.5.23-llama-tp2-hicache.server.log")
        assert (log.lines, log.recognised_lines) == (same.lines, same.recognised_lines)
        assert [(e.kind, e.text) for e in log.events()] == [(e.kind, e.text) for e in same.events()]
    # a server that was killed within its line, and the next one's log: nothing to join
    (tmp_path / "s.log.1").write_text(RECORD + "\n" + RECORD[:40])
    (tmp_path / "s.log").write_text(RECORD.replace("TP1", "TP2") + "\n")
    log = read_log(tmp_path, fast=fast)
    assert log.lines == 3
    assert [run.host_bytes_by_rank() for run in log.runs] == [{"TP1": 300 * GB, "TP2": 300 * GB}]


REFUSED = (
    "[2026-01-02 03:04:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "memory_pool_host.py", line 1, in __init__\n'
    "ValueError: Not enough host memory available. Requesting 300.00 GB but only have 54.28 GB free. Please reduce it."
)


@pytest.mark.parametrize(
    "before",
    ["Nov 29 17:00:{:02d} ", '2026-11-29T17:00:{:02d}Z\t{{app="sglang"}}\t', "<6>gpu-{:02d} sglang: ", "{:02d} # "],
)
def test_lines_of_a_record_behind_an_unknown_prefix(before: str) -> None:
    (event,) = parse("\n".join(before.format(n) + line for n, line in enumerate(REFUSED.split("\n"), 8)))
    assert isinstance(event, ev.HostRefusal)
    assert (event.requested_bytes, event.free_bytes, event.rank.label) == (300 * GB, round(54.28 * GB), "TP0")


@pytest.mark.parametrize("key", ["log", "MESSAGE", "message", "msg"])
def test_lines_wrapped_in_json(key: str) -> None:
    (event,) = parse("\n".join(json.dumps({"_PID": "5", key: line}) for line in REFUSED.split("\n")))
    assert isinstance(event, ev.HostRefusal)
    assert (event.free_bytes, event.rank.label) == (round(54.28 * GB), "TP0")
    assert parse('{"message": 5}\n{"message": "x"\n{"msg": null}') == []
    assert parse(json.dumps({"event": "request.received", "obj": {"text": f"why {RECORD}"}})) == []


def test_a_file_without_lines_is_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "core"
    path.write_bytes(b"a" * 1_000_000 + RECORD.encode() + b"\n")
    monkeypatch.setattr("hicache_lab.forensics.logs.reader._MAX_LINE", 100_000)
    sizes = [len(piece) for piece in arrays(str(path), size=10_000)]
    assert sum(sizes) == 1_000_000 + len(RECORD) + 1
    assert max(sizes) < 120_000


def test_interrupted_reading_keeps_what_it_has(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    for path in (first, second):
        path.write_text(RECORD + "\n")

    def stop(_count: int) -> None:
        seen.append(1)
        if len(seen) == 2:
            raise KeyboardInterrupt

    seen: list[int] = []
    log = read_log([first, second], keep_partial=True, on_read=stop)
    assert log.interrupted
    assert [run.host_bytes for run in log.runs] == [300 * GB]
    seen = []
    with pytest.raises(KeyboardInterrupt):
        read_log([first, second], on_read=stop)


@pytest.mark.parametrize(("reads", "kept"), [(0, False), (1, True)])
def test_parse_interrupted_says_so_and_judges_no_log_by_its_first_bytes(
    reads: int, kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    @contextlib.contextmanager
    def stopping(_paths: object, **_options: object) -> Iterator[Callable[[int], None]]:
        def stop(_count: int) -> None:
            seen.append(1)
            if len(seen) > reads:
                raise KeyboardInterrupt

        yield stop

    (tmp_path / "a.log").write_text(RECORD + "\n")
    (tmp_path / "b.log").write_text(RECORD + "\n")
    words = ["parse", str(tmp_path / "a.log"), str(tmp_path / "b.log"), "--json"]
    monkeypatch.setattr("hicache_lab.cli.logs.progress", stopping)
    assert main(words) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err and "empty" not in err
    assert bool(out) == kept


def test_an_interrupt_on_a_pipe_that_says_no_more_keeps_what_came() -> None:
    lines = (
        f"[2026-01-15 08:00:00 TP0] Decode batch, #running-req: 1, #token: {n}, token usage: 0.1\n"
        for n in range(300_000)
    )
    text = "".join(lines).encode()
    command = [sys.executable, "-m", "hicache_lab", "parse", "-", "--json", "--no-progress"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(text)
        process.stdin.flush()
        # the pipe holds 64 KiB: what is written has been read, but for that
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert b"interrupted" in process.stderr.read()
        found = json.loads(process.stdout.read())
    assert 150_000 < found["lines"] <= 300_000
    assert found["runs"][0]["batches"]["decode"] <= found["lines"]


class Falling(io.BytesIO):
    """A pipe that says no more after what it holds; somebody then presses Ctrl-C."""

    def read1(self, size: int | None = -1) -> bytes:
        if not (piece := super().read1(min(size or 0, 50_000))):
            raise KeyboardInterrupt
        return piece

    def peek(self, size: int) -> bytes:
        return self.getvalue()[:size]


@pytest.mark.parametrize("fast", [None, True, False])
def test_an_interrupt_on_a_silent_pipe_keeps_every_line(fast: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FIXTURES / "0.5.23-llama-tp2-hicache.server.log"
    whole = read_log(path)
    monkeypatch.setattr("hicache_lab.forensics.logs.reader.open_bytes", lambda _: Falling(path.read_bytes()))
    log = read_log("-", fast=fast, keep_partial=True)
    assert log.interrupted
    assert (log.lines, log.recognised_lines) == (319, whole.recognised_lines)
    assert (log.runs[0].batches.decode, log.runs[0].batches.prefill) == (39, 45)
    assert len(log.runs[0].events) == len(whole.runs[0].events)


@pytest.mark.parametrize("last", ["#queue-req: 3", "#full token: 3", "a new field: 0.5"])
def test_a_line_below_a_batch_line_takes_nothing_from_it(last: str, tmp_path: Path) -> None:
    line = f"[2026-01-15 08:00:00 TP0] Decode batch, #running-req: 1, #token: 9, token usage: 0.1, {last}\n"
    (tmp_path / "a.log").write_text(line)
    (alone,) = every_event(tmp_path / "a.log")
    (tmp_path / "a.log").write_text(line + "some library says hello\n")
    assert list(every_event(tmp_path / "a.log")) == [alone]


def test_events_are_sent_copied_and_collected_in_sets() -> None:
    events = list(every_event(FIXTURES / "0.5.23-llama-tp2-hicache.server.log"))
    assert {ev.ServerArgs, ev.Batch} < {type(event) for event in events}
    assert pickle.loads(pickle.dumps(events)) == copy.deepcopy(events) == events
    assert len(set(events)) == len(events)


def test_following_a_pipe_tells_its_last_statement_at_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*_: object, **__: object) -> Iterator[bytes]:
        yield RECORD.encode() + b"\n"
        raise KeyboardInterrupt

    monkeypatch.setattr("hicache_lab.forensics.logs.collect.follow", lines)
    assert main(["parse", "-", "--follow"]) == 130
    out, err = capsys.readouterr()
    assert "host_pool" in out and err == "hicache-lab parse: interrupted\n"


def test_an_interrupt_while_the_command_is_imported_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hicache_lab.cli.import_module", stop)
    assert main(["parse", "a.log"]) == 130
    assert capsys.readouterr().err == "hicache-lab parse: interrupted\n"


def test_restart_in_one_stream_starts_a_new_run(tmp_path: Path) -> None:
    one = (FIXTURES / "0.5.10-guard-tp1-ratio05.server.log").read_text()
    two = (FIXTURES / "0.5.10-guard-tp2-size5.server.log").read_text()
    (tmp_path / "a.log").write_text(one + two)
    runs = read_log(tmp_path / "a.log").runs
    assert [run.expected_ranks for run in runs] == [1, 2]
    assert [run.counts["host_pool"] for run in runs] == [0, 2]


def test_follow_reads_a_growing_and_a_replaced_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(RECORD + "\n")
    looks = iter([False, True])

    def stop() -> bool:
        if not (done := next(looks)):
            path.rename(tmp_path / "a.log.1")
            path.write_text(RECORD.replace("TP1", "TP5") + "\n")
        return done

    found = list(follow_events(str(path), stop=stop, poll_s=0.0))
    assert [event.rank.label for event in found] == ["TP1", "TP5"]


def test_follow_shows_the_last_statement_before_another_comes(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(RECORD + "\n")
    looks: list[int] = []

    def stop() -> bool:
        looks.append(1)
        return len(looks) > 4

    events = follow_events(str(path), stop=stop, poll_s=0.0)
    assert next(events).rank.label == "TP1"
    # a server that is killed says nothing more: its last line must not wait for one
    assert len(looks) < 4


def test_follow_reads_utf16_and_refuses_a_compressed_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes((RECORD + "\r\n").encode("utf-16"))
    (event,) = follow_events(str(path), stop=lambda: True, poll_s=0.0)
    assert event.rank.label == "TP1"
    path.write_bytes(gzip.compress(RECORD.encode()))
    with pytest.raises(UsageError, match="compressed"):
        list(follow_events(str(path), stop=lambda: True, poll_s=0.0))


def test_follow_of_what_is_not_sglang_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, code in ((RECORD + "\n", 0), ('10.0.0.1 - - "GET / HTTP/1.1" 200 612\n', 1)):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert main(["parse", "--follow", "-"]) == code
    assert "nothing in it is known from an SGLang server" in capsys.readouterr().err


NOT_NUMBERS = [
    "Decode batch, #running-req: 1, token usage: 0.50, gen throughput (token/s): 5",
    "Decode batch, #running-req: 2, token usage: 0.50, gen throughput (token/s): 7",
    "Decode batch, #running-req: inf, token usage: inf, gen throughput (token/s): inf",
    "Decode batch, #running-req: nan, token usage: nan, gen throughput (token/s): nan",
    "Prefill batch, #new-seq: 1, #new-token: inf, #cached-token: nan, token usage: nan",
    "Prefill batch, #new-seq: 1, #new-token: 10, #cached-token: 30, token usage: 0.10",
]


@pytest.mark.parametrize("fast", [True, False])
def test_infinite_and_undefined_values_stay_out_of_the_sums(fast: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("".join(f"[2026-01-02 03:04:05 TP0] {line}\n" for line in NOT_NUMBERS))
    log = read_log(path, columns=True, fast=fast)
    (run,) = json.loads(json.dumps(to_json(log), allow_nan=False))["runs"]
    assert (run["peaks"]["token_usage"]["value"], run["peaks"]["running_req"]["value"]) == (0.5, 2)
    throughput = run["throughput"]
    assert (throughput["mean_token_s"], throughput["max_token_s"], throughput["decode_lines"]) == (7, 7, 1)
    assert (run["cached_tokens"], run["new_tokens"], run["hit_ratio"]) == (30, 10, 0.75)


@pytest.mark.parametrize("fast", [True, False])
def test_batches_that_every_tp_rank_prints_count_once(fast: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    line = "Prefill batch, #new-seq: 1, #new-token: 10, #cached-token: 30, token usage: 0.10\n"
    path.write_text("".join(f"[2026-01-02 03:04:05 DP{dp} TP{tp}] {line}" for dp in (0, 1) for tp in (0, 1, 2, 3)))
    (run,) = read_log(path, fast=fast).runs
    assert (run.batches.prefill, run.batches.cached_tokens, run.batches.new_tokens) == (8, 60, 20)


def test_shortened_sizes_and_a_full_stop_behind_a_word() -> None:
    (pool,) = parse("[2026-01-02 03:04:05 TP0] KV Cache is allocated. #tokens: 100, K 1.50 GB, V 1.25 GB")
    assert isinstance(pool, ev.DevicePool)
    assert (pool.tokens, pool.k_bytes, pool.v_bytes) == (100, 3 * GIB // 2, 5 * GIB // 4)
    (host,) = parse("[2026-01-02 03:04:05 TP0] Allocating 35.25 GB host memory for DSA indexer, layout=page_first.")
    assert isinstance(host, ev.HostPool)
    assert host.layout == "page_first"
    (capacity,) = parse("[2026-01-02 03:04:05 TP0] max_total_num_tokens=1e5, context_len=4096")
    assert isinstance(capacity, ev.Capacity)
    # not one token, whatever else it may be
    assert (capacity.max_total_num_tokens, capacity.context_len) == (None, 4096)


def test_a_pasted_traceback_of_sglang_is_an_sglang_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "paste.txt"
    for text in (
        "[2026-01-02 03:04:05] Received sigquit from a child process. It usually means the child failed.\n",
        "[2026-01-02 03:04:05 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "a.py", line 1, in x\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n",
    ):
        path.write_text(text)
        assert main(["parse", str(path)]) == 0, text
    path.write_text("[2026-01-02 03:04:05] Engine startup timings: load_weight=1.00s, scheduler_e2e=2.00s\n")
    assert main(["parse", str(path)]) == 0
    path.write_text("Traceback (most recent call last):\nValueError: x\n")
    assert main(["parse", str(path)]) == 1
    path.write_text("")
    assert main(["parse", str(path)]) == 1
    assert "paste.txt: empty;" in capsys.readouterr().err


def test_parse_shows_control_characters_and_does_not_obey_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    path.write_text(f"[2026-01-02 03:04:05] server_args=ServerArgs(model_path='a\x9b31mb', tp_size=1)\n{RECORD}\n")
    assert main(["parse", str(path)]) == 0
    text = capsys.readouterr().out
    assert "\x9b" not in text
    assert "a�31mb" in text


def test_arguments_of_a_cut_or_hostile_line() -> None:
    (event,) = parse(
        "[2026-01-02 03:04:05] server_args=ServerArgs(model_path='m', extra='{\"a\": [1, 2], \"tp_size\": 9}', "
        "tp_size=8, x=<Foo>, y=inf, hicache_siz"
    )
    assert isinstance(event, ev.ServerArgs)
    assert event.args["tp_size"] == 8
    assert event.args["model_path"] == "m"
    (event,) = parse(
        "[2026-01-02 03:04:05] server_args=ServerArgs(api_key='sk-secret', tp_size=2, "
        "x=__import__('os').system('true'))"
    )
    assert isinstance(event, ev.ServerArgs)
    assert "sk-secret" not in repr(event)
    assert event.args["tp_size"] == 2


LINES = [row["example"] for row in CATALOGUE]


@given(st.sampled_from(LINES), st.integers(0, 400), st.text(max_size=6), st.integers(0, 6))
@settings(max_examples=300, deadline=None)
def test_damaged_lines_never_crash_and_never_add_an_event(line: str, at: int, insert: str, drop: int) -> None:
    at = min(at, len(line))
    damaged = line[:at] + insert.replace("\n", " ") + line[at + drop :]
    found = parse(damaged)
    # an insert can split a statement of two records, never more
    assert len(found) <= line.count("\n") + 1 + insert.count("\r")


# hypothesis also draws the words of this package's own source: without two letters none of them is whole
@given(st.text(st.characters(exclude_characters="ae"), max_size=200))
@settings(max_examples=200, deadline=None)
def test_arbitrary_text_is_not_sglang(text: str) -> None:
    for event in parse(text):
        assert event.kind in ("failure", "access")
    for head in records(text.replace("\n", " ")):
        assert head.message is not None


def test_the_launch_is_read_once_and_keeps_what_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(
        "[2026-01-20 09:17:30] server_args=ServerArgs(model_path='m', tp_size=8, dp_size=2, nnodes=2, api_key='sk-1', "
        "hicache_ratio='two', hicache_size=300, page_size=nan, mem_fraction_sta"
    )
    (run,) = read_log(path).runs
    assert run.launch is not None
    assert (run.launch.model, run.launch.hicache_size, run.expected_ranks) == ("m", 300, 8)
    assert run.launch.hicache_ratio is None and run.launch.page_size is None
    assert len(run.launch.notes) == 3
    assert "sk-1" not in str(run.events) + str(run.launch)


@pytest.mark.parametrize(
    "message",
    [
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 5, K size: 1.00 GB, V size:1e4",
        "KV Cache is allocated. #tokens: " + "9" * 400 + ", K size: 1.00 GB",
        "Allocating " + "9" * 400 + " GB host memory for hierarchical KV cache.",
        "CUDA out of memory. Tried to allocate .. MiB",
        "Decode batch [" + "9" * 5000 + "], #running-req: 1, #token: 5",
    ],
)
def test_a_number_that_is_none_is_not_read_as_another(message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(f"[2026-01-20 09:17:30 TP0] {message}\n")
    for event in read_log(path).events():
        for pool in (event,) if isinstance(event, ev.DevicePool) else ():
            assert pool.v_bytes is None and (pool.tokens == 5 or pool.tokens is None)
            assert pool.k_bytes == 1 << 30
        assert not isinstance(event, ev.HostPool | ev.Batch)
