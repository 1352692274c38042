"""Traces as they come from other people's tools: marks, odd numbers, broken lines, other spellings of a time."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.traffic.traces import read_trace, sniff
from hicache_lab.traffic.traces.times import arrivals, seconds

LINE = '{"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}'


def written(folder: Path, text: str | bytes, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ---- encodings and first lines ----


def test_a_byte_order_mark_is_stepped_over_and_utf16_is_named(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, b"\xef\xbb\xbf" + LINE.encode())).requests == 1
    with pytest.raises(InputError, match=r"is UTF-16.*iconv"):
        read_trace(written(tmp_path, LINE.encode("utf-16")))


@pytest.mark.parametrize(
    ("line", "kind"), [(LINE, "mooncake"), ('{"prompt": "hello"}', "prompts"), ('{"input_lens": []}', "bench-serving")]
)
def test_a_broken_first_line_hides_no_format(tmp_path: Path, line: str, kind: str) -> None:
    for broken in ("oops", line[:-2], "# a remark"):
        assert sniff(written(tmp_path, f"{broken}\n{line}\n")) == kind
    path = written(tmp_path, f"th of a line}}\n{LINE}\n")
    with pytest.raises(InputError, match=r"trace\.jsonl:1: not JSON.*--skip-bad-lines"):
        read_trace(path)
    assert read_trace(path, skip_bad=True).skipped == {"bad line": 1}


def test_bytes_that_are_not_utf8_are_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trace\.jsonl:1: not JSON .*not UTF-8"):
        read_trace(written(tmp_path, b'{"prompt": "' + b"\xe9" * 600 + b'"}\n'))


def test_a_pipe_is_named_as_such_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (written(tmp_path, f"{LINE}\nbroken\n")).open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with pytest.raises(InputError, match=r"^standard input:2: not JSON"):
            read_trace("-")


# ---- numbers ----


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("input_length", "1e300", "expected input_length, a number"),
        ("input_length", "NaN", "expected input_length, a number"),
        ("input_length", "700.5", "expected input_length, a whole number"),
        ("output_length", "1.5", "expected output_length, a whole number"),
        ("timestamp", "Infinity", "expected timestamp"),
        ("timestamp", "NaN", "expected timestamp"),
        ("timestamp", "-5", "expected timestamp"),
    ],
)
def test_numbers_that_cannot_be_are_named(tmp_path: Path, key: str, value: str, complaint: str) -> None:
    old = {"input_length": "700", "output_length": "9", "timestamp": "5"}[key]
    bad = LINE.replace(f'"{key}": {old}', f'"{key}": {value}')
    with pytest.raises(InputError, match=rf"trace\.jsonl:2: {complaint}"):
        read_trace(written(tmp_path, f"{LINE}\n{bad}\n"))


def test_times_on_some_lines_only_are_left_out_and_said(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, LINE + "\n" + LINE.replace('"timestamp": 5, ', "") + "\n"))
    assert trace.arrival_s is None and "1 of 2 requests have no timestamp" in " ".join(trace.notes)


def test_unsigned_hashes_do_not_meet_others(tmp_path: Path) -> None:
    ids = [2**63 + 5, 5, 2**64 - 2, 2**63 - 2, 2**63 - 1]
    lines = [f'{{"hash_ids": [{x}], "input_length": 16, "block_size": 16}}' for x in ids]
    assert read_trace(written(tmp_path, "\n".join(lines))).unique_blocks == len(ids)


# ---- times ----


def test_time_stamps_of_every_spelling() -> None:
    base = seconds("2024-05-10 00:00:00")
    assert base is not None
    for text, later in (
        ("2024-05-10 00:00:00.009930+00:00", 0.00993),
        ("2024-05-10 00:00:01+00:00", 1.0),
        ("2024-05-10T00:00:02.5Z", 2.5),
        ("2024-05-10 02:00:03.1234567+02:00", 3.1234567),
    ):
        stamp = seconds(text)
        assert stamp is not None and stamp - base == pytest.approx(later, abs=1e-6)
    assert [seconds(text) for text in ("nan", "inf", "noon", "2024-13-10 00:00:00", "")] == [None] * 5
    assert arrivals([None, 3.0])[0] is None and "1 of 2 requests have no time" in arrivals([None, 3.0])[1][0]


def test_times_of_azure_2024_and_of_prompts(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2024-05-10 00:00:00.50+00:00,374,44\n2024-05-10 00:00:02+00:00,396,109\n"
    assert read_trace(written(tmp_path, text, "azure.csv")).duration_s == pytest.approx(1.5)
    unreadable = read_trace(written(tmp_path, text.replace("2024-05-10 00:00:02+00:00", "later"), "azure.csv"))
    assert unreadable.duration_s is None and "1 of 2 requests have no time" in " ".join(unreadable.notes)
    prompts = [json.dumps({"prompt": "x" * 300, "timestamp": f"2024-05-10T00:00:0{n}"}) for n in (1, 4)]
    assert read_trace(written(tmp_path, "\n".join(prompts))).duration_s == 3.0


# ---- lengths ----


def test_csv_spellings(tmp_path: Path) -> None:
    quoted = '"TIMESTAMP","ContextTokens","GeneratedTokens"\n"1","374","44"\n"2","12.0","3"\n'
    assert read_trace(written(tmp_path, quoted, "a.csv")).input_tokens.tolist() == [374, 12]
    header = "ContextTokens,GeneratedTokens\n"
    for row in ("-3,4", "3.5,4", "99999999999999999999999,4", "nan,4", "3"):
        with pytest.raises(InputError, match=r"a\.csv:2: expected whole numbers"):
            read_trace(written(tmp_path, f"{header}{row}\n", "a.csv"))
    with pytest.raises(InputError, match="holds no request"):
        read_trace(written(tmp_path, header, "a.csv"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"cut', "not JSON"),
        ("[1]", "without input_lens"),
        ('{"input_lens": [-1], "output_lens": [1]}', "whole numbers of tokens"),
        ('{"input_lens": ["x"], "output_lens": [1]}', "whole numbers of tokens"),
        ('{"input_lens": [1, 2], "output_lens": [1]}', "2 input_lens and 1 output_lens"),
    ],
)
def test_a_bad_line_of_bench_serving_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = written(tmp_path, f'{{"input_lens": [4, 5], "output_lens": [1, 2]}}\n{line}\n')
    with pytest.raises(InputError, match=rf"trace\.jsonl:2: .*{complaint}"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.requests, trace.skipped) == (2, {"bad line": 1})
    with pytest.raises(InputError, match="2 requests, on average 4 prompt tokens and 2 generated ones"):
        trace.require_prefixes("a hit rate")


def test_csv_that_csv_cannot_read_is_named(tmp_path: Path) -> None:
    header = "ContextTokens,GeneratedTokens\n"
    long = written(tmp_path, f"{header}1,2\n{'x' * 140_000},3\n", "a.csv")
    with pytest.raises(InputError, match=r"a\.csv:3: .*not a line of CSV \(field larger"):
        read_trace(long)
    assert read_trace(long, skip_bad=True).skipped == {"bad line": 1}
    with pytest.raises(InputError, match=r"a\.csv:1: .*end in CR alone: tr"):
        read_trace(written(tmp_path, header.replace("\n", "\r") + "1,2\r3,4\r", "a.csv"))
    with pytest.raises(InputError, match="none of the known trace formats"):
        read_trace(written(tmp_path, "loading 1 %\r" * 20 + "x" * 140_000, "a.txt"))
    assert read_trace(written(tmp_path, header.replace("\n", "\r\n") + "1,2\r\n", "a.csv")).requests == 1


# ---- too deep, too long, too large ----

DEEP = "[" * 60_000 + "]" * 60_000


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (f'{{"hash_ids": {DEEP}, "input_length": 1}}', "mooncake"),
        (f'{{"prompt": {DEEP}}}', "prompts"),
        (f'{{"messages": [{{"role": "user", "content": "x", "tool_calls": {DEEP}}}]}}', "prompts"),
        (DEEP, "prompts"),
        (f'{{"input_lens": {DEEP}, "output_lens": [1]}}', "bench-serving"),
        (f'{{"timestamp": "x", "event": "request.finished", "obj": {DEEP}}}', "sglang-log"),
    ],
)
def test_json_too_deep_for_the_decoder_is_an_error_of_its_line(tmp_path: Path, line: str, kind: str) -> None:
    with pytest.raises(InputError, match="nested too deeply"):
        read_trace(written(tmp_path, line), format=kind)


@pytest.mark.parametrize("count", ["9" * 30, "9" * 5000])
def test_counts_beyond_any_are_errors_of_their_line(tmp_path: Path, count: str) -> None:
    out = f"{{'meta_info': {{'prompt_tokens': {count}, 'completion_tokens': 3}}}}"
    with pytest.raises(InputError, match=r"server\.log:1: .*--skip-bad-lines"):
        read_trace(written(tmp_path, f"Finish: obj=GenerateReqInput(rid='a'), out={out}\n", "server.log"))
    with pytest.raises(InputError, match=r"trace\.jsonl:1: .*--skip-bad-lines"):
        read_trace(written(tmp_path, LINE.replace("700", count)))


def test_a_small_file_that_unpacks_without_end_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_lab.traffic.traces.files.MOST_LINE_BYTES", 32 << 20)
    bomb = written(tmp_path, zstandard.compress(b"0" * (64 << 20)))
    assert bomb.stat().st_size < 10_000
    with pytest.raises(InputError, match=r"trace\.jsonl:1: a line of more than 0\.03 GiB"):
        read_trace(bomb)
    array = written(tmp_path, b"[\n" + b'{"prompt": "x"},\n' * (3 << 20) + b"]")
    with pytest.raises(InputError, match=r"one JSON array of more than"):
        read_trace(array)


def test_a_stream_without_end_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=64 << 20))
    with pytest.raises(InputError, match="zero: takes over half of the room"):
        read_trace("/dev/zero")
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read_trace("-")


# ---- prompts ----


def test_tools_and_tool_calls_are_part_of_a_prefix(tmp_path: Path) -> None:
    def request(city: str, tool: str = "weather") -> str:
        calls = [{"function": {"name": "get", "arguments": json.dumps({"city": city * 40})}}]
        messages = [
            {"role": "user", "content": "u" * 400},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": "r" * 400},
        ]
        return json.dumps({"messages": messages, "tools": [{"function": {"name": tool * 40}}]})

    def shared(one: str, other: str) -> int:
        ids = read_trace(written(tmp_path, f"{one}\n{other}\n"), block_tokens=8)
        first, second = ids.ids[: ids.offsets[1]].tolist(), ids.ids[ids.offsets[1] :].tolist()
        return sum(a == b for a, b in zip(first, second, strict=False))

    alike, same_call, same_tools = shared(request("a"), request("a")), request("b"), request("a", "time")
    assert 0 < shared(request("a"), same_call) < alike  # the answer behind another call is not the same prefix
    assert shared(request("a"), same_tools) < shared(request("a"), same_call)  # tools come first


def test_openai_batch_files_and_sglang_bodies(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 600}]}
    batch = json.dumps({"custom_id": "1", "url": "/v1/chat/completions", "body": body})
    plain = json.dumps(body)
    one, other = read_trace(written(tmp_path, batch)), read_trace(written(tmp_path, plain, "plain.jsonl"))
    assert one.input_tokens.tolist() == other.input_tokens.tolist() == [156]
    assert read_trace(written(tmp_path, json.dumps({"text": "x" * 600}))).input_tokens.tolist() == [150]


# ---- request logs ----


def test_a_prompt_may_quote_what_the_log_looks_for(tmp_path: Path) -> None:
    prompt = "np.add(a, b, out={}) input_ids=[1, 2] 'prompt_tokens': 7 it's"
    out = {"text": prompt, "output_ids": [5, 6], "meta_info": {"prompt_tokens": 99, "completion_tokens": 2}}
    line = f"[2026-11-02 10:00:00] Finish: obj=GenerateReqInput(rid='a', text={prompt!r}, input_ids=None), out={out!r}"
    trace = read_trace(written(tmp_path, line, "server.log"), block_tokens=1)
    assert trace.input_tokens.tolist() == [-(-len(prompt) // 4)] and trace.output_tokens.tolist() == [2]
    bare = line.replace(f"text={prompt!r}, ", "")
    assert read_trace(written(tmp_path, bare, "server.log")).input_tokens.tolist() == [99]


@pytest.mark.parametrize("meta", ['{"prompt_tokens": -2}', '{"prompt_tokens": 2, "completion_tokens": "x"}', "{}"])
def test_counts_of_a_logged_request_are_checked(tmp_path: Path, meta: str) -> None:
    line = f'{{"timestamp": "x", "event": "request.finished", "obj": {{}}, "out": {{"meta_info": {meta}}}}}'
    with pytest.raises(InputError, match=r":1: expected (prompt|completion)_tokens, a whole number"):
        read_trace(written(tmp_path, line))


def test_a_log_without_a_finished_request_says_what_would_log_one(tmp_path: Path) -> None:
    line = '{"timestamp": "x", "event": "request.received", "obj": {"input_ids": [1]}}'
    with pytest.raises(InputError, match=r"no finished request.*--log-requests-level 3"):
        read_trace(written(tmp_path, line))
