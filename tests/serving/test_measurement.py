"""A measured run: described, predicted, compared, written, read back, drawn."""

import asyncio
import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sglang import Answer, fake_sglang, recorded, recorded_routes

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.serving import measurement
from hicache_lab.serving.client import Description
from hicache_lab.serving.load import ServerSample
from hicache_lab.serving.measurement.run import DESCRIPTION_FILE
from hicache_lab.views import figures


@pytest.fixture(scope="module", params=[path.name for path in measurement.recorded_runs()])
def run(request: pytest.FixtureRequest) -> measurement.ServerRun:
    """Each recorded run that ships with the package."""
    folder = next(path for path in measurement.recorded_runs() if path.name == request.param)
    return measurement.read_run(folder)


def test_recorded_runs_are_real_and_of_both_releases(run: measurement.ServerRun) -> None:
    assert {path.name for path in measurement.recorded_runs()} == {"0.5.10-tiny-llama", "0.5.23-tiny-llama"}
    assert run.result.ended == "complete"
    assert not [record for record in run.result.measured if record.error]
    assert "recorded, not live" in run.banner
    hostile = replace(run, server=replace(run.server, model_path="a`<img src=x onerror=alert(1)>\n# big"))
    assert "`a'<img src=x onerror=alert(1)> # big`" in hostile.banner  # a code span: shown, not interpreted
    assert run.recorded_in.name.startswith(run.server.release)


def test_prediction_and_recorded_server_agree_exactly(run: measurement.ServerRun) -> None:
    prediction = measurement.predict(run.server)
    assert prediction.why_not is None
    assert prediction.host_tokens == run.server.host_tokens == 8193
    compared = measurement.comparison(run, prediction)
    assert [row["agrees"] for row in compared] == [True, True, True]
    simulation = measurement.simulate_run(run)
    conclusion = measurement.run_conclusion(run, prediction, simulation)
    assert "**agree exactly**: 8,193 tokens" in conclusion
    assert "hits of 24 of 24 requests exactly" in conclusion
    recorded_figures = {name: value for name, value, _, _ in measurement.figures_of(run, prediction, simulation)}
    assert recorded_figures["requests_simulated_exactly"] == 24
    assert recorded_figures["host_tokens_agree"] is True
    assert recorded_figures["read_host_tokens"] >= 8 * 390


def test_a_pool_that_differs_is_said_loudly(run: measurement.ServerRun) -> None:
    other = replace(run, server=replace(run.server, host_tokens=8192))
    prediction = measurement.predict(other.server)
    assert measurement.comparison(other, prediction)[0]["agrees"] is False
    assert "**DISAGREE**: 8,193 tokens computed, 8,192 observed" in measurement.run_conclusion(
        other, prediction, measurement.simulate_run(other)
    )


def test_a_release_that_was_not_read_is_warned_of(run: measurement.ServerRun) -> None:
    newer = replace(run, server=replace(run.server, release="0.9.1"))
    prediction, simulation = measurement.predict(newer.server), measurement.simulate_run(newer)
    said = measurement.run_conclusion(newer, prediction, simulation)
    assert "> **Warning**: `sglang 0.9.1 is newer than the newest release read" in said
    assert "not verified for 0.9.1" in str(prediction.row["warnings"])
    assert "Warning" not in measurement.run_conclusion(
        run, measurement.predict(run.server), measurement.simulate_run(run)
    )


def test_a_load_without_an_answer_does_not_blame_the_cache_report(run: measurement.ServerRun) -> None:
    records = tuple(replace(record, error="status 500: `boom`") for record in run.result.records)
    dead = replace(run, result=replace(run.result, records=records))
    said = measurement.run_conclusion(dead, measurement.predict(dead.server), measurement.simulate_run(dead))
    assert "**No prompt was answered**; the first failure: `status 500: 'boom'`" in said
    assert "--enable-cache-report" not in said


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_tokens": None}, "does not tell its device pool"),
        ({"model_path": "nobody/knows"}, "name the model with the parameter model"),
        ({"release": ""}, "does not tell its release"),
        ({"model_path": "a/b" * 3000}, "name the model with the parameter model"),
        ({"model_path": "~nobody-here/x"}, "name the model with the parameter model"),
        ({"model_path": "/dev/zero"}, "name the model with the parameter model"),
        ({"release": "../../x"}, "expected a release such as"),
    ],
)
def test_what_cannot_be_predicted_says_why(run: measurement.ServerRun, changes, reason: str) -> None:
    prediction = measurement.predict(replace(run.server, **changes))
    assert prediction.host_tokens is None
    assert reason in prediction.why_not
    text = measurement.run_conclusion(run, prediction, measurement.simulate_run(run))
    assert "could not be compared" in text


def test_a_server_without_hicache_has_no_host_pool(run: measurement.ServerRun) -> None:
    off = replace(run.server, hicache=replace(run.server.hicache, enabled=False))
    assert "--enable-hierarchical-cache" in measurement.predict(off).why_not


def test_the_read_phase_came_from_the_host(run: measurement.ServerRun) -> None:
    rows = {row["phase"]: row for row in measurement.hit_rows(run.result)}
    assert rows["write"]["on the host"] == 0
    # two prompts may begin with the same token by chance, which is then found on the device
    assert rows["read"]["on the host"] >= 8 * 390
    assert rows["read"]["on the host"] + rows["read"]["on the device"] == 8 * 399
    assert rows["read"]["computed anew"] == 8


def test_written_and_read_back_it_is_the_same(run: measurement.ServerRun, tmp_path: Path) -> None:
    run.write(tmp_path)
    again = measurement.read_run(tmp_path)
    assert again.server == run.server
    assert again.result == run.result


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        (DESCRIPTION_FILE, "{", DESCRIPTION_FILE),
        ("load.json", '{"schema": 99}', "schema 99"),
        ("load.json", "[", "load.json"),
        ("requests.parquet", "PAR1", "requests.parquet"),
    ],
)
def test_damaged_runs_are_refused_by_name(tmp_path: Path, file: str, text: str, named: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(measurement.recorded_runs()[0], folder)
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=named):
        measurement.read_run(folder)
    with pytest.raises(InputError, match="expected a measured run"):
        measurement.read_run(tmp_path)


def test_before_and_after_says_when_the_loads_differ(run: measurement.ServerRun) -> None:
    same = measurement.before_after(run, run)
    assert same[0]["change"] == "yes"
    assert {row["change"] for row in same[1:]} <= {"+0.0 %", None}
    other = replace(run, result=replace(run.result, seed=99))
    assert "do not compare" in measurement.before_after(run, other)[0]["change"]


def test_before_and_after_names_every_setting_that_differs(run: measurement.ServerRun) -> None:
    hicache = replace(run.server.hicache, ratio=2.0)
    earlier = replace(run, server=replace(run.server, release="0.5.8", hicache=hicache, host_tokens=4097))
    changed = [row for row in measurement.before_after(run, earlier) if row["change"] == "CHANGED"]
    assert [(row["figure"], row["before"], row["now"]) for row in changed] == [
        ("release", "0.5.8", run.server.release),
        ("hicache_ratio", 2.0, 4.0),
    ]
    assert not [row for row in measurement.before_after(run, run) if row["change"] == "CHANGED"]


def test_the_simulator_gives_every_recorded_request_to_the_token(run: measurement.ServerRun) -> None:
    """Independent of each other: real schedulers on one side, the replay's rules on the other."""
    simulation = measurement.simulate_run(run)
    told = [(record.cached_device, record.cached_host) for record in run.result.measured]
    assert list(zip(simulation.device_tokens, simulation.host_tokens, strict=True)) == told
    smaller = measurement.simulate_run(replace(run, server=replace(run.server, host_tokens=2049)))
    assert smaller.agreeing < 24  # and it would notice a smaller pool


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [({"form": "text"}, "token ids to /generate"), ({"target": {"api": "chat"}}, "token ids to /generate")],
)
def test_what_cannot_be_simulated_says_why(run: measurement.ServerRun, parameters, reason: str) -> None:
    changed = replace(run.result, parameters=run.result.parameters | parameters)
    assert reason in measurement.simulate_run(replace(run, result=changed)).why_not
    trace = replace(run.result, plan="trace_replay")
    assert "cannot be made again" in measurement.simulate_run(replace(run, result=trace)).why_not
    pools = replace(run.server, host_tokens=None)
    assert "does not tell the sizes" in measurement.simulate_run(replace(run, server=pools)).why_not


@pytest.mark.parametrize("workload", [name for name in measurement.WORKLOADS if name != "trace_replay"])
def test_every_workload_can_be_asked_for(workload: str) -> None:
    plan = measurement.make_load_plan(workload, seed=1, prompts=2, prompt_tokens=40, answer_tokens=4, device_tokens=100)
    assert plan.requests >= 2
    assert plan == measurement.make_load_plan(
        workload, seed=1, prompts=2, prompt_tokens=40, answer_tokens=4, device_tokens=100
    )


def test_a_shipped_trace_can_be_replayed_on_a_small_server() -> None:
    plan = measurement.make_load_plan(
        "trace_replay",
        seed=1,
        prompts=20,
        prompt_tokens=1,
        answer_tokens=8,
        trace=str(data_dir() / "traces" / "mooncake_conversation.jsonl.zst"),
        shrink=32,
        context_tokens=2000,
    )
    turns = [session.turns[0] for session in plan.phases[0].sessions]
    assert len(turns) == 20
    assert max(len(turn.tokens) for turn in turns) <= 1992
    assert max(turn.max_new_tokens for turn in turns) == 8
    assert plan.phases[0].sessions[-1].at_s > 0


def test_mistakes_in_parameters_are_named() -> None:
    sizes = {"seed": 1, "prompts": 2, "prompt_tokens": 40, "answer_tokens": 4}
    with pytest.raises(UsageError, match="workload: expected one of write_evict_read"):
        measurement.make_load_plan("chat", **sizes)
    with pytest.raises(UsageError, match="evict_tokens: the server does not tell"):
        measurement.make_load_plan("write_evict_read", **sizes)
    with pytest.raises(UsageError, match="trace: name the file"):
        measurement.make_load_plan("trace_replay", **sizes)


def test_a_live_server_is_described_and_measured(tmp_path: Path) -> None:
    started, stop = threading.Event(), threading.Event()
    url: list[str] = []

    async def serve() -> None:
        stream = Answer(body=recorded("0.5.23-llama-tp1", "generate_stream.txt"))
        async with fake_sglang(recorded_routes("0.5.23") | {"/generate": stream}) as fake:
            url.append(fake.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait(10)
    try:
        run = measurement.measure(
            url[0], workload="random", prompts=3, answer_tokens=6, warmup=1, progress=False, folder=tmp_path
        )
    finally:
        stop.set()
        thread.join()
    assert run.recorded_in is None
    assert run.server.host_tokens == 8193
    assert len(run.result.succeeded) == 3
    assert measurement.read_run(tmp_path).result.records == run.result.records
    assert "**Measured** just now on SGLang `0.5.23`" in run.banner


def test_without_a_server_the_newest_recorded_run_is_read() -> None:
    run = measurement.measure("")
    assert run.server.release == "0.5.23"
    assert "recorded, not live" in run.banner
    assert "load's parameters are those of that run" in run.banner


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"workload": "nonsense"}, "workload: expected one of"),
        ({"rate_per_s": -1.0}, "rate_per_s"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_requests": 0}, "max_requests"),
        ({"prompts": 0}, "prompts: expected 1 or more, got 0"),
        ({"prompts": 0, "workload": "multi_turn"}, "prompts: expected 1 or more, got 0"),
        ({"answer_tokens": 0}, "answer_tokens: expected 1 or more, got 0"),
        ({"answer_tokens": -3, "workload": "trace_replay", "trace": "x"}, "answer_tokens: expected 1 or more, got -3"),
        ({"prompt_tokens": 0, "workload": "shared_prefix"}, "prompt_tokens: expected 1 or more, got 0"),
        ({"evict_tokens": -1}, "evict_tokens: expected 0 or more, got -1"),
        ({"shrink": 0.5}, "shrink: expected 1 or more"),
        ({"workload": "trace_replay"}, "trace: name the file"),
    ],
)
def test_parameters_are_checked_without_a_server_too(changes, named: str) -> None:
    with pytest.raises(UsageError, match=named):
        measurement.measure("", **changes)


def test_a_description_survives_json(run: measurement.ServerRun, tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    path.write_text(run.server.as_json())
    assert Description.from_file(path) == run.server
    assert "api_key" not in json.loads(path.read_text())
    assert {row["fact"] for row in run.server.rows} >= {"release", "hicache_ratio", "device_tokens"}


# ---- figures


def test_bars_add_up_to_the_prompts(run: measurement.ServerRun) -> None:
    figure = figures.tiers_figure(run.result)
    for place, record in enumerate(sorted(run.result.succeeded, key=lambda r: r.index)):
        assert sum(bar.y[place] for bar in figure.data) == record.prompt_tokens
    assert {bar.name for bar in figure.data} >= {"host", "computed anew"}
    assert all(bar.marker.pattern.shape is not None for bar in figure.data)
    assert "tokens" in figure.layout.yaxis.title.text


def test_pools_are_drawn_with_their_limits(run: measurement.ServerRun) -> None:
    figure = figures.pools_figure(
        run.result.samples, host_tokens=run.server.host_tokens, device_tokens=run.server.device_tokens
    )
    assert {shape.y0 for shape in figure.layout.shapes} == {8193, 2048}
    assert max(value for value in figure.data[0].y if value is not None) <= 8193


def test_moves_start_at_zero_and_survive_failed_scrapes() -> None:
    samples = (
        ServerSample(0.0, evicted_tokens=100, loaded_back_tokens=None),
        ServerSample(1.0, missing="gone"),
        ServerSample(2.0, evicted_tokens=150, loaded_back_tokens=40),
    )
    evicted, loaded = figures.moves_figure(samples).data
    assert list(evicted.y) == [0, 50]
    assert list(loaded.y) == [0, 40]
    assert figures.moves_figure(()).data[0].y == ()


def test_latency_curves_end_at_all_requests(run: measurement.ServerRun) -> None:
    figure = figures.latency_figure(run.result)
    assert all(curve.y[-1] == 100 for curve in figure.data)
    assert sum(len(curve.x) for curve in figure.data) == len(run.result.succeeded)
    assert all(list(curve.x) == sorted(curve.x) for curve in figure.data)


def test_a_size_told_as_a_decimal_is_the_whole_number_it_was_given_as(run: measurement.ServerRun) -> None:
    sized = replace(run.server, hicache=replace(run.server.hicache, size_gb=1.0))
    # 1e9 bytes of 512 a token, a page more
    assert measurement.predict(sized).host_tokens == 1_000_000_000 // 512 + 1
