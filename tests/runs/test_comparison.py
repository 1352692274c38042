"""Medians, intervals and findings; what cannot be told from noise is called that."""

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import GB
from hicache_lab.cli import main
from hicache_lab.runs.comparison import (
    Observation,
    chance_of_separation,
    compare,
    difference_interval,
    median_interval,
    metric,
    named,
    read_results,
    recommend,
)
from hicache_lab.runs.comparison.text import as_json, number, text
from hicache_lab.runs.results import Figure, RunResult
from hicache_lab.views.figures import Tradeoff, comparison_figure, hits_figure, tradeoff_figure
from hicache_lab.views.figures.images import write_figures

BENCH = Path(__file__).parents[1] / "fixtures" / "foreign"


def runs(label: str, name: str, values: Sequence[float], source: str = "measured", **more: float) -> list[Observation]:
    unit = metric(name).unit
    return [
        Observation(
            label, {}, {name: Figure(v, unit, source), **{n: Figure(x, "GB", "computed") for n, x in more.items()}}, "x"
        )
        for v in values
    ]


finite = st.floats(-1e6, 1e6, allow_nan=False)


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=30))
def test_the_median_is_numpys(values: list[float]) -> None:
    (setting,) = compare(runs("a", "ttft_p50_ms", values)).settings
    assert setting.cells["ttft_p50_ms"].median == pytest.approx(float(np.median(values)))


@settings(max_examples=25, deadline=None)
@given(st.lists(finite, min_size=2, max_size=12))
def test_an_interval_lies_within_the_runs_and_holds_their_median(values: list[float]) -> None:
    interval = median_interval(values)
    assert interval is not None
    assert min(values) <= interval.low <= np.median(values) <= interval.high <= max(values)


@settings(max_examples=15, deadline=None)
@given(st.lists(finite, min_size=2, max_size=6), st.floats(-1e3, 1e3), st.floats(0.1, 10))
def test_a_difference_shifts_and_scales_with_its_runs(values: list[float], shift: float, scale: float) -> None:
    before = [1.0, 2.0, 4.0]
    one = difference_interval(before, values)
    other = difference_interval([scale * v + shift for v in before], [scale * v + shift for v in values])
    assert one is not None
    assert other is not None
    assert (other.low, other.high) == pytest.approx((scale * one.low, scale * one.high), rel=1e-6, abs=1e-3)


def test_the_bootstrap_agrees_with_one_written_out() -> None:
    """The referee: every one of the 5^5 resamples of five runs, counted instead of drawn."""
    values = [10.0, 11.0, 13.0, 17.0, 30.0]
    grid = np.stack(np.meshgrid(*[values] * 5), -1).reshape(-1, 5)
    exact = np.quantile(np.median(grid, axis=1), [0.025, 0.975])
    interval = median_interval(values)
    assert interval is not None
    assert (interval.low, interval.high) == tuple(exact)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_repeats_come_apart_by_luck_as_often_as_said(n: int) -> None:
    """The referee: every way to split 2n ranks into two groups."""
    apart = [c for c in combinations(range(2 * n), n) if max(c) == n - 1 or min(c) == n]
    assert chance_of_separation(n, n) == len(apart) / len(list(combinations(range(2 * n), n)))


def test_noise_is_called_noise_and_a_difference_a_difference() -> None:
    rng = np.random.default_rng(5)
    alarms = 0
    for seed in range(60):
        noise = [list(rng.normal(600, 20, 6)) for _ in range(2)]
        found = compare(
            runs("a", "output_tokens_per_s", noise[0]) + runs("b", "output_tokens_per_s", noise[1]), seed=seed
        )
        alarms += found.setting("b").cells["output_tokens_per_s"].finding != "inside the noise"
        far = [value + 200 for value in noise[1]]
        found = compare(runs("a", "output_tokens_per_s", noise[0]) + runs("b", "output_tokens_per_s", far), seed=seed)
        cell = found.setting("b").cells["output_tokens_per_s"]
        assert (cell.finding, cell.improved) == ("higher", True)
    # 5 % are expected; a percentile bootstrap of six runs gives a few more
    assert alarms <= 9


def test_single_runs_are_not_judged_unless_they_are_exact() -> None:
    measured = compare(runs("a", "ttft_p50_ms", [10]) + runs("b", "ttft_p50_ms", [5]))
    assert measured.setting("b").cells["ttft_p50_ms"].finding == "one run"
    assert "cannot be told from noise" in measured.notes[0]
    computed = compare(runs("a", "host_gb", [384], "computed") + runs("b", "host_gb", [163], "computed"))
    assert computed.setting("b").cells["host_gb"].finding == "lower"
    assert computed.setting("b").cells["host_gb"].improved is None
    assert computed.notes == ()


def test_few_repeats_are_said_to_be_few() -> None:
    found = compare(runs("a", "ttft_p50_ms", [10, 11, 12]) + runs("b", "ttft_p50_ms", [5, 6, 7]))
    assert found.setting("b").cells["ttft_p50_ms"].improved is True
    assert "in 10% of cases" in found.notes[0]
    enough = compare(runs("a", "ttft_p50_ms", [10, 11, 12, 13]) + runs("b", "ttft_p50_ms", [5, 6, 7, 8]))
    assert enough.notes == ()


def test_unknown_names_are_refused_with_those_there_are() -> None:
    two = runs("off", "ttft_p50_ms", [1]) + runs("on", "ttft_p50_ms", [2])
    with pytest.raises(UsageError, match="baseline 'of': not there; did you mean off"):
        compare(two, baseline="of")
    with pytest.raises(UsageError, match="did you mean ttft_p50_ms"):
        compare(two, metrics=["ttft_p5_ms"])
    with pytest.raises(UsageError, match=r"nothing to compare.*x: failed"):
        compare([], left_out=[("x", "failed")])


def test_units_are_not_mixed() -> None:
    mixed = [
        Observation(label, {}, {"wait": Figure(1, unit, "measured")}, "x") for label, unit in (("a", "ms"), ("b", "s"))
    ]
    with pytest.raises(UsageError, match="different units"):
        compare(mixed)


def test_the_cheapest_of_those_that_cannot_be_told_from_the_best_is_taken() -> None:
    found = compare(
        [
            *runs("off", "output_tokens_per_s", [600, 604, 598, 601], host_gb=0),
            *runs("ratio 2.5", "output_tokens_per_s", [1100, 1180, 1120, 1150], host_gb=163),
            *runs("size 48", "output_tokens_per_s", [1140, 1110, 1160, 1175], host_gb=384),
        ]
    )
    advice = recommend(found)
    assert advice is not None
    assert (advice.label, advice.best, set(advice.equals)) == ("ratio 2.5", "size 48", {"ratio 2.5", "size 48"})
    assert "inside the noise" in advice.reason


def test_single_runs_are_recommended_with_a_warning() -> None:
    advice = recommend(compare(runs("a", "ttft_p50_ms", [10], host_gb=1) + runs("b", "ttft_p50_ms", [5], host_gb=9)))
    assert advice is not None
    assert advice.label == "b"
    assert "repeat before deciding" in advice.reason
    assert recommend(compare(runs("a", "host_gb", [1]))) is None


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("ttft_p50_ms", "lower"),
        ("itl_p99_s", "lower"),
        ("prompt_tokens_per_s", "higher"),
        ("hit_rate", "higher"),
        ("pages", ""),
    ],
)
def test_a_figure_without_an_entry_is_judged_by_its_name(name: str, better: str) -> None:
    assert metric(name).better == better


def test_settings_are_named_by_what_differs() -> None:
    def run(origin: str, **parameters: object) -> Observation:
        return Observation("", parameters, {}, origin)

    found = named([run("a", size=48, seed=1, tp=8), run("b", size=48, seed=2, tp=8), run("c", size=300, seed=1, tp=8)])
    assert [one.label for one in found] == ["size=48", "size=48", "size=300"]
    alone = named([run("reports/before", size=48, seed=1), run("reports/after", size=48, seed=2)])
    assert [one.label for one in alone] == ["before", "after"]
    same_name = named([run("before/x.jsonl", size=48), run("after/x.jsonl", size=48), run("v0.5.8", size=48)])
    assert [one.label for one in same_name] == ["before/x", "after/x", "v0.5.8"]


def test_aiperfs_files_of_one_name_are_two_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        shutil.copy(BENCH / "profile_export_aiperf.json", tmp_path / folder)
    paths = [str(tmp_path / folder / "profile_export_aiperf.json") for folder in ("before", "after")]
    assert main(["compare", *paths, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert [one["label"] for one in settings] == ["before/profile_export_aiperf", "after/profile_export_aiperf"]
    assert main(["compare", paths[0], paths[0]]) == 2
    assert "named twice" in capsys.readouterr().err


def test_the_report_says_the_command_that_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(BENCH / "bench_serving.jsonl", "be fore.jsonl")
    assert main(["compare", "be fore.jsonl", "--report", "first", "--no-images"]) == 0
    command = re.findall(r"```text\nhicache-lab (.*)\n```", Path("first.md").read_text())[-1]
    assert main([*shlex.split(command), "--report", "again", "--no-images"]) == 0
    assert Path("again.md").read_text() == Path("first.md").read_text()


def test_a_seed_below_0_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(BENCH / "bench_serving.jsonl"), "--seed", "-1"]) == 2
    assert "--seed: expected 0 or more" in capsys.readouterr().err


def test_predictions_meet_what_was_observed() -> None:
    values = {
        "predicted_host_tokens": Figure(8193, "tokens", "computed"),
        "observed_host_tokens": Figure(8193, "tokens", "measured"),
        "predicted_hit_share": Figure(0.5, "share", "simulated"),
        "hit_share": Figure(0.48, "share", "measured"),
        "predicted_alone": Figure(1, "", "computed"),
    }
    pairs = compare([Observation("a", {}, values, "x")]).pairs
    assert [(pair.name, round(pair.difference, 6)) for pair in pairs] == [("host_tokens", 0), ("hit_share", -0.02)]


def test_bench_serving_lines_are_read() -> None:
    found = read_results(BENCH / "bench_serving.jsonl")
    assert [one.origin.rpartition(":")[2] for one in found] == ["1", "2", "3"]
    assert found[0].values["output_tokens_per_s"] == Figure(605.27, "tokens/s", "measured")
    assert found[0].values["ttft_p50_ms"].value == 181.4
    assert found[0].values["e2e_p99_ms"].value == 4521.8
    assert found[0].settings["max_concurrency"] == 16
    assert [one.label for one in named(found)] == ["max_concurrency=16", "max_concurrency=16", "max_concurrency=32"]


def test_aiperf_is_read() -> None:
    [one] = read_results(BENCH / "profile_export_aiperf.json")
    assert one.values["requests_per_s"].value == pytest.approx(13.1608, abs=1e-4)
    assert one.values["ttft_p50_ms"].value == pytest.approx(787.544, abs=1e-3)
    assert one.values["e2e_p99_ms"].unit == "ms"
    assert one.settings["concurrency"] == 100


def test_what_makes_a_run_doubtful_is_said(tmp_path: Path) -> None:
    stopped = json.loads((BENCH / "profile_export_aiperf.json").read_text()) | {"was_cancelled": True}
    (tmp_path / "stopped.json").write_text(json.dumps(stopped))
    found = compare(
        named([*read_results(BENCH / "profile_export_aiperf.json"), *read_results(tmp_path / "stopped.json")])
    )
    assert "stopped, 1 of 1 runs: the benchmark was cancelled before its end" in found.notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no result in it"),
        ("not json", r"x\.json:1: expected a result"),
        ('{"request_throughput": 1}\n{"other": 2}', r"x\.json:2: expected a result"),
        ("[1]", r"x\.json:1"),
        ('{"request_throughput": {"avg": 1, "unit": "furlongs"}}', "expected the unit requests/sec"),
        (
            '{"request_throughput": {"avg": 1, "unit": "requests/sec"}, '
            '"time_to_first_token": {"unit": "h", "avg": 1}}',
            "expected a unit of time",
        ),
    ],
)
def test_what_is_not_a_result_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(InputError, match=message):
        read_results(tmp_path / "x.json")


def write_run(folder: Path, status: str = "complete", **figures: float) -> Path:
    folder.mkdir(parents=True)
    recorded = {name: Figure(value, metric(name).unit, "measured") for name, value in figures.items()}
    RunResult("n", "0" * 64, status, {"size": 1}, (), "2026-01-01", 1.0, "0", "3", recorded).write(folder)
    return folder


def test_run_folders_files_and_labels_meet_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_run(tmp_path / "before", output_tokens_per_s=600.0, ttft_p50_s=0.2)
    after = write_run(tmp_path / "after=1", output_tokens_per_s=900.0, ttft_p50_s=0.1)
    bad = write_run(tmp_path / "bad", status="failed")
    command = ["compare", str(before), f"new={after}", str(bad), f"bench={BENCH / 'bench_serving.jsonl'}"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["label"], one["runs"]) for one in found["settings"]] == [("before", 1), ("new", 1), ("bench", 3)]
    assert found["settings"][0]["metrics"]["ttft_p50_ms"]["median"] == 200
    assert found["left_out"] == [{"label": "bad", "why": "failed"}]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "one run" in shown
    assert "left out: bad: failed" in shown
    assert main(["compare", str(tmp_path)]) == 1
    assert "expected a run folder" in capsys.readouterr().err


def test_a_gate_fails_on_what_is_worse_beyond_the_noise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for label, values in {
        "old": (600, 610, 590, 605),
        "new": (500, 505, 495, 502),
        "same": (598, 612, 592, 601),
    }.items():
        paths += [
            f"{label}={write_run(tmp_path / f'{label}-{n}', output_tokens_per_s=float(value))}"
            for n, value in enumerate(values)
        ]
    old, new, same = paths[:4], paths[4:8], paths[8:]
    assert main(["compare", *old, *same, "--gate", "output_tokens_per_s"]) == 0
    assert "inside the noise" in capsys.readouterr().out
    assert main(["compare", *old, *new, "--gate", "output_tokens_per_s"]) == 3
    assert "worse: output_tokens_per_s: new has 501 tokens/s" in capsys.readouterr().out
    assert main(["compare", old[0], new[0], "--gate", "output_tokens_per_s"]) == 2
    assert "single runs cannot be told from noise" in capsys.readouterr().err
    assert main(["compare", *old, *new, "--gate", "ttft"]) == 2
    capsys.readouterr()
    # a gate that could not have fallen is no pass
    for paths, message in (
        (old, "all runs are of one setting"),
        ([*old, *same, new[0]], "not judged: new"),
        ([*old, f"bare={write_run(tmp_path / 'bare', ttft_p50_s=0.1)}"], "not recorded for bare"),
    ):
        assert main(["compare", *paths, "--gate", "output_tokens_per_s"]) == 2
        assert message in capsys.readouterr().err


def test_words_and_json_say_the_same() -> None:
    found = compare(
        runs("off", "output_tokens_per_s", [600, 604, 598]) + runs("on", "output_tokens_per_s", [900, 950, 940])
    )
    shown, data = text(found, recommend(found)), as_json(found, recommend(found))
    assert "+340 (+56.7%)" in shown
    assert data["settings"][1]["metrics"]["output_tokens_per_s"]["delta"] == 340
    assert data["recommendation"] == json.loads(json.dumps(asdict(recommend(found))))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("value", "shown"), [(8193, "8,193"), (0.12345, "0.1235"), (123456.7, "123,457"), (-2.5, "-2.5")]
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert number(value) == shown


def test_figures_escape_what_comes_from_outside() -> None:
    evil = "<script>alert(1)</script>"
    found = compare(
        runs("off", "host_hit_tokens", [1, 2]) + runs(evil, "host_hit_tokens", [5, 6]),
        objective="host_hit_tokens",
    )
    tiers = hits_figure(found)
    assert tiers is not None
    points = [Tradeoff(evil, 384 * GB, 900, "FITS"), Tradeoff("300", 2400 * GB, None, "OOM_RISK")]
    tradeoff = tradeoff_figure(points, safe_bytes=434 * GB, ram_bytes=449 * GB, benefit="tokens/s", source="measured")
    for figure in (comparison_figure(found), tiers, tradeoff):
        assert "<script>" not in figure.to_json()
        assert all(axis.title.text for axis in figure.select_yaxes())
    assert "safe: 434 GB" in tradeoff.to_json()
    assert hits_figure(compare(runs("a", "ttft_p50_ms", [1]))) is None


@pytest.mark.parametrize(
    ("host_gb", "logarithmic"),
    [((0, 0.0016, 0.0021, 1, 300), True), ((97, 163, 192, 384, 2400), True), ((100, 200, 400), False), ((0, 0), False)],
)
def test_the_tradeoff_tells_small_settings_apart_and_cuts_no_label(host_gb: Sequence[float], logarithmic: bool) -> None:
    points = [Tradeoff(f"hicache_ratio={n}", int(size * GB), 0.0, "FITS") for n, size in enumerate(host_gb)]
    figure = tradeoff_figure(points, safe_bytes=394 * GB, ram_bytes=None, benefit="b", source="computed")
    [ran] = figure.data
    assert list(ran.customdata) == pytest.approx(host_gb)
    assert ("log scale" in figure.layout.xaxis.title.text) == logarithmic
    low, high = figure.layout.xaxis.range
    assert low < ran.x[0]
    assert ran.x[-1] < high
    places = [(x - low) / (high - low) for x in ran.x]
    if logarithmic:
        assert list(ran.x) == sorted(set(ran.x))
        assert figure.layout.xaxis.ticktext[0] == "0"
    # labels as wide as these do not stand in one line closer than they are wide
    for (at, first), (other, second) in combinations(zip(places, ran.text, strict=True), 2):
        assert abs(at - other) > 0.08 or first.count("<br>") != second.count("<br>")


def test_without_a_browser_figures_are_html_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_lab.views.figures.images.browser_path", lambda: None)
    figure = comparison_figure(compare(runs("a", "ttft_p50_ms", [1])))
    written = write_figures({"settings": figure}, tmp_path)
    assert written.files == {"settings": "settings.html"}
    assert "no browser was found" in written.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plotly.min.js", "settings.html"]


@pytest.mark.browser
@pytest.mark.usefixtures("browser_or_skip")
def test_with_a_browser_figures_are_images(tmp_path: Path) -> None:
    figure = comparison_figure(compare(runs("a", "ttft_p50_ms", [1])))
    written = write_figures({"settings": figure, "again": figure}, tmp_path)
    assert (written.static, written.note) == (True, "")
    assert (tmp_path / written.files["again"]).read_text().startswith("<svg")
