"""Figures draw the numbers of the records they are given, with units and limits, and nothing from outside as markup."""

from datetime import datetime, timedelta
from typing import Any

import plotly.graph_objects as go
import pytest

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB
from hicache_lab.preflight import Answer, advise, ask, assess
from hicache_lab.views.figures import (
    VERDICT_COLOURS,
    apply_tuner,
    beliefs_figure,
    memory_figure,
    releases_figure,
    settings_figure,
    tuner_data,
    tuner_figure,
)


def judge(version: str = "0.5.8", model: str = "kimi-k2.5", **facts: Any) -> Answer:
    host = {"host_ram": "449GB", "available": "445GB"}
    return assess(ask(model, version, **{"tp_size": 8, "device_tokens": 116_000, **host, **facts}))


ANSWERS = {
    "300": judge(hicache_size=300),
    "48": judge(hicache_size=48, overhead="40GB"),
    "ratio 2.5": judge(hicache_ratio=2.5),
    "300 on 0.5.19": judge("0.5.19", hicache_size=300),
}


def limit_lines(figure: go.Figure) -> list[float]:
    return [shape.y0 for shape in figure.layout.shapes if shape.type == "line" and shape.y0 == shape.y1]


def every_axis_has_a_unit(figure: go.Figure) -> bool:
    axes = list(figure.select_yaxes())
    return all("GB" in axis.title.text or "token" in axis.title.text for axis in axes)


def test_settings_stand_beside_the_hosts_ram() -> None:
    figure = settings_figure(ANSWERS)
    drawn = {label: y for bar in figure.data for label, y in zip(bar.x, bar.y, strict=True)}
    assert {label: round(y) for label, y in drawn.items()} == {
        "300": 2400,
        "48": 384,
        "ratio 2.5": 163,
        "300 on 0.5.19": 2400,
    }
    assert limit_lines(figure) == [449]
    assert {bar.name for bar in figure.data} == {"OOM_RISK", "TIGHT", "FITS", "REFUSED"}
    words = " ".join(note.text for note in figure.layout.annotations)
    assert "384 GB<br><b>TIGHT</b>" in words
    assert every_axis_has_a_unit(figure)


def test_releases_are_categories_even_where_they_look_like_numbers() -> None:
    figure = releases_figure({"0.5.8": ANSWERS["300"], "0.5.19": ANSWERS["300 on 0.5.19"]})
    assert figure.layout.xaxis.type == "category"
    assert figure.layout.xaxis.title.text == "SGLang release"


def test_beliefs_add_up_rank_by_rank() -> None:
    asked, together, apart = beliefs_figure(ANSWERS["300"]).data
    assert [round(y) for y in asked.y] == [300 * n for n in range(1, 9)]
    assert {round(y, 2) for y in together.y} == {434.26}
    assert [round(y, 2) for y in apart.y[:3]] == [434.26, 134.26, 0]


def test_beliefs_need_a_host() -> None:
    with pytest.raises(UsageError, match="--host-ram"):
        beliefs_figure(assess(ask("kimi-k2.5", "0.5.8", tp_size=8, hicache_size=48)))


def test_memory_is_drawn_with_its_limit_and_its_source_and_text_is_never_markup() -> None:
    start = datetime(2026, 1, 20)
    times = [start + timedelta(seconds=2 * n) for n in range(3)]
    figure = memory_figure(
        times, [4 * GB, 44 * GB, 439 * GB], 449 * GB, [(times[2], "<b>killed</b>")], source="reconstructed"
    )
    assert list(figure.data[0].y) == [4, 44, 439]
    assert 449 in limit_lines(figure)
    assert "reconstructed" in figure.layout.title.text
    assert "&lt;b&gt;killed&lt;/b&gt;" in [note.text for note in figure.layout.annotations]
    with pytest.raises(UsageError, match="2 times and 1 samples"):
        memory_figure(times[:2], [1], GB, source="measured")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "answer",
    [
        *ANSWERS.values(),
        judge(model="deepseek-v3.2", version="0.5.23", hicache_size=30),
        judge(model="qwen3-next-80b-a3b", version="0.5.20", hicache_ratio=2.0, tp_size=2),
        judge(hicache_size=10_000),
        assess(ask("kimi-k2.5", "0.5.8", tp_size=8, hicache_ratio=2.0, host_ram="449GB")),
    ],
    ids=lambda answer: f"{answer.question.geometry.name}-{answer.verdict}",
)
def test_the_tuner_draws_every_kind_of_answer(answer: Answer, theme: Any) -> None:
    advice = advise(answer.question)
    data = tuner_data(answer, advice)
    figure = tuner_figure(data, theme)
    host = sum(trace.y[1] for trace in figure.data if trace.type == "bar")
    assert host == pytest.approx((answer.resident_bytes + answer.question.overhead_bytes) / GB)
    names = {trace.name: trace for trace in figure.data}
    assert names["host RAM"].y[0] == 449
    assert names["this setting"].text == (answer.verdict,)
    assert names["this setting"].marker.color == VERDICT_COLOURS[answer.verdict]
    assert names["this setting"].x[0] == pytest.approx(answer.per_rank_bytes / GB)
    assert every_axis_has_a_unit(figure)


def test_an_update_in_place_equals_a_new_figure() -> None:
    advice = advise(ANSWERS["48"].question)
    first, second = (tuner_data(ANSWERS[name], advice) for name in ("48", "ratio 2.5"))
    figure = tuner_figure(first)
    shown = apply_tuner(figure, first)
    assert apply_tuner(figure, second, shown) != shown
    assert figure == tuner_figure(second)


@pytest.mark.parametrize("version", ["0.4.9", "0.5.8", "0.5.19", "0.5.23"])
def test_the_regions_are_where_the_verdicts_are(version: str) -> None:
    """Every whole size lies in the region that its verdict names; the advice is the last one inside."""
    answers = {size: judge(version, hicache_size=size, overhead="40GB") for size in range(9, 70)}
    data = tuner_data(answers[48], advise(answers[48].question))
    for size, answer in answers.items():
        edges = {"FITS": data.fits_to_gb, "TIGHT": data.tight_to_gb, "RACE": data.race_to_gb}
        region = next((name for name, edge in edges.items() if answer.per_rank_bytes <= edge * GB), "beyond")
        assert region == (answer.verdict if answer.verdict in edges else "beyond"), size
    assert data.safe_size_gb == int(data.fits_to_gb)
    assert advise(answers[48].question, accepted=("FITS", "TIGHT")).size_gb == int(data.tight_to_gb)


@pytest.mark.parametrize(("version", "taken"), [("0.5.4", 549.76), ("0.5.5", 384.0)])
def test_bars_are_the_bytes_that_are_taken(version: str, taken: float) -> None:
    """Until 0.5.4 a pinned buffer is rounded up to a power of two: 384 GB asked for, 549.76 taken."""
    answer = judge(version, "llama-3.1-70b", hicache_size=48)
    (bar,) = settings_figure({"48": answer}).data
    assert round(bar.y[0], 2) == taken
    asked, _, _ = beliefs_figure(answer).data
    assert round(asked.y[-1], 2) == taken
    drawn = tuner_data(answer, advise(answer.question))
    assert round(sum(host for _, _, host in drawn.pools), 2) == taken
    words = " ".join(note.text for note in settings_figure({"48": answer}).layout.annotations)
    assert ("(384 asked)" in words) == (taken > 384)
