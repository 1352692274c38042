"""Plans are seeded and honest; measured times agree with a server that logs its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fake_sglang import Answer, fake_sglang, recorded, recorded_routes
from hypothesis import given
from hypothesis import strategies as st

import hicache_lab.serving.load as lab
from hicache_lab.base.errors import HostError, ServerError, UsageError
from hicache_lab.serving.client import SglangClient
from hicache_lab.serving.load.pace import LagMeter
from hicache_lab.serving.load.plans import as_text
from hicache_lab.traffic.traces import Trace

ROOT = Path(__file__).parents[2]


def write_evict_read(**changes) -> lab.Plan:
    return lab.write_evict_read(
        **{"seed": 1, "prompts": 2, "prompt_tokens": 8, "answer_tokens": 3, "evict_tokens": 20} | changes
    )


# ---- plans

PLANS = {
    "multi_turn": lambda seed: lab.multi_turn(
        seed=seed, conversations=3, turns=4, first_tokens=20, turn_tokens=5, answer_tokens=2, system_tokens=7
    ),
    "rounds": lambda seed: lab.rounds(
        seed=seed, conversations=3, turns=4, first_tokens=20, turn_tokens=5, answer_tokens=2
    ),
    "shared_prefix": lambda seed: lab.shared_prefix(
        seed=seed, groups=3, prompts_per_group=4, prefix_tokens=30, suffix_tokens=5, answer_tokens=2
    ),
    "random": lambda seed: lab.random_prompts(seed=seed, prompts=9, prompt_tokens=30, answer_tokens=2),
    "write_evict_read": lambda seed: write_evict_read(seed=seed),
}


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(make) -> None:
    assert make(7) == make(7)
    assert make(7).phases != make(8).phases


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_a_plan_can_be_made_again_from_its_record(make) -> None:
    plan = make(7)
    assert lab.plan_of(plan.name, plan.seed, {**plan.parameters, "form": plan.form, "warmup": 3}) == plan


def test_requests_and_tokens_are_counted_with_their_history() -> None:
    plan = PLANS["multi_turn"](0)
    assert plan.requests == 12
    # turns of 27, 5, 5, 5 new tokens and 2 answer tokens each, every prompt repeating what was before


def test_every_conversation_has_its_turn_before_any_comes_back() -> None:
    plan = PLANS["rounds"](0)
    turns = [[session.turns[0].tokens for session in phase.sessions] for phase in plan.phases]
    assert [(len(prompts), len(prompts[0])) for prompts in turns] == [(3, 20), (3, 25), (3, 30), (3, 35)]
    for before, after in pairwise(turns):
        assert [prompt[: len(said)] for said, prompt in zip(before, after, strict=True)] == before


def test_prompts_of_a_group_share_their_prefix_and_nothing_else() -> None:
    prompts = [session.turns[0].tokens for session in PLANS["shared_prefix"](3).phases[0].sessions]
    groups = {prompt[:30] for prompt in prompts}
    assert len(groups) == 3
    assert len({prompt[30:] for prompt in prompts}) == 12


def test_what_is_read_is_what_was_written() -> None:
    write, evict, read = write_evict_read().phases
    assert write.sessions == read.sessions
    assert sum(len(session.turns[0].tokens) for session in evict.sessions) >= 20
    assert not set(write.sessions) & set(evict.sessions)


TRACE = Trace.build(
    np.array([0, 1, 2, 0, 1, 3, 9]),
    np.array([0, 3, 6, 7]),
    block_tokens=512,
    input_tokens=np.array([1300, 1536, 100]),
    output_tokens=np.array([40, 400, 1]),
    arrival_s=np.array([10.0, 12.0, 13.0]),
)


def test_a_replayed_trace_keeps_arrivals_lengths_and_sharing() -> None:
    plan = lab.trace_replay(TRACE, seed=5, speed=2.0)
    (first, second, third) = [session.turns[0] for session in plan.phases[0].sessions]
    assert [session.at_s for session in plan.phases[0].sessions] == [0.0, 1.0, 1.5]
    assert [len(turn.tokens) for turn in (first, second, third)] == [1300, 1536, 100]
    assert first.tokens[:1024] == second.tokens[:1024]
    assert first.tokens[1024:1300] != second.tokens[1024:1300]
    assert (first.max_new_tokens, second.max_new_tokens) == (40, 400)


def test_a_shrunk_trace_shares_the_same_blocks() -> None:
    plan = lab.trace_replay(TRACE, seed=5, shrink=32, most_prompt_tokens=40, most_answer_tokens=4)
    first, second, _ = [session.turns[0] for session in plan.phases[0].sessions]
    assert first.tokens == second.tokens  # 16-token blocks: only the two shared ones fit into 40 tokens
    assert len(first.tokens) == 32
    assert (first.max_new_tokens, second.max_new_tokens) == (1, 4)


def common_prefix(one, other):
    """The longest common beginning of two sequences."""
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return one[:length]


@given(st.lists(st.integers(10, 499), max_size=30), st.lists(st.integers(10, 499), max_size=30))
def test_text_repeats_exactly_where_ids_do(one: list[int], other: list[int]) -> None:
    shared = len(common_prefix(one, other))
    assert common_prefix(as_text(one), as_text(other)).startswith(as_text(one[:shared]))
    assert (as_text(one) == as_text(other)) == (one == other)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: lab.random_prompts(seed=0, prompts=0, prompt_tokens=1, answer_tokens=1), "prompts"),
        (lambda: write_evict_read(evict_tokens=0), "evict_tokens"),
        (lambda: lab.trace_replay(TRACE, 0, seed=0), "no requests"),
        (lambda: lab.trace_replay(TRACE, seed=0, shrink=0.5), "shrink"),
        (lambda: lab.Plan("x", 0, (), form="words"), "form"),
        (lab.Pace, "concurrency"),
        (lambda: lab.Pace(concurrency=0), "concurrency"),
        (lambda: lab.Pace(rate_per_s=float("nan")), "rate_per_s"),
        (lambda: lab.Pace(rate_per_s=1.0, by_trace=True), "rate_per_s"),
        (lambda: lab.Limits(duration_s=0), "duration_s"),
        (lambda: lab.Limits(max_requests=0), "max_requests"),
    ],
)
def test_mistakes_are_named(make, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        make()


def test_poisson_arrivals_have_the_rate_and_the_seed() -> None:
    arrive, again = lab.Pace(rate_per_s=50.0, seed=3).arrivals(), lab.Pace(rate_per_s=50.0, seed=3).arrivals()
    times = [arrive(None) for _ in range(5000)]
    assert times[:9] == [again(None) for _ in range(9)]
    assert times[-1] == pytest.approx(100.0, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    # exponential gaps: their standard deviation is their mean
    mean = sum(gaps) / len(gaps)
    assert (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
def test_percentiles_are_values_that_were_measured(values: list[float]) -> None:
    spread = lab.Spread.of(values)
    assert {spread.p50, spread.p90, spread.p95, spread.p99, spread.max} <= set(values)
    assert spread.p50 <= spread.p90 <= spread.p95 <= spread.p99 <= spread.max
    assert sum(value <= spread.p90 for value in values) >= 0.9 * len(values)


def test_nothing_measured_has_no_percentiles() -> None:
    assert lab.Spread.of([]).p50 is None


# ---- against a server that logs its own times


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory):
    """A server with TTFT 60 ms, 10 ms between tokens, 12 tokens; its URL and the path of its log."""
    log = tmp_path_factory.mktemp("truth") / "truth.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "schedule_server.py"), "--log", str(log)]
    command += ["--ttft-ms", "60", "--itl-ms", "10", "--tokens", "12"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", log
        process.terminate()


def truth(log: Path, earlier: int, requests: int) -> list[dict]:
    """What the server logged after the first ``earlier`` requests."""
    for _ in range(40):
        lines = log.read_text().splitlines()[earlier:]
        if len(lines) >= requests:
            break
        time.sleep(0.1)
    return [json.loads(line) for line in lines]


@pytest.mark.stress
@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
def test_reported_times_cover_what_the_server_did(scheduled, api) -> None:
    url, log = scheduled
    time.sleep(0.6)  # the log is flushed twice a second
    earlier = len(log.read_text().splitlines())
    plan = lab.random_prompts(
        seed=1, prompts=12, prompt_tokens=8, answer_tokens=12, form="text" if api == "chat" else "ids"
    )
    result = lab.run_load(url, plan, pace=lab.Pace(concurrency=4), target=lab.Target(api=api), warmup=2, progress=False)
    assert result.ended == "complete"
    assert len(result.succeeded) == 12
    assert [record.index for record in result.records] == [-2, -1, *range(1, 13)]
    told = truth(log, earlier, 14)
    sent = sorted(entry["sent_s"][0] for entry in told)
    # a client cannot see a token before it was sent: its mean is above the server's own, by a bounded delay
    true_ttft = sum(sent) / len(sent)
    assert true_ttft - 0.003 <= result.ttft.mean <= true_ttft + 0.25
    true_itl = sum((e["sent_s"][-1] - e["sent_s"][0]) / 11 for e in told) / len(told)
    assert result.itl.count == 12 * 11
    assert result.itl.mean == pytest.approx(true_itl, abs=0.008)
    assert result.e2e.mean >= result.ttft.mean + 11 * 0.009


def test_concurrency_is_kept_and_used(scheduled) -> None:
    url, _ = scheduled
    plan = lab.random_prompts(seed=1, prompts=12, prompt_tokens=8, answer_tokens=12)
    result = lab.run_load(url, plan, pace=lab.Pace(concurrency=3), progress=False)
    edges = sorted([(r.sent_s, 1) for r in result.succeeded] + [(r.end_s, -1) for r in result.succeeded])
    running, most = 0, 0
    for _, change in edges:
        running += change
        most = max(most, running)
    assert most == 3


def test_an_open_loop_does_not_wait_for_answers(scheduled) -> None:
    url, _ = scheduled
    plan = lab.random_prompts(seed=1, prompts=20, prompt_tokens=8, answer_tokens=12)
    result = lab.run_load(url, plan, pace=lab.Pace(rate_per_s=100.0, seed=4), progress=False)
    arrive = lab.Pace(rate_per_s=100.0, seed=4).arrivals()
    due = [arrive(None) for _ in range(20)]
    assert [r.due_s - result.records[0].due_s for r in result.records] == pytest.approx(
        [d - due[0] for d in due], abs=1e-6
    )
    assert all(r.sent_s >= r.due_s for r in result.records)
    # 20 arrivals in about 0.2 s while every answer takes 0.17 s
    assert result.records[-1].sent_s < 1.0


def test_conversations_carry_their_history(scheduled) -> None:
    url, _ = scheduled
    plan = lab.multi_turn(seed=2, conversations=2, turns=3, first_tokens=10, turn_tokens=4, answer_tokens=12)
    result = lab.run_load(url, plan, progress=False)
    assert [(r.session, r.turn) for r in sorted(result.records, key=lambda r: (r.session, r.turn))] == [
        (s, t) for s in (0, 1) for t in (0, 1, 2)
    ]
    by_session = [[r for r in result.records if r.session == s] for s in (0, 1)]
    assert all(a.end_s <= b.sent_s for rs in by_session for a, b in pairwise(rs))


async def test_what_is_sent_in_a_conversation() -> None:
    routes = recorded_routes("0.5.23")
    routes["/generate"] = Answer(body=recorded("0.5.23-llama-tp1", "generate_stream.txt"))
    routes["/v1/chat/completions"] = Answer(body=recorded("0.5.23-llama-tp1", "chat_stream.txt"))
    make = {
        "seed": 2,
        "conversations": 1,
        "turns": 2,
        "first_tokens": 5,
        "turn_tokens": 3,
        "answer_tokens": 6,
    }
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        ids = await lab.load(client, lab.multi_turn(**make))
        first, second = [seen.json["input_ids"] for seen in fake.seen if seen.path == "/generate"]
        assert second[: len(first)] == first
        assert second[len(first) : len(first) + 6] == list(ids.records[0].output_ids)
        assert len(second) == len(first) + 6 + 3
        await lab.load(client, lab.multi_turn(**make, form="text"), target=lab.Target(api="chat"))
        last = [seen.json["messages"] for seen in fake.seen if "chat" in seen.path][-1]
        assert [message["role"] for message in last] == ["user", "assistant", "user"]


@pytest.mark.parametrize(("api", "turns"), [("chat", 1), ("completions", 2)])
async def test_ids_that_an_endpoint_cannot_take_are_refused_first(api, turns: int) -> None:
    plan = lab.multi_turn(seed=2, conversations=1, turns=turns, first_tokens=5, turn_tokens=3, answer_tokens=6)
    async with fake_sglang(recorded_routes("0.5.23")) as fake, SglangClient(fake.url) as client:
        with pytest.raises(UsageError, match="form='text'"):
            await lab.load(client, plan, target=lab.Target(api=api))
        assert not [seen for seen in fake.seen if seen.method == "POST"]


# ---- limits, interruption, faults


def test_caps_stop_the_load_and_say_so(scheduled) -> None:
    url, _ = scheduled
    plan = lab.random_prompts(seed=1, prompts=50, prompt_tokens=8, answer_tokens=12)
    capped = lab.run_load(url, plan, limits=lab.Limits(max_requests=5), progress=False)
    assert capped.ended == "cap: max_requests 5 reached"
    assert len(capped.succeeded) == 5
    tokens = lab.run_load(url, plan, limits=lab.Limits(max_tokens=100), progress=False)
    assert tokens.ended == "cap: max_tokens 100 would be exceeded"
    assert len(tokens.succeeded) == 5  # 20 tokens each
    short = lab.run_load(url, plan, pace=lab.Pace(concurrency=1), limits=lab.Limits(duration_s=0.5), progress=False)
    assert short.ended == "duration"
    assert 0 < len(short.succeeded) < 50
    assert all(record.error is None for record in short.records)  # those under way were answered


def after(log: Path, requests: int, action) -> threading.Thread:
    """Act once the server has logged so many requests: no fixed time is right on a busy machine."""

    def wait() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < requests:
            time.sleep(0.05)
        action()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_interrupting_keeps_what_was_measured(scheduled, tmp_path: Path) -> None:
    url, log = scheduled
    plan = lab.random_prompts(seed=1, prompts=500, prompt_tokens=8, answer_tokens=12)
    thread = after(log, len(log.read_text().splitlines()) + 4, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = lab.run_load(url, plan, pace=lab.Pace(concurrency=2), progress=False)
    thread.join()
    assert result.ended == "interrupted"
    assert 0 < len(result.succeeded) < 500
    assert result.notes[0] in {f"prompts under way when the load ended, in no figure: {count}" for count in (1, 2)}
    result.write(tmp_path)
    assert json.loads((tmp_path / "load.json").read_text())["ended"] == "interrupted"


def test_a_server_killed_in_the_middle_is_given_up(tmp_path: Path) -> None:
    log = tmp_path / "truth.jsonl"
    command = [sys.executable, str(ROOT / "bench" / "schedule_server.py"), "--itl-ms", "5", "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        thread = after(log, 4, process.kill)
        plan = lab.random_prompts(seed=1, prompts=500, prompt_tokens=8, answer_tokens=12)
        result = lab.run_load(url, plan, limits=lab.Limits(lost_after=6), progress=False)
        thread.join()
    assert result.ended.startswith("gave up: 6 failures in a row")
    assert result.succeeded
    failed = [record for record in result.measured if record.error]
    assert 6 <= len(failed) <= 6 + 8
    assert any("could not be asked after the load" in note for note in result.notes)
    result.write(tmp_path)
    frame = pd.read_parquet(tmp_path / "requests.parquet")
    assert frame["error"].notna().sum() == len(failed)


async def test_a_server_that_still_loads_is_sent_nothing() -> None:
    routes = recorded_routes("0.5.23") | {"/health": Answer(503)}
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        with pytest.raises(ServerError, match="still loading"):
            await lab.load(client, PLANS["random"](1))
    assert {seen.path for seen in fake.seen} == {"/health"}


def test_nothing_listens() -> None:
    plan = lab.random_prompts(seed=1, prompts=5, prompt_tokens=8, answer_tokens=12)
    with pytest.raises(ServerError, match="nothing listens"):
        lab.run_load("http://127.0.0.1:9", plan, progress=False)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (Answer(500, b"out of memory"), "status 500: out of memory"),
        (Answer(body=b"data: {broken\n\n"), "malformed"),
        (
            Answer(body=b'data: {"text": "a", "meta_info": {"completion_tokens": 1}}\n\n', then="reset"),
            "broke|cut",
        ),
        (Answer(then="hang"), "no answer within 0.2 s"),
    ],
)
async def test_failed_requests_are_records_with_their_reason(answer: Answer, problem: str) -> None:
    routes = recorded_routes("0.5.23") | {"/generate": answer}
    plan = lab.random_prompts(seed=1, prompts=3, prompt_tokens=8, answer_tokens=12)
    async with fake_sglang(routes) as fake, SglangClient(fake.url, stall_seconds=0.2) as client:
        result = await lab.load(client, plan)
    assert len(result.measured) == 3
    assert not result.succeeded
    for record in result.measured:
        with pytest.raises(AssertionError, match=problem):
            raise AssertionError(record.error)
    assert result.as_dict()["failed"] == 3
    assert any(note.startswith("3 of 3 prompts failed; the first: ") for note in result.notes)


async def test_a_slow_stream_is_slow_and_not_wrong() -> None:
    events = recorded("0.5.23-llama-tp1", "generate_stream.txt").split(b"\n\n")
    body = [event + b"\n\n" for event in events if event]
    routes = recorded_routes("0.5.23") | {"/generate": Answer(body=body, pause_s=0.05)}
    plan = lab.random_prompts(seed=1, prompts=1, prompt_tokens=8, answer_tokens=6)
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        (record,) = (await lab.load(client, plan)).succeeded
    assert min(record.itl_s) > 0.03
    assert record.completion_tokens == 6


async def test_vanished_metrics_and_a_restart_are_noted() -> None:
    routes = recorded_routes("0.5.23")
    data = json.loads(routes["/server_info"].body)
    asked = {"/server_info": 0, "/metrics": 0}

    def server_info(seen):
        asked[seen.path] += 1
        return Answer(body=json.dumps({**data, "hicache_ratio": 4.0 if asked[seen.path] == 1 else 2.0}).encode())

    def metrics(seen):
        asked[seen.path] += 1
        return Answer(body=recorded("0.5.23-llama-tp1", "metrics.txt")) if asked[seen.path] == 1 else Answer(404)

    stream = Answer(body=[recorded("0.5.23-llama-tp1", "generate_stream.txt")], pause_s=0.1)
    routes |= {"/server_info": server_info, "/metrics": metrics, "/generate": stream}
    plan = lab.random_prompts(seed=1, prompts=4, prompt_tokens=8, answer_tokens=6)
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        result = await lab.load(client, plan, pace=lab.Pace(concurrency=1), watch_period_s=0.1)
    assert any("hicache_ratio: 4.0 → 2.0" in note for note in result.notes)
    assert any("scrapes of /metrics failed" in note and "metrics are off" in note for note in result.notes)
    assert result.samples[0].host_used_tokens == 8187
    assert result.samples[-1].host_used_tokens is None
    assert result.ended == "complete"


async def test_counters_that_fall_betray_a_restart_with_the_same_flags() -> None:
    text = recorded("0.5.23-llama-tp1", "metrics.txt")
    scrapes = iter([text] + [text.replace(b"16154.0", b"3.0")] * 50)
    routes = recorded_routes("0.5.23") | {
        "/metrics": lambda seen: Answer(body=next(scrapes)),
        "/generate": Answer(body=[recorded("0.5.23-llama-tp1", "generate_stream.txt")], pause_s=0.1),
    }
    plan = lab.random_prompts(seed=1, prompts=3, prompt_tokens=8, answer_tokens=6)
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        result = await lab.load(client, plan, pace=lab.Pace(concurrency=1), watch_period_s=0.1)
    assert any("counters fell" in note for note in result.notes)


async def test_hits_are_summed_by_phase_and_tier() -> None:
    def answer(seen):
        length = len(seen.json["input_ids"])
        meta = {
            "prompt_tokens": length,
            "completion_tokens": 1,
            "cached_tokens": 5,
            "cached_tokens_details": {"device": 2, "host": 3},
        }
        body = b"data: " + json.dumps({"text": "a", "output_ids": [1], "meta_info": meta}).encode()
        return Answer(body=body + b"\n\ndata: [DONE]\n\n")

    async with (
        fake_sglang(recorded_routes("0.5.23") | {"/generate": answer}) as fake,
        SglangClient(fake.url) as client,
    ):
        result = await lab.load(client, write_evict_read())
    assert result.hits("read") == lab.Hits(16, 10, 4, 6, None)
    assert result.hits().share == pytest.approx(5 / 8)


async def test_a_tier_that_is_not_told_is_not_zero() -> None:
    body = b'data: {"choices": [{"text": "a"}]}\n\ndata: {"choices": [], "usage": {"prompt_tokens": 8}}\n\n'
    routes = recorded_routes("0.5.23") | {"/v1/completions": Answer(body=body + b"data: [DONE]\n\n")}
    plan = lab.random_prompts(seed=1, prompts=1, prompt_tokens=8, answer_tokens=1)
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        result = await lab.load(client, plan, target=lab.Target(api="completions"))
    assert result.hits() == lab.Hits(8, None, None, None, None)
    assert result.hits().share is None


async def test_a_busy_machine_says_so() -> None:
    meter = LagMeter()
    task = asyncio.create_task(meter.run())
    for _ in range(10):
        await asyncio.sleep(0)
        time.sleep(0.05)  # what a busy machine does to an event loop
        await asyncio.sleep(0.011)
    task.cancel()
    assert "too busy to measure" in meter.lag.too_busy
    assert lab.Lag(0.0005, 0.004, 0.02, 0.5).too_busy is None


# ---- writing


async def test_files_hold_every_request(tmp_path: Path) -> None:
    stream = Answer(body=recorded("0.5.23-llama-tp1", "generate_stream.txt"))
    async with (
        fake_sglang(recorded_routes("0.5.23") | {"/generate": stream}) as fake,
        SglangClient(fake.url) as client,
    ):
        result = await lab.load(client, write_evict_read(), warmup=1)
    result.write(tmp_path / "run")
    frame = pd.read_parquet(tmp_path / "run" / "requests.parquet")
    assert list(frame["phase"]) == ["warm-up", *["write"] * 2, *["evict"] * 3, *["read"] * 2]
    assert frame["cached_device"].dtype == "Int64"
    assert len(frame["itl_s"][1]) == 5
    assert len(pd.read_parquet(tmp_path / "run" / "metrics.parquet")) == len(result.samples)
    summary = json.loads((tmp_path / "run" / "load.json").read_text())
    assert summary["requests"] == 7
    assert summary["parameters"]["warmup"] == 1
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "load.json",
        "metrics.parquet",
        "requests.parquet",
    ]


async def test_a_full_disk_leaves_the_old_files_and_no_half(tmp_path: Path, monkeypatch) -> None:
    stream = Answer(body=recorded("0.5.23-llama-tp1", "generate_stream.txt"))
    async with (
        fake_sglang(recorded_routes("0.5.23") | {"/generate": stream}) as fake,
        SglangClient(fake.url) as client,
    ):
        result = await lab.load(client, write_evict_read())
    result.write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(self, path, **options):
        Path(path).write_bytes(b"PAR1 half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(HostError, match=r"could not write the load's result .* No space left on device"):
        result.write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


async def test_the_key_is_in_no_result(tmp_path: Path) -> None:
    key = "sk-do-not-write-me-77ab"
    echo = Answer(401, f"no entry for {key}".encode())
    plan = lab.random_prompts(seed=1, prompts=2, prompt_tokens=8, answer_tokens=1)
    async with (
        fake_sglang(recorded_routes("0.5.23") | {"/generate": echo}) as fake,
        SglangClient(fake.url, api_key_env="K", environ={"K": key}) as client,
    ):
        result = await lab.load(client, plan)
    assert result.measured[0].error == "the key in $K was refused (401)"
    result.write(tmp_path)
    assert key not in repr(result)
    assert all(key.encode() not in path.read_bytes() for path in tmp_path.iterdir())
