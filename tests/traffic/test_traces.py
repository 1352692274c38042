import gzip
import io
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.traffic.cost_benefit import load_workload
from hicache_lab.traffic.traces import GENERATORS, Trace, generate, load_tokenizer, read_trace, sniff
from hicache_lab.traffic.traces.files import Skips
from hicache_lab.traffic.traces.hashed import _by_columns, _by_lines, stream_hashed
from hicache_lab.traffic.traces.prompts import Request, interleave

LINE = '{"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [1, 2]}'


def written(folder: Path, text: str, name: str = "trace.jsonl") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def prefixes(trace: Trace) -> list[list[int]]:
    return [trace.ids[a:b].tolist() for a, b in zip(trace.offsets, trace.offsets[1:], strict=False)]


# ---- Mooncake ----


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 50), max_size=6, unique=True), st.integers(0, 10**6), st.integers(0, 99)),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([40, 300, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
def test_lines_are_read_as_the_json_module_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[list[int], int, int]],
    chunk: int,
    spaced: bool,
    extras: bool,
) -> None:
    records = []
    for ids, time, output in rows:
        record: dict[str, object] = {"hash_ids": ids, "output_length": output, "input_length": 512 * len(ids)}
        if extras:
            record |= {"type": "chat", "note": 'quoted "text"', "nested": {"a": [1, {"hash_ids": [3]}]}, "x": None}
        records.append(record | {"timestamp": time + 0.5})
    text = "\n\n".join(json.dumps(r, indent=None, separators=(", ", ": ") if spaced else (",", ":")) for r in records)
    path = written(tmp_path_factory.mktemp("t"), text)
    chunks = list(stream_hashed(path, chunk_bytes=chunk))
    ids = [part.raw_ids[a:b].tolist() for part in chunks for a, b in zip(part.offsets, part.offsets[1:], strict=False)]
    assert ids == [row[0] for row in rows]
    assert [int(x) for part in chunks for x in part.input_tokens] == [512 * len(row[0]) for row in rows]
    assert [int(x) for part in chunks for x in part.output_tokens] == [row[2] for row in rows]
    assert [float(x) for part in chunks for x in part.timestamps_ms] == [row[1] + 0.5 for row in rows]


ODD = ["1", "-1", "1.5", "1.0", "null", "true", '"1"', "[]", "1e3", "NaN", str(2**53), str(2**64 - 1), str(2**63), "{}"]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.sampled_from(["hash_ids", "input_length", "output_length", "timestamp", "block_size", "x"]), max_size=6
    ),
    st.lists(st.sampled_from(ODD), min_size=6, max_size=6),
    st.lists(st.sampled_from([*ODD, "5"]), max_size=3),
    st.sampled_from(["\n", "\n\n", " ", "", "\r\n"]),
)
def test_what_the_columns_give_the_lines_give_too(
    keys: list[str], values: list[str], ids: list[str], between: str
) -> None:
    fields = [f'"{key}": {value}' for key, value in zip(keys, values, strict=False)]
    fields += [f'"hash_ids": [{", ".join(ids)}]'] * ("hash_ids" not in keys)
    block = between.join([LINE, "{" + ", ".join(fields) + "}", LINE]).encode()
    columns = _by_columns(block)
    if columns is None:
        return
    lines = _by_lines(Path("t"), block, 1, Skips())
    for name, column in vars(columns).items():
        assert column.tolist() == getattr(lines, name).tolist() and column.dtype == getattr(lines, name).dtype, name


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_compression_is_seen_in_the_bytes_not_in_the_name(tmp_path: Path, suffix: str) -> None:
    data = (LINE + "\n").encode() * 3
    packed = {"": data, ".gz": gzip.compress(data), ".zst": zstandard.compress(data)}[suffix]
    path = tmp_path / "trace.bin"
    path.write_bytes(packed)
    trace = read_trace(path)
    assert (trace.requests, trace.block_tokens, trace.tail_deficit.tolist()) == (3, 512, [324] * 3)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"input_length": 5}', "expected hash_ids"),
        ('{"hash_ids": [1], "output_length": 3}', "expected input_length"),
        ('{"hash_ids": [1.5], "input_length": 500}', "expected hash_ids"),
        ('{"hash_ids": [1], "input_length": -500}', "expected input_length"),
        ('{"hash_ids": [1], "input_length": "500"}', "expected input_length"),
        ('{"hash_ids": [true], "input_length": 500}', "expected hash_ids"),
        (LINE + " trailing", "not JSON"),
        (LINE[:-1] + ', "hash_ids": "x"}', "expected hash_ids"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_dropped_silently(tmp_path: Path, bad: str, complaint: str) -> None:
    path = written(tmp_path, "\n".join([LINE, "", LINE, bad, LINE]))
    with pytest.raises(InputError, match=rf"trace\.jsonl:4: .*{complaint}.*--skip-bad-lines"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert (trace.requests, trace.skipped) == (3, {"bad line": 1})
    assert "trace.jsonl:4" in trace.notes[0]


def test_the_block_size_comes_from_the_lengths_or_from_the_user(tmp_path: Path) -> None:
    sixteen = '{"hash_ids": [1, 2, 3], "input_length": 40}'
    assert read_trace(written(tmp_path, sixteen + "\n" + '{"hash_ids": [1], "input_length": 16}')).block_tokens == 16
    assert read_trace(written(tmp_path, '{"hash_ids": [1], "input_length": 64, "block_size": 64}')).block_tokens == 64
    with pytest.raises(InputError, match="does not fit 512 tokens a block"):
        read_trace(written(tmp_path, sixteen), block_tokens=512)
    with pytest.raises(InputError, match="cannot be told from the lengths"):
        read_trace(written(tmp_path, '{"hash_ids": [1, 2], "input_length": 31}\n{"hash_ids": [1], "input_length": 99}'))
    with pytest.raises(InputError, match="block_size differs"):
        read_trace(
            written(
                tmp_path, "\n".join(f'{{"hash_ids": [1], "input_length": {n}, "block_size": {n}}}' for n in (8, 16))
            )
        )


def test_content_hashes_are_chained_into_prefixes(tmp_path: Path) -> None:
    lines = [
        f'{{"hash_ids": {ids}, "input_length": {16 * len(ids)}, "block_size": 16}}' for ids in ([7, 8], [9, 8], [7, 8])
    ]
    trace = read_trace(written(tmp_path, "\n".join(lines)))
    first, second, third = prefixes(trace)
    assert first == third and first[1] != second[1]
    assert any("re-chained" in note for note in trace.notes)


def test_large_hashes_keep_their_identity(tmp_path: Path) -> None:
    high = 2**64 - 1
    lines = [f'{{"hash_ids": [{a}, {b}], "input_length": 32, "block_size": 16}}' for a, b in ((high, 5), (high, 6))]
    first, second = prefixes(read_trace(written(tmp_path, "\n".join(lines))))
    assert first[0] == second[0] and first[1] != second[1]


def test_several_frames_are_one_file(tmp_path: Path) -> None:
    frame = zstandard.compress((LINE + "\n").encode() * 3)
    (tmp_path / "two.zst").write_bytes(frame + frame)
    assert read_trace(tmp_path / "two.zst").requests == 6


def test_a_pipe_is_read_like_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(gzip.compress((LINE + "\n").encode() * 2))))
    trace = read_trace("-")
    assert (trace.requests, trace.origin) == (2, "measured: standard input")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(LINE + "\n",))
    writer.start()
    assert read_trace(pipe).requests == 1
    writer.join()


def test_a_damaged_archive_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress((LINE + "\n").encode() * 5000)
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.gz"):
        read_trace(tmp_path / "cut.gz", format="mooncake")
    (tmp_path / "cut.zst").write_bytes(zstandard.compress((LINE + "\n").encode() * 5000)[:-9])
    with pytest.raises(InputError, match=r"cut\.zst: cannot be read to its end"):
        read_trace(tmp_path / "cut.zst", format="mooncake")
    packed = zstandard.compress(np.random.default_rng(1).bytes(100_000))
    (tmp_path / "odd.zst").write_bytes(packed[:50] + b"\x00" * 20 + packed[70:])
    with pytest.raises(InputError, match=r"odd\.zst"):
        read_trace(tmp_path / "odd.zst", format="mooncake")


# ---- prompts ----


def test_prompts_as_token_ids_are_exact(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4, 5], "output_ids": [6, 7, 8]}, {"prompt": [1, 2, 3, 4, 5, 6, 7, 9]}]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows))), block_tokens=2)
    assert trace.input_tokens.tolist() == [5, 8] and trace.output_tokens.tolist() == [3, 0]
    assert trace.prompt_blocks.tolist() == [2, 4]
    first, second = prefixes(trace)
    # prompt and output but for the last output token: 1 2 3 4 5 6 7 → three whole blocks
    assert len(first) == 3 and first == second[:3]
    assert trace.notes == ()


def test_text_without_a_tokenizer_is_marked_as_an_estimate(tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 64 + "b" * 64}, {"prompt": "a" * 64 + "c" * 64}]
    trace = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows))), block_tokens=8)
    first, second = prefixes(trace)
    assert trace.input_tokens.tolist() == [32, 32]
    assert first[:2] == second[:2] and first[2] != second[2]
    assert trace.notes[0].startswith("estimated: 4 characters")


def test_text_with_a_tokenizer_is_exact(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "read": 1, "the": 2, "source": 3, "log": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "read the source"}, {"prompt": "read the log again"}]
    trace = read_trace(
        written(tmp_path, "\n".join(map(json.dumps, rows))), block_tokens=1, tokenizer=load_tokenizer(tmp_path)
    )
    first, second = prefixes(trace)
    assert trace.input_tokens.tolist() == [3, 4] and trace.notes == ()
    assert first[:2] == second[:2] and first[2] != second[2]


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer\.json is not there"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_conversation_is_one_request_a_turn_and_shares_its_history(tmp_path: Path) -> None:
    talk = [
        {"from": "human", "value": "x" * 100},
        {"from": "gpt", "value": "y" * 100},
        {"from": "human", "value": "z" * 100},
        {"from": "gpt", "value": "w" * 10},
    ]
    array = [{"conversations": talk}, {"conversations": talk[:2]}]
    trace = read_trace(written(tmp_path, json.dumps(array), "sharegpt.json"), block_tokens=4)
    assert trace.requests == 3 and trace.outputs_known
    one, two, three = prefixes(trace)
    assert one == two, "the second session begins like the first"
    assert three[: len(one)] == one, "a turn begins with everything said before"


def test_messages_are_one_request_with_the_last_answer_as_output(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
    trace = read_trace(
        written(tmp_path, "\n".join(json.dumps({"messages": m, "timestamp": t}) for m, t in ((said, 1), (parts, 3)))),
        block_tokens=1,
    )
    assert trace.output_tokens.tolist() == [1, 0]
    assert trace.arrival_s is not None and trace.duration_s == 2.0
    assert prefixes(trace)[0] == prefixes(trace)[1]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ("5", "expected an object"),
        ('{"messages": [5]}', "message object"),
        ('{"prompt": ""}', "prompt is empty"),
        ('{"prompt": {"a": 1}}', "as text or as a list"),
        ('{"conversations": [{"from": "human", "value": "x"}]}', "without an assistant turn"),
        ('{"messages": [{"role": "user", "content": 5}]}', "content as text"),
    ],
)
def test_a_bad_prompt_is_named(tmp_path: Path, record: str, complaint: str) -> None:
    path = written(tmp_path, '{"prompt": "good"}\n' + record)
    with pytest.raises(InputError, match=rf":2: .*{complaint}"):
        read_trace(path, format="prompts")
    assert read_trace(path, format="prompts", skip_bad=True).skipped == {"bad record": 1}


def test_sessions_are_interleaved_in_order() -> None:
    sessions = [
        [Request(f"{name}{turn}", "") for turn in range(count)] for name, count in (("a", 3), ("b", 1), ("c", 2))
    ]
    assert [r.prompt for r in interleave(sessions, 2)] == ["a0", "b0", "a1", "c0", "a2", "c1"]
    assert [r.prompt for r in interleave(sessions, 1)] == ["a0", "a1", "a2", "b0", "c0", "c1"]


# ---- SGLang's request logs ----

FINISH = (
    "[2026-11-02 10:00:0{n}] Finish: obj=GenerateReqInput(rid='r{n}', text=None, input_ids=[1, 2, 3, {n}], "
    "sampling_params={{'max_new_tokens': 3}}), out={{'text': 'x', 'output_ids': [7, 8, 9], 'meta_info': {{"
    "'id': 'r{n}', 'prompt_tokens': 4, 'completion_tokens': 3, 'cached_tokens': 2, 'e2e_latency': 0.5}}}}"
)


def test_text_request_logs(tmp_path: Path) -> None:
    other = "[2026-11-02 10:00:00 TP0] Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 0"
    path = written(tmp_path, "\n".join([other, FINISH.format(n=4), other, FINISH.format(n=6)]), "server.log")
    assert sniff(path) == "sglang-log"
    trace = read_trace(path, block_tokens=1)
    assert trace.requests == 2 and trace.duration_s == 2.0
    assert prefixes(trace)[0][:3] == prefixes(trace)[1][:3]
    assert trace.output_tokens.tolist() == [3, 3]


def test_a_quoted_prompt_is_read_and_never_evaluated(tmp_path: Path) -> None:
    line = FINISH.format(n=4).replace(
        "text=None, input_ids=[1, 2, 3, 4]", r"text='it\'s __import__(\"os\")', input_ids=None"
    )
    trace = read_trace(written(tmp_path, line, "server.log"), block_tokens=1)
    assert trace.input_tokens.tolist() == [6]  # 21 characters


def test_cut_and_absent_prompts_are_counted_and_end_as_lengths(tmp_path: Path) -> None:
    cut = FINISH.format(n=4).replace("[1, 2, 3, 4]", "[1, 2] ... [3, 4]")
    bare = FINISH.format(n=5).replace("text=None, input_ids=[1, 2, 3, 5], ", "")
    path = written(tmp_path, "\n".join([cut, bare, FINISH.format(n=6)]), "server.log")
    trace = read_trace(path)
    assert trace.requests == 1 and sum(trace.skipped.values()) == 2
    assert any("level 3" in reason for reason in trace.skipped)
    only_lengths = read_trace(written(tmp_path, "\n".join([bare, bare]), "bare.log"))
    assert not only_lengths.prefix_known and only_lengths.input_tokens.tolist() == [4, 4]


def test_json_request_logs(tmp_path: Path) -> None:
    def event(ids: list[int]) -> str:
        out = {"text": "", "output_ids": [9], "meta_info": {"prompt_tokens": len(ids), "completion_tokens": 1}}
        return json.dumps(
            {"timestamp": "2026-11-02T10:00:00", "event": "request.finished", "obj": {"input_ids": ids}, "out": out}
        )

    path = written(tmp_path, "\n".join([event([1, 2]), event([1, 3])]), "requests.jsonl")
    assert sniff(path) == "sglang-log"
    assert read_trace(path, block_tokens=1).requests == 2
    with pytest.raises(InputError, match=":1: a finished request without obj"):
        read_trace(written(tmp_path, '{"timestamp": "x", "event": "request.finished", "obj": 3}', "bad.jsonl"))


# ---- lengths ----


def test_azure_csv_holds_lengths_and_says_so(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    text += "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    trace = read_trace(written(tmp_path, text, "azure.csv"))
    assert trace.input_tokens.tolist() == [374, 396] and not trace.prefix_known
    assert trace.duration_s == pytest.approx(4.314579, abs=1e-5)
    with pytest.raises(InputError, match="lengths only, no prefix information"):
        trace.require_prefixes("a hit rate")
    with pytest.raises(InputError, match=r"azure\.csv:3"):
        read_trace(written(tmp_path, text.replace("396", "many"), "azure.csv"))


def test_bench_results(tmp_path: Path) -> None:
    serving = json.dumps(
        {"request_throughput": 3, "total_input_tokens": 9, "input_lens": [4, 5], "output_lens": [1, 2]}
    )
    assert read_trace(written(tmp_path, serving)).output_tokens.tolist() == [1, 2]
    with pytest.raises(InputError, match="--output-details"):
        read_trace(written(tmp_path, json.dumps({"request_throughput": 3, "total_input_tokens": 9})))
    with pytest.raises(InputError, match="--generate bench_multiturn"):
        read_trace(written(tmp_path, json.dumps({"timestamp": "t", "tag": "", "summary": {"average_ttft": 1}})))


@pytest.mark.parametrize("text", ["", "\n\n", "hello\nworld\n", '{"some": "thing"}\n', "a,b,c\n1,2,3\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"trace\.jsonl"):
        read_trace(written(tmp_path, text))


def test_paths_and_names_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such trace file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(UsageError, match="is a folder"):
        read_trace(tmp_path)
    with pytest.raises(UsageError, match="--format"):
        read_trace(written(tmp_path, LINE), format="csv")
    with pytest.raises(UsageError, match="takes no generator parameters"):
        load_workload(str(written(tmp_path, LINE)), seed=3)
    assert load_workload(str(written(tmp_path, LINE)), block_tokens=512).block_tokens == 512


# ---- generators ----


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_generators_are_seeded_and_chained(name: str) -> None:
    one, again, other = generate(name, seed=3), generate(name, seed=3), generate(name, seed=4)
    assert (one.ids == again.ids).all() and (one.input_tokens == again.input_tokens).all()
    if name != "cyclic_scan":
        assert one.ids.size != other.ids.size or (one.ids != other.ids).any()
    parents: dict[int, int] = {}
    for blocks in prefixes(one.head(300)):
        for before, block in zip([-1, *blocks], blocks, strict=False):
            assert parents.setdefault(block, before) == before
    assert (one.prompt_blocks <= np.diff(one.offsets)).all()
    assert one.ids.max() < one.unique_blocks
    assert one.arrival_s is None or (np.diff(one.arrival_s) >= 0).all()


def test_the_mooncake_generator_matches_the_published_statistics() -> None:
    """FAST'25 conversation trace: 12,031 requests, mean 12,035 in, 343 out, 23.98 blocks, ideal hit 0.366."""
    made = generate("mooncake_like", seed=0)
    assert made.requests == pytest.approx(12_031, rel=0.02)
    assert made.input_tokens.mean() == pytest.approx(12_035, rel=0.05)
    assert made.output_tokens.mean() == pytest.approx(343, rel=0.03)
    assert made.references / made.requests == pytest.approx(23.98, rel=0.03)
    assert 1 - made.unique_blocks / made.references == pytest.approx(0.366, abs=0.04)
    assert np.median(made.input_tokens) == pytest.approx(6_909, rel=0.1)
    assert np.percentile(made.input_tokens, 95) == pytest.approx(39_551, rel=0.1)


@pytest.mark.parametrize(
    ("name", "parameters", "complaint"),
    [
        ("nothing", {}, "--generate: expected one of"),
        ("rag", {"colour": "3"}, "--param colour: rag takes"),
        ("rag", {"requests": "many"}, "--param requests: expected int"),
        ("rag", {"requests": "-3"}, "at least 1"),
        ("multi_turn", {"sessions": "0"}, "--param sessions: expected at least 1"),
        ("bench_multiturn", {"barrier": "perhaps"}, "--param barrier: expected bool"),
    ],
)
def test_parameters_are_checked(name: str, parameters: dict[str, str], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        generate(name, **parameters)


def test_parameters_may_come_as_text() -> None:
    assert generate("bench_multiturn", clients="1_0", rounds="2", barrier="true").requests == 20
