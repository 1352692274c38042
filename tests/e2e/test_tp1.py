"""One rank of each real release: what the library predicts, what the server does, what the client measures."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pandas as pd
import pytest
from conftest import running

import hicache_lab.serving.load as lab
from hicache_lab.base.errors import ServerError
from hicache_lab.preflight import ask, assess
from hicache_lab.serving import cpu_server
from hicache_lab.serving.client import GenerateRequest, Probe, SglangClient
from hicache_lab.serving.load.thread_loop import run_in_thread
from hicache_lab.sizing.tiny_models import tiny_config

ROOT = Path(__file__).parents[2]
DEVICE_TOKENS = 2048
PROMPT = 450


def returning(seed: int = 11, **changes) -> lab.Plan:
    """Four prompts written, pushed off the device, and read again."""
    sizes = {"prompts": 4, "prompt_tokens": PROMPT, "answer_tokens": 8, "evict_tokens": 3000}
    return lab.write_evict_read(seed=seed, **{**sizes, **changes})


def measure(server: cpu_server.Server, plan: lab.Plan, **options) -> lab.LoadResult:
    options.setdefault("pace", lab.Pace(concurrency=1))
    return lab.run_load(server.base_url, plan, progress=False, **options)


def probe(server: cpu_server.Server) -> Probe:
    async def go() -> Probe:
        async with SglangClient(server.base_url) as client:
            return await client.probe()

    return run_in_thread(go())


def call(server: cpu_server.Server, method: str, *arguments):
    async def go():
        async with SglangClient(server.base_url) as client:
            return await getattr(client, method)(*arguments)

    return run_in_thread(go())


def test_prediction_and_server_agree_exactly_on_the_host_pool(server: cpu_server.Server) -> None:
    probed = probe(server)
    assert probed.server.release == server.release
    assert probed.server.device_tokens == DEVICE_TOKENS
    assert probed.server.hicache.enabled
    question = ask(
        tiny_config(server.model),
        server.release,
        device_tokens=probed.server.device_tokens,
        hicache_ratio=probed.server.hicache.ratio,
        hicache_mem_layout=probed.server.hicache.mem_layout,
        page_size=probed.server.page_size,
        host_ram="24GB",
    )
    assert probed.host_total_tokens == assess(question).rank.tokens == 8193


def test_returning_prompts_are_read_from_the_host_tier(server: cpu_server.Server) -> None:
    result = measure(server, returning())
    assert result.ended == "complete"
    assert not [note for note in result.notes if "restart" in note]
    by_phase = {phase: [r for r in result.succeeded if r.phase == phase] for phase in ("write", "evict", "read")}
    assert [r.cached_tokens for r in by_phase["write"]] == [0, 0, 0, 0]
    # all but the last token, which is always computed; none of it left on the device
    assert [(r.cached_device, r.cached_host) for r in by_phase["read"]] == [(0, PROMPT - 1)] * 4
    written = [r.output_ids for r in by_phase["write"]]
    assert [r.output_ids for r in by_phase["read"]] == written
    assert len(set(written)) == 4
    first, last = result.samples[0], result.samples[-1]
    assert last.cached_host - (first.cached_host or 0) == result.hits().host == 4 * (PROMPT - 1)
    assert last.loaded_back_tokens - (first.loaded_back_tokens or 0) >= 4 * (PROMPT - 1)
    assert last.evicted_tokens > (first.evicted_tokens or 0)


def test_prompts_that_fit_are_read_from_the_device(server: cpu_server.Server) -> None:
    plan = lab.shared_prefix(
        seed=5, groups=1, prompts_per_group=4, prefix_tokens=300, suffix_tokens=20, answer_tokens=4
    )
    result = measure(server, plan)
    assert [r.cached_host for r in result.succeeded[1:]] == [0, 0, 0]
    assert all(r.cached_device >= 300 for r in result.succeeded[1:])


def test_conversations_find_what_was_said_before(server: cpu_server.Server) -> None:
    plan = lab.multi_turn(seed=6, conversations=2, turns=3, first_tokens=100, turn_tokens=30, answer_tokens=6)
    result = measure(server, plan, pace=lab.Pace(concurrency=2))
    assert len(result.succeeded) == 6
    for record in result.succeeded:
        if record.turn:
            # the whole history but the answer's last token, whose keys and values were never computed
            history = 100 + 6 + (record.turn - 1) * (30 + 6)
            assert history - 1 <= record.cached_tokens <= history


def test_flushing_empties_both_tiers(server: cpu_server.Server) -> None:
    measure(server, returning(seed=12))
    assert "flushed" in call(server, "flush_cache").lower()
    again = measure(server, returning(seed=12, evict_tokens=450))
    assert again.hits("write").cached_tokens == 0


def unstreamed_text(server: cpu_server.Server, request: GenerateRequest) -> str:
    """The answer to the same prompt in one piece, asked for without our client."""
    body = {name: value for name, value in request.body().items() if name != "stream_options"} | {"stream": False}
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(server.base_url + request.path, json.dumps(body).encode(), headers)) as reply:
        answer = json.load(reply)
    if request.api == "generate":
        return answer["text"]
    choice = answer["choices"][0]
    return choice["text"] if request.api == "completions" else choice["message"]["content"]


@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
def test_every_endpoint_streams(server: cpu_server.Server, api) -> None:
    request = GenerateRequest("the cache holds", 6, api=api)
    # asked twice: 0.5.10's chat tells nothing of a prompt of which nothing was cached
    whole = unstreamed_text(server, request)
    streamed = call(server, "stream", request)
    assert streamed.completion_tokens == 6
    assert streamed.text == whole
    assert 0 < streamed.ttft_s <= streamed.e2e_s
    assert streamed.cached is not None


def test_a_prompt_beyond_the_context_is_refused_in_words(server: cpu_server.Server) -> None:
    with pytest.raises(ServerError, match="prompt is too long for the server"):
        call(server, "stream", GenerateRequest((20,) * 5000, 4))


def test_the_log_speaks_of_the_same_pool(server: cpu_server.Server) -> None:
    log = server.log()
    assert log.count("Allocating") == 1
    assert "token usage" in log


def test_the_notebook_measures_a_real_server(server: cpu_server.Server) -> None:
    reports = ROOT / "reports" / f"sglang-{server.release}"  # kept, as `make lab` keeps its own
    command = [sys.executable, "-m", "hicache_lab", "run", str(ROOT / "notebooks" / "06_server_run.ipynb")]
    command += ["-p", f"base_url={server.base_url}", "--output", str(reports)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result_file = reports / "06_server_run" / "result.json"
    result = json.loads(result_file.read_text())
    assert result["status"] == "complete"
    figures = {name: entry["value"] for name, entry in result["figures"].items()}
    assert figures["release"] == server.release
    assert figures["predicted_host_tokens"] == figures["observed_host_tokens"] == 8193
    assert figures["host_tokens_agree"] is True
    assert figures["requests"] == 24
    assert figures["read_host_tokens"] > 0
    frame = pd.read_parquet(result_file.with_name("requests.parquet"))
    assert frame["error"].isna().all()


ANSWERED = '"POST /generate HTTP/1.1" 200'


def kill_once_it_answers(server: cpu_server.Server, answers: int) -> None:
    """With four sessions at once, eight begun answers are at least four finished ones."""
    while server.log().count(ANSWERED) < answers and server.alive:
        time.sleep(0.1)
    os.killpg(server.pid, signal.SIGKILL)


def test_copies_that_do_nothing_change_the_answers_and_a_killed_server_leaves_a_record(
    release: str, tmp_path: Path
) -> None:
    """The negative control (if it passed with copies, the tests above would prove nothing); then its end."""
    with running(release, copies=False) as broken:
        result = measure(broken, returning())
        plan = lab.random_prompts(seed=3, prompts=400, prompt_tokens=200, answer_tokens=16)
        threading.Thread(target=kill_once_it_answers, args=(broken, broken.log().count(ANSWERED) + 8)).start()
        cut = measure(broken, plan, pace=lab.Pace(concurrency=4), limits=lab.Limits(lost_after=5))
        assert not broken.alive
    written = [r.output_ids for r in result.succeeded if r.phase == "write"]
    read = [r for r in result.succeeded if r.phase == "read"]
    assert [r.cached_host for r in read] == [PROMPT - 1] * 4  # the server believes in its hits
    assert all(again.output_ids != first for first, again in zip(written, read, strict=True))
    assert cut.ended.startswith("gave up: 5 failures in a row")
    assert cut.succeeded
    cut.write(tmp_path)
    assert json.loads((tmp_path / "load.json").read_text())["failed"] >= 5
