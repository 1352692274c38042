"""The client against recorded answers of real 0.5.10 and 0.5.23 servers, and against what goes wrong."""

import asyncio
import json
import logging
import socket
import ssl
import subprocess
import time
import traceback

import pytest
from fake_sglang import Answer, fake_sglang, json_answer, recorded, recorded_routes
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import ServerError, UsageError
from hicache_lab.serving.client import (
    CachedTokens,
    GenerateRequest,
    RawStream,
    SglangClient,
    parse_metrics,
    read_stream,
)
from hicache_lab.serving.client.info import read_architectures, read_server_info
from hicache_lab.serving.client.problems import checked_url
from hicache_lab.serving.client.stream import error_text
from hicache_lab.serving.client.untrusted import read_json

RELEASES = ["0.5.10", "0.5.23"]
KEY = "sk-do-not-print-me-91f2"


def info(name: str):
    return read_server_info(json.loads(recorded(name, "server_info.json")))


def metrics(name: str):
    return parse_metrics(recorded(name, "metrics.txt").decode())


# ---- shapes


@pytest.mark.parametrize("release", RELEASES)
def test_server_info_of_a_real_server(release: str) -> None:
    server = info(f"{release}-llama-tp2")
    assert (server.release, server.tp_size, server.pp_size, server.dp_size) == (release, 2, 1, 1)
    assert (server.device_tokens, server.page_size, server.context_length) == (2048, 1, 4096)
    assert server.hicache.enabled
    assert (server.hicache.ratio, server.hicache.size_gb) == (4.0, 0.0)
    assert server.processes == 2


@pytest.mark.parametrize(
    ("data", "processes", "per_replica"),
    [
        ({"tp_size": 8}, 8, 8),
        ({"tp_size": 4, "pp_size": 2, "dp_size": 2}, 16, 8),  # replicas beside each other
        ({"tp_size": 8, "dp_size": 4, "enable_dp_attention": True}, 8, 2),  # replicas inside the tensor-parallel group
        ({"tp_size": 8, "dp_size": 1, "attn_dp_size": 4}, 8, 2),  # the same, under 0.5.23's name
    ],
)
def test_processes_and_the_replicas_they_form(data, processes: int, per_replica: int) -> None:
    server = read_server_info({"model_path": "m", **data})
    assert (server.processes, server.processes_per_replica) == (processes, per_replica)


def test_server_info_of_old_releases_is_flat() -> None:
    server = read_server_info({"model_path": "m", "tp_size": 8, "max_total_num_tokens": 116000, "version": "0.4.6"})
    assert (server.tp_size, server.device_tokens) == (8, 116000)
    assert not server.hicache.enabled


def test_a_flag_that_the_rank_adjusted_wins() -> None:
    # 0.5.21 on: auto-sizing sets the ratio in the rank's own state only
    data = {"model_path": "m", "hicache_ratio": None, "internal_states": [{"hicache_ratio": 1.317}]}
    assert read_server_info(data).hicache.ratio == 1.317


@pytest.mark.parametrize("release", RELEASES)
def test_model_info_of_a_real_server(release: str) -> None:
    name = f"{release}-llama-tp1"
    assert read_architectures(json.loads(recorded(name, "model_info.json"))) == ("LlamaForCausalLM",)


@pytest.mark.parametrize("data", [[], {"version": "0.9"}, "no", None])
def test_other_servers_are_not_sglang(data: object) -> None:
    with pytest.raises(ServerError, match="not SGLang's"):
        read_server_info(data)
    with pytest.raises(ServerError, match="not SGLang's"):
        read_architectures(data)


def test_restart_with_other_flags_is_seen_and_volatile_fields_are_not() -> None:
    data = json.loads(recorded("0.5.23-llama-tp1", "server_info.json"))
    then = read_server_info(data)
    busy = json.loads(json.dumps(data))
    busy["internal_states"][0]["last_gen_throughput"] = 123.0
    assert read_server_info(busy).changed_since(then) == {}
    restarted = {**data, "hicache_ratio": 2.0, "random_seed": 7}
    changed = read_server_info(restarted).changed_since(then)
    assert changed["hicache_ratio"] == (4.0, 2.0)
    assert changed["random_seed"] == (530049434, 7)


def test_credentials_a_server_repeats_are_dropped() -> None:
    data = {
        "model_path": "m",
        "api_key": KEY,
        "admin_api_key": KEY,
        "ssl_keyfile_password": KEY,
        "launch_command": f"--model-path m --api-key {KEY} --port 1",
        "internal_states": [{"api_key": KEY, "launch_command": f"--api-key={KEY}"}],
    }
    server = read_server_info(data)
    assert KEY not in repr(server)
    assert server.settings["launch_command"] == "--model-path m --api-key *** --port 1"


# ---- metrics


@pytest.mark.parametrize("name", ["0.5.10-llama-tp1", "0.5.10-llama-tp2", "0.5.23-llama-tp1", "0.5.23-llama-tp2"])
def test_pools_and_hits_of_a_real_server(name: str) -> None:
    snapshot = metrics(name)
    assert snapshot.host_total_tokens == 8193  # ratio 4 × 2,048 device tokens, and one page
    assert snapshot.host_used_tokens == 8187
    assert snapshot.gauge("page_size") == 1
    assert snapshot.cached is not None
    assert snapshot.cached.host == 5388
    assert snapshot.cached.total == snapshot.cached.device + 5388


@pytest.mark.parametrize("release", RELEASES)
def test_tokens_are_counted_once_whatever_the_ranks_export(release: str) -> None:
    processes = info(f"{release}-llama-tp2").processes
    # 0.5.10 adds both ranks into one series, 0.5.23 has one a rank: the same workload, the same tokens
    assert metrics(f"{release}-llama-tp2").logical("load_back_tokens_total", processes) == 5388
    assert metrics(f"{release}-llama-tp1").logical("load_back_tokens_total", 1) == 5388
    assert metrics(f"{release}-llama-tp2").logical("evicted_tokens_total", processes) == 11931


def test_bytes_are_physical_and_add_up_over_ranks() -> None:
    assert metrics("0.5.23-llama-tp2").counter("load_back_bytes_total") == 2 * 1_379_328
    assert metrics("0.5.23-llama-tp2").per_rank("load_back_bytes_total") == {
        "dp0 pp0 tp0": 1_379_328,
        "dp0 pp0 tp1": 1_379_328,
    }


def test_cached_total_series_is_not_added_to_its_parts() -> None:
    text = "".join(
        f'sglang:cached_tokens_total{{cache_source="{source}"}} {value}\n'
        for source, value in [("device", 10), ("host", 5), ("storage_mooncake", 2), ("total", 17)]
    )
    assert parse_metrics(text).cached == CachedTokens(17, 10, 5, 2)
    assert parse_metrics("sglang:cached_tokens_total 17\n").cached == CachedTokens(17)


def test_priority_series_are_not_added_to_their_sum() -> None:
    text = "".join(
        f'sglang:num_queue_reqs{{tp_rank="0",priority="{p}"}} {v}\n' for p, v in [("", 3), ("0", 2), ("1", 1)]
    )
    assert parse_metrics(text).gauge("num_queue_reqs") == 3


def test_old_and_relayed_names_are_read_as_todays() -> None:
    text = "sglang_num_prefill_infight_queue_reqs 4\nsglang:queue_time_s_sum 2.5\n"
    snapshot = parse_metrics(text)
    assert snapshot.gauge("num_prefill_inflight_queue_reqs") == 4
    assert snapshot.gauge("queue_time_seconds_sum") == 2.5


def test_a_release_that_exports_old_and_new_name_is_not_added_up() -> None:
    text = "sglang:total_retracted_reqs 4\nsglang:num_retracted_reqs 4\n"
    assert parse_metrics(text).gauge("num_retracted_reqs") == 4


def test_what_is_not_exported_is_none_and_not_zero() -> None:
    snapshot = parse_metrics("sglang:token_usage 0.5\n")
    assert snapshot.host_total_tokens is None
    assert snapshot.cached is None
    assert snapshot.logical("evicted_tokens_total", 2) is None


@pytest.mark.parametrize("text", ["<html>busy</html>", "vllm:num_requests_running 1\n", ""])
def test_other_expositions_are_refused(text: str) -> None:
    with pytest.raises(ServerError, match="/metrics"):
        parse_metrics(text)


# ---- answers and streams


def timed(data: bytes, size: int, step_s: float = 0.01) -> RawStream:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return RawStream(0.0, tuple((1.0 + i * step_s, piece) for i, piece in enumerate(pieces)))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_streams_read_the_same_however_they_are_cut(release: str, api, size: int) -> None:
    file = {
        "generate": "generate_stream.txt",
        "completions": "completion_stream.txt",
        "chat": "chat_stream.txt",
    }
    data = recorded(f"{release}-llama-tp1", file[api])
    reply = read_stream(timed(data, size), api)
    assert reply.error is None
    assert reply.finish_reason == "length"
    assert reply.completion_tokens == (6 if api == "generate" else 8)
    assert reply.cached is not None
    assert reply.text == read_stream(timed(data, 50), api).text
    assert reply.ttft_s >= 1.0
    assert reply.e2e_s == pytest.approx(1.0 + 0.01 * ((len(data) - 1) // size))


def test_gaps_of_several_tokens_count_as_several() -> None:
    def event(tokens: int) -> bytes:
        meta = {"completion_tokens": tokens, "prompt_tokens": 1}
        return b"data: " + json.dumps({"text": "x" * tokens, "meta_info": meta}).encode() + b"\n\n"

    chunks = ((1.0, event(1)), (1.1, event(2)), (1.4, event(5) + b"data: [DONE]\n\n"))
    reply = read_stream(RawStream(0.5, chunks), "generate")
    assert reply.ttft_s == pytest.approx(0.5)
    assert reply.itl_s == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert sum(reply.itl_s) == pytest.approx(1.4 - 1.0)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (b'data: {"text": "a", "meta_info": {"completion_tokens": 1}}\n\n', "without \\[DONE\\]"),
        (b'data: {"text": "a", "meta_\n\ndata: [DONE]\n\n', "malformed"),
        (b'data: {"text": "a", "meta_info": {"completion_tok', "malformed"),
        (b'data: {"error": {"message": "out of memory"}}\n\ndata: [DONE]\n\n', "broke off: out of memory"),
        (
            b'data: {"error": {"message": "The input (5000 tokens) is longer than the model\'s context length"}}\n\n',
            "too long for the server: The input .5000 tokens.",
        ),
        (b"event: nonsense\n\n<html>\n\n", "without \\[DONE\\]"),
    ],
)
def test_broken_streams_say_why_and_keep_what_came(data: bytes, problem: str) -> None:
    reply = read_stream(timed(data, 1000) if data else RawStream(0.0, ()), "generate")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(reply.error)
    assert reply.text in {"", "a"}


@pytest.mark.parametrize(
    ("event", "api", "problem"),
    [
        (
            {
                "text": "",
                "meta_info": {
                    "prompt_tokens": 3,
                    "completion_tokens": 0,
                    "finish_reason": {"type": "abort", "message": "The request queue is full.", "status_code": 503},
                },
            },
            "generate",
            "the server aborted the request: The request queue is full.",
        ),
        (
            {"choices": [{"text": "x", "finish_reason": "abort"}]},
            "completions",
            "the server aborted the request: no details",
        ),
        (None, "generate", "the stream ended without a single token"),
        ({"meta_info": {"prompt_tokens": 3}}, "generate", "the stream ended without a single token"),
    ],
)
def test_an_answer_with_status_200_that_is_none_is_a_failure(event, api, problem: str) -> None:
    data = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode()
    assert read_stream(timed(data, 1000), api).error == problem


HOSTILE = ["NaN", "Infinity", "-Infinity", "1e400", "1" + 30 * "0", "-5", "true", '"7"', "[1]", "{}"]


@pytest.mark.parametrize("value", HOSTILE)
def test_numbers_that_are_none_are_not_told_and_break_nothing(value: str) -> None:
    told = {name: read_json(value) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    told["cached_tokens_details"] = {"device": read_json(value), "storage_x": read_json(value)}
    data = f'data: {{"text": "a", "output_ids": [{value}], "meta_info": {json.dumps(told)}}}\n\ndata: [DONE]\n\n'
    reply = read_stream(timed(data.encode(), 1000), "generate")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached, reply.output_ids) == (None, None, None, ())
    info = read_server_info(read_json(f'{{"model_path": "m", "context_length": {value}, "hicache_ratio": {value}}}'))
    assert info.context_length in {None, -5}
    if value not in {'"7"', "[1]", "{}", "true", "-5"}:
        text = f"# TYPE sglang:a gauge\nsglang:a 1.0\nsglang:hicache_host_total_tokens {value}\n"
        assert parse_metrics(text.replace("Infinity", "Inf")).host_total_tokens is None


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000])
def test_json_nested_beyond_reason_is_malformed(text: str) -> None:
    assert "malformed" in str(read_stream(timed(f"data: {text}\n\n".encode(), 100_000), "generate").error)


def test_a_terminals_control_characters_do_not_pass() -> None:
    """A server's words end up on a terminal, which would obey them."""
    nasty = "red\x1b[31m \x1b]0;title\x07 \x9b31m\u202eend"
    info = read_server_info({"model_path": nasty, "version": nasty})
    said = [info.model_path, info.release, error_text({"error": nasty})]
    said += [read_architectures({"model_path": nasty, "architectures": [nasty]})[0]]
    with pytest.raises(ServerError) as caught:
        parse_metrics(f"sglang:a {nasty}\n")
    assert all(text.isprintable() for text in [*said, str(caught.value)])
    assert info.model_path == "red?[31m ?]0;title? ?31m?end"


@given(st.binary(max_size=300), st.integers(1, 50))
def test_no_bytes_can_break_the_reader(data: bytes, size: int) -> None:
    reply = read_stream(timed(b"data: " + data, size), "chat")
    assert reply.error is None or isinstance(reply.error, str)


def test_requests_name_their_mistakes() -> None:
    with pytest.raises(UsageError, match="chat takes text"):
        GenerateRequest((1, 2), 4, api="chat")
    with pytest.raises(UsageError, match="max_new_tokens"):
        GenerateRequest("a", 0)
    assert GenerateRequest((1, 2), 4).body()["input_ids"] == [1, 2]


# ---- the client


@pytest.mark.parametrize("release", RELEASES)
async def test_probe_of_a_recorded_server(release: str) -> None:
    async with fake_sglang(recorded_routes(release)) as fake, SglangClient(fake.url) as client:
        probe = await client.probe()
    assert probe.server.release == release
    assert probe.host_total_tokens == 8193
    assert probe.metrics_missing is None


async def test_old_releases_are_asked_by_their_old_names() -> None:
    routes = {
        "/health": Answer(),
        "/get_server_info": json_answer({"model_path": "m", "version": "0.4.9"}),
        "/get_model_info": json_answer({"model_path": "m"}),
        "/get_load": json_answer([{"num_reqs": 0, "num_waiting_reqs": 0}]),
    }
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        probe = await client.probe()
    assert probe.server.release == "0.4.9"
    assert probe.metrics is None
    assert "--enable-metrics" in probe.metrics_missing


async def test_a_stream_has_times() -> None:
    answer = Answer(body=recorded("0.5.23-llama-tp1", "generate_stream.txt"))
    async with fake_sglang({"/generate": answer}) as fake, SglangClient(fake.url) as client:
        reply = await client.stream(GenerateRequest("the cache", 6))
    assert len(reply.output_ids) == 6
    assert 0 < reply.ttft_s <= reply.e2e_s


async def test_flush_happens_only_when_asked() -> None:
    routes = recorded_routes("0.5.23") | {"/flush_cache": Answer(body=b"Cache flushed.\n")}
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        await client.probe()
        assert not [seen for seen in fake.seen if seen.method != "GET"]
        assert await client.flush_cache() == "Cache flushed."
        assert fake.seen[-1].method == "POST"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_nothing_listens() -> None:
    async with SglangClient(f"http://127.0.0.1:{free_port()}") as client:
        with pytest.raises(ServerError, match="nothing listens there; start one with 'hicache-lab server start'"):
            await client.probe()


@pytest.mark.parametrize(
    ("routes", "problem"),
    [
        ({"/health": Answer(503)}, "still loading"),
        (
            {"/health": Answer(), "/server_info": Answer(401), "/get_server_info": Answer(401)},
            "wants an API key",
        ),
        ({"/health": Answer(), "/server_info": Answer(body=b"<html>hello</html>")}, "no such endpoint"),
        ({"/health": Answer()}, "no such endpoint \\(404\\): not an SGLang server"),
        ({"/health": Answer(), "/server_info": Answer(500, b"boom")}, "status 500: boom"),
        ({"/health": Answer(), "/server_info": Answer(302, headers={"Location": "/x"})}, "redirects"),
        (
            {
                "/health": Answer(),
                "/server_info": Answer(404),
                "/get_server_info": Answer(body=b'{"model_pa'),
            },
            "truncated answer: 10 bytes that are not JSON",
        ),
    ],
)
async def test_what_is_wrong_is_said(routes, problem: str) -> None:
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        with pytest.raises(ServerError, match=problem):
            await client.probe()


async def test_context_too_long_is_said() -> None:
    answer = Answer(400, recorded("0.5.10-llama-tp1", "err_too_long.json"))
    async with fake_sglang({"/generate": answer}) as fake, SglangClient(fake.url) as client:
        with pytest.raises(ServerError, match="prompt is too long for the server: The input \\(5000 tokens\\)"):
            await client.stream(GenerateRequest((1,) * 5000, 4))


async def test_reads_are_retried_and_prompts_are_not() -> None:
    failures = {"/server_info": 2, "/generate": 1}

    def flaky(seen):
        failures[seen.path] -= 1
        if failures[seen.path] >= 0:
            return Answer(then="reset")
        return Answer(body=recorded("0.5.23-llama-tp1", "server_info.json"))

    async with (
        fake_sglang({"/server_info": flaky, "/generate": flaky}) as fake,
        SglangClient(fake.url) as client,
    ):
        assert (await client.server_info()).release == "0.5.23"
        with pytest.raises(ServerError, match="connection broke"):
            await client.stream(GenerateRequest("a", 1))
        paths = [seen.path for seen in fake.seen]
        assert (paths.count("/server_info"), paths.count("/generate")) == (3, 1)


async def test_a_server_that_hangs_is_left_in_time() -> None:
    routes = {"/health": Answer(then="hang"), "/generate": Answer(then="hang")}
    async with (
        fake_sglang(routes) as fake,
        SglangClient(fake.url, read_seconds=0.1, stall_seconds=0.2) as client,
    ):
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"no answer within 0\.1 s"):
            await client.health()
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
            await client.stream(GenerateRequest("a", 1))
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("then", ["cut", "reset"])
async def test_a_server_killed_in_the_middle_keeps_what_came(then: str) -> None:
    events = recorded("0.5.23-llama-tp1", "generate_stream.txt").split(b"\n\n")
    body = [event + b"\n\n" for event in events[:3]]
    routes = {"/generate": Answer(body=body, pause_s=0.02, then=then)}
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        raw = await client.collect(GenerateRequest("a", 6))
    reply = read_stream(raw, "generate")
    assert reply.error and ("cut off" in reply.error or "connection broke" in reply.error)
    assert reply.completion_tokens == 3
    assert len(reply.itl_s) == 2


async def test_a_prompt_is_sent_when_its_body_goes_out() -> None:
    """Not when this process began to prepare it: many prompts at once wait here for each other."""
    events = recorded("0.5.23-llama-tp1", "generate_stream.txt").split(b"\n\n")
    begun: list[float] = []

    def clock() -> float:
        begun.append(time.perf_counter())
        time.sleep(0.02)  # stands for the work that all prompts but the last wait for
        return begun[-1]

    routes = {"/generate": Answer(body=[event + b"\n\n" for event in events])}
    async with fake_sglang(routes) as fake, SglangClient(fake.url) as client:
        raw = await client.collect(GenerateRequest("a", 6), clock=clock)
        nowhere = SglangClient("http://127.0.0.1:9")
        async with nowhere:
            refused = await nowhere.collect(GenerateRequest("a", 6), clock=lambda: 7.0)
    assert raw.sent_s == begun[1] >= begun[0] + 0.02
    assert raw.chunks[0][0] == begun[2]
    assert refused.error and refused.sent_s == 7.0 and not refused.chunks


async def test_cancelling_a_stream_leaves_nothing_behind() -> None:
    async with fake_sglang({"/generate": Answer(then="hang")}) as fake, SglangClient(fake.url) as client:
        task = asyncio.create_task(client.collect(GenerateRequest("a", 6)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# ---- the key


async def test_the_key_goes_into_the_header_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    environ = {"MY_KEY": KEY}
    echo = Answer(400, json.dumps({"error": f"bad token Bearer {KEY}"}).encode())
    routes = recorded_routes("0.5.23") | {"/generate": echo, "/flush_cache": echo}
    routes |= {"/v1/completions": Answer(then="reset")}
    async with (
        fake_sglang(routes) as fake,
        SglangClient(fake.url, api_key_env="MY_KEY", environ=environ) as client,
    ):
        probe = await client.probe()
        assert fake.seen[0].headers["authorization"] == f"Bearer {KEY}"
        shown = [repr(client), repr(probe)]
        for call in (
            client.stream(GenerateRequest("a", 1)),
            client.stream(GenerateRequest("a", 1, api="completions")),
            client.flush_cache(),
        ):
            with pytest.raises(ServerError) as caught:
                await call
            assert caught.value.__context__ is None
            # the most talkative traceback there is: every local of every frame but this test's own
            trace = caught.value.__traceback__.tb_next
            full = traceback.TracebackException(ServerError, caught.value, trace, capture_locals=True)
            shown.append("".join(full.format()))
    assert f"bad token Bearer {'*' * len(KEY)}" in "".join(shown)
    assert KEY not in "".join(shown) + caplog.text


async def test_a_refused_key_is_named_by_its_variable() -> None:
    routes = {"/health": Answer(), "/server_info": Answer(401), "/get_server_info": Answer(401)}
    async with (
        fake_sglang(routes) as fake,
        SglangClient(fake.url, api_key_env="K", environ={"K": KEY}) as client,
    ):
        with pytest.raises(ServerError, match=r"the key in \$K was refused \(401\)"):
            await client.probe()


@pytest.mark.parametrize("key", ["1", "token", "sglang", "model"])
async def test_a_key_that_is_a_word_of_the_protocol_leaves_answers_whole(key: str) -> None:
    """Starring it out of an answer would lose the counts; in a refusal it is starred."""
    routes = recorded_routes("0.5.23") | {"/generate": json_answer({"error": f"who is {key}?"}, 401 + 9)}
    async with (
        fake_sglang(routes) as fake,
        SglangClient(fake.url, api_key_env="K", environ={"K": key}) as client,
    ):
        probe = await client.probe()
        raw = await client.collect(GenerateRequest("a", 1))
    assert (probe.server.device_tokens, probe.host_total_tokens) == (2048, 8193)
    assert raw.error and raw.error.endswith(f"who is {'*' * len(key)}?")


@pytest.mark.parametrize("cut", range(8, 50, 5))
async def test_a_key_echoed_into_a_stream_is_starred_wherever_it_is_cut(cut: int) -> None:
    event = b'data: {"error": {"message": "bad %s here"}}\n\n' % KEY.encode()
    routes = {"/generate": Answer(body=[event[:cut], event[cut:]], pause_s=0.02)}
    async with (
        fake_sglang(routes) as fake,
        SglangClient(fake.url, api_key_env="K", environ={"K": KEY}) as client,
    ):
        raw = await client.collect(GenerateRequest("a", 1))
    assert KEY.encode() not in b"".join(chunk for _, chunk in raw.chunks)
    assert read_stream(raw, "generate").error == f"the server broke off: bad {'*' * len(KEY)} here"


@pytest.mark.parametrize("name", [KEY, "A=b", "hf_aBcDeF0123", "x" * 70])
def test_a_key_given_in_place_of_its_variables_name_is_not_repeated(name: str) -> None:
    with pytest.raises(UsageError, match="is it the key itself") as caught:
        SglangClient("http://127.0.0.1:1", api_key_env=name, environ={"OTHER": "x"})
    assert name not in str(caught.value)


@pytest.mark.parametrize("held", ["a\r\nX: y", "k\u00e4y", "a\x00b"])
def test_a_key_that_cannot_stand_in_a_header_is_refused_and_not_repeated(held: str) -> None:
    with pytest.raises(UsageError, match=r"what \$K holds is no key") as caught:
        SglangClient("http://127.0.0.1:1", api_key_env="K", environ={"K": held})
    assert held not in str(caught.value)


async def test_a_key_read_from_a_file_may_end_with_a_newline() -> None:
    async with (
        fake_sglang(recorded_routes("0.5.23")) as fake,
        SglangClient(fake.url, api_key_env="K", environ={"K": f"{KEY}\n"}) as client,
    ):
        await client.probe()
        assert fake.seen[0].headers["authorization"] == f"Bearer {KEY}"


def test_a_missing_variable_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="'NO_SUCH' is not set"):
        SglangClient("http://127.0.0.1:1", api_key_env="NO_SUCH", environ={})


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:30000",
        "ftp://h",
        "http://",
        "http://h:notaport",
        "http://h:0",
        "http://h?x=1",
        "http://h:1/#x",
        "http://h:1/a b",
        "http://h\n:1",
        "http://[::1",
    ],
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(UsageError, match="base_url: expected http://HOST:PORT"):
        checked_url(url)


def test_the_openai_suffix_is_pointed_out() -> None:
    with pytest.raises(UsageError, match=r"without the /v1 of the OpenAI API: http://h:1$"):
        checked_url("http://h:1/v1/")


@pytest.mark.parametrize("url", [f"http://user:{KEY}@h:1", f"{KEY}@h:1", f"http://h/?api_key={KEY}", f"http://h#{KEY}"])
def test_credentials_in_the_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        checked_url(url)
    assert "credentials" in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.fixture
def self_signed(tmp_path):
    """A certificate for 127.0.0.1 that nobody vouches for."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=127.0.0.1",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


async def test_tls_is_always_verified(tmp_path, self_signed) -> None:
    cert, key = self_signed
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(cert, key)

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        async with SglangClient(url) as client:
            with pytest.raises(ServerError, match=r"TLS failed .*verification is always on"):
                await client.health()
        async with SglangClient(url, ca_file=str(cert)) as client:
            assert await client.health() == 200
    with pytest.raises(UsageError, match="ca_file"):
        async with SglangClient(url, ca_file=str(tmp_path / "none.pem")):
            pass
