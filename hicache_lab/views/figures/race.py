"""The race: memory over time, and the outcome by arrival skew and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hicache_lab.base.units import gb
from hicache_lab.race import RaceMap, RaceResult, RankResult
from hicache_lab.views.figures.style import BLUE, GREEN, ORANGE, RED, SKY, Theme, line_colour, new_figure, paper_colour

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_LINES = {"simulated": (BLUE, "dash"), "replayed": (ORANGE, "solid")}
_MARKS = {"oom_killed": ("x", RED, "killed by the kernel"), "refused": ("diamond", SKY, "refused by its own check")}
_OUTCOMES = {"fits": GREEN, "refused": SKY, "oom": RED}


def race_figure(results: Sequence[RaceResult], theme: Theme = "light") -> Figure:
    """One scenario raced virtually, physically or both ways: memory in use over the scenario's time, at full size.

    Args:
        results: of `simulate` and `run_physical` for the same scenario; a physical one is multiplied by its scale.
        theme: light or dark.
    """
    scenario = results[0].scenario
    figure = new_figure(
        theme,
        title={
            "text": f"{scenario.ranks} ranks × {gb(scenario.requested_bytes):g} GB, SGLang {scenario.rules.version} "
            f"({' and '.join(result.provenance for result in results)})"
        },
        xaxis={"title": {"text": "seconds since the first check, in the scenario's time"}},
        yaxis={"title": {"text": "host memory in use (GB = 1e9 bytes)"}, "rangemode": "tozero"},
        # its entries are long: two rows of them would run into the title
        legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        height=480,
        margin={"l": 70, "r": 30, "t": 60, "b": 130},
    )
    for result in results:
        colour, dash = _LINES[result.provenance]
        size = f", 1:{result.scale}" if result.scale > 1 else ""
        figure.add_scatter(
            x=[sample.seconds for sample in result.samples],
            y=[gb(sample.used_bytes * result.scale) for sample in result.samples],
            mode="lines",
            name=f"{result.provenance}{size}: {result.oom_kills} killed, {result.refused} refused, "
            f"{result.survivors} survived",
            line={"color": colour, "width": 3, "dash": dash},
        )
        for outcome, (symbol, mark, label) in _MARKS.items():
            ended = [rank for rank in result.ranks if rank.outcome == outcome]
            if ended:
                figure.add_scatter(
                    x=[rank.end_seconds for rank in ended],
                    y=[_height(result, rank) for rank in ended],
                    mode="markers",
                    name=f"{label} ({result.provenance})",
                    marker={"symbol": symbol, "size": 11, "color": mark, "line": {"color": colour, "width": 1}},
                    hovertext=[f"rank {rank.rank}" for rank in ended],
                )
    figure.add_hline(
        y=gb(scenario.host_bytes),
        line={"color": line_colour(theme), "dash": "dot"},
        annotation={"text": f"host RAM {gb(scenario.host_bytes):g} GB", "bgcolor": paper_colour(theme)},
    )
    if scenario.full_bytes < scenario.host_bytes:
        figure.add_hline(
            y=gb(scenario.full_bytes),
            line={"color": RED, "dash": "dot"},
            annotation={
                "text": f"the container is full at {gb(scenario.full_bytes):g} GB",
                "bgcolor": paper_colour(theme),
            },
        )
    return figure


def _height(result: RaceResult, rank: RankResult) -> float:
    """The memory in use when a rank ended: the last sample up to then."""
    until = rank.end_seconds or 0.0
    before = [sample for sample in result.samples if sample.seconds <= until] or list(result.samples[:1])
    at_once = [sample for sample in before if sample.seconds == before[-1].seconds]
    return gb(max(sample.used_bytes for sample in at_once) * result.scale)


def race_map_figure(drawn: RaceMap, theme: Theme = "light") -> Figure:
    """The outcome for every arrival skew and size, as coloured squares that also carry their word.

    Args:
        drawn: from `race_map`.
        theme: light or dark.
    """
    scenario = drawn.scenario
    sizes, skews = [f"{size:g}" for size in drawn.sizes_gb], [f"{skew:g}" for skew in drawn.skews_seconds]
    figure = new_figure(
        theme,
        title={
            "text": f"Same launch, other arrival: SGLang {scenario.rules.version}, {scenario.ranks} ranks, "
            f"{gb(scenario.available_bytes):g} of {gb(scenario.host_bytes):g} GB available (simulated)"
        },
        xaxis={"title": {"text": "--hicache-size, GB (1e9) per rank"}, "type": "category", "categoryarray": sizes},
        yaxis={
            "title": {"text": "seconds between one rank's check and the next"},
            "type": "category",
            "categoryarray": skews,
        },
    )
    for outcome, colour in _OUTCOMES.items():
        places = [
            (size, skew)
            for skew, row in zip(skews, drawn.outcomes, strict=True)
            for size, got in zip(sizes, row, strict=True)
            if got == outcome
        ]
        if places:
            figure.add_scatter(
                x=[size for size, _ in places],
                y=[skew for _, skew in places],
                mode="markers+text",
                name=outcome,
                text=[outcome] * len(places),
                textposition="bottom center",
                marker={"symbol": "square", "size": 18, "color": colour},
            )
    return figure
