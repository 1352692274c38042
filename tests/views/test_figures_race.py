"""Figures of the race: everything known is on them, limits and units included."""

from dataclasses import replace

import pytest

from hicache_lab.race import RaceSample, race_map, scenario_of_release, simulate
from hicache_lab.views.figures.race import race_figure, race_map_figure

INCIDENT = scenario_of_release("0.5.8", size_gb=300)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_virtual_and_physical_on_one_figure(theme) -> None:
    simulated = simulate(INCIDENT)
    small = tuple(
        RaceSample(s.seconds, s.used_bytes // 1000, tuple(held // 1000 for held in s.rank_bytes))
        for s in simulated.samples
    )
    real = replace(simulated, provenance="replayed", samples=small, scale=1000, speed=150.0)
    figure = race_figure([simulated, real], theme)
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    assert [trace.name.split(":")[0] for trace in lines] == ["simulated", "replayed, 1"]
    assert "7 killed, 0 refused, 1 survived" in lines[0].name
    assert max(lines[1].y) == pytest.approx(449)
    kills = [trace for trace in figure.data if trace.name.startswith("killed by the kernel")]
    assert [len(trace.x) for trace in kills] == [7, 7]
    assert set(kills[0].y) == {449.0}, "the kernel kills when the host is full"
    assert figure.layout.shapes[0].y0 == 449
    assert "GB" in figure.layout.yaxis.title.text
    assert "seconds" in figure.layout.xaxis.title.text


def test_refusals_are_marked_where_they_happen() -> None:
    figure = race_figure([simulate(replace(INCIDENT, skew_seconds=150))])
    [refused] = [trace for trace in figure.data if trace.name.startswith("refused")]
    assert list(refused.x) == [150]
    assert list(refused.hovertext) == ["rank 1"]
    assert list(refused.y) == [304]


def test_the_map_shows_every_square_once_with_its_word() -> None:
    drawn = race_map(INCIDENT, [0, 1, 10, 150], [48, 100, 300, 440])
    figure = race_map_figure(drawn)
    assert {trace.name for trace in figure.data} == {"fits", "refused", "oom"}
    assert sum(len(trace.x) for trace in figure.data) == 16
    assert all(set(trace.text) == {trace.name} for trace in figure.data)
    assert "per rank" in figure.layout.xaxis.title.text
