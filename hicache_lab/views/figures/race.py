"""The re-enacted race: memory over time, and the outcome by arrival skew and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hicache_lab.base.units import gb
from hicache_lab.race import RaceMap, RankStory, Replay
from hicache_lab.views.figures.style import BLUE, GREEN, ORANGE, RED, SKY, Theme, line_colour, new_figure, paper_colour

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_LINES = {"simulated": (BLUE, "dash"), "replayed": (ORANGE, "solid")}
_MARKS = {"oom_killed": ("x", RED, "killed by the kernel"), "refused": ("diamond", SKY, "refused by its own check")}
_OUTCOMES = {"fits": GREEN, "refused": SKY, "oom": RED}


def replay_figure(replays: Sequence[Replay], theme: Theme = "light") -> Figure:
    """One story told virtually, physically or both ways: memory in use over the story's time, at full size.

    Args:
        replays: what `simulate` and `enact` gave for the same story; a physical one is multiplied by its scale.
        theme: light or dark.
    """
    story = replays[0].story
    figure = new_figure(
        theme,
        title={
            "text": f"{story.ranks} ranks × {gb(story.requested_bytes):g} GB, SGLang {story.guard.release} "
            f"({' and '.join(told.provenance for told in replays)})"
        },
        xaxis={"title": {"text": "seconds since the first check, in the story's time"}},
        yaxis={"title": {"text": "host memory in use (GB = 1e9 bytes)"}, "rangemode": "tozero"},
        # its entries are long: two rows of them would run into the title
        legend={"orientation": "h", "yanchor": "top", "y": -0.2, "x": 0},
        height=480,
        margin={"l": 70, "r": 30, "t": 60, "b": 130},
    )
    for told in replays:
        colour, dash = _LINES[told.provenance]
        size = f", 1:{told.scale}" if told.scale > 1 else ""
        figure.add_scatter(
            x=[sample.seconds for sample in told.samples],
            y=[gb(sample.used_bytes * told.scale) for sample in told.samples],
            mode="lines",
            name=f"{told.provenance}{size}: {told.oom_kills} killed, {told.refused} refused, {told.survivors} survived",
            line={"color": colour, "width": 3, "dash": dash},
        )
        for fate, (symbol, mark, words) in _MARKS.items():
            ended = [rank for rank in told.ranks if rank.fate == fate]
            if ended:
                figure.add_scatter(
                    x=[rank.end_seconds for rank in ended],
                    y=[_height(told, rank) for rank in ended],
                    mode="markers",
                    name=f"{words} ({told.provenance})",
                    marker={"symbol": symbol, "size": 11, "color": mark, "line": {"color": colour, "width": 1}},
                    hovertext=[f"rank {rank.rank}" for rank in ended],
                )
    figure.add_hline(
        y=gb(story.host_bytes),
        line={"color": line_colour(theme), "dash": "dot"},
        annotation={"text": f"host RAM {gb(story.host_bytes):g} GB", "bgcolor": paper_colour(theme)},
    )
    return figure


def _height(told: Replay, rank: RankStory) -> float:
    """The memory in use when a rank ended: the last sample up to then."""
    until = rank.end_seconds or 0.0
    before = [sample for sample in told.samples if sample.seconds <= until] or list(told.samples[:1])
    at_once = [sample for sample in before if sample.seconds == before[-1].seconds]
    return gb(max(sample.used_bytes for sample in at_once) * told.scale)


def race_map_figure(drawn: RaceMap, theme: Theme = "light") -> Figure:
    """The outcome for every arrival skew and size, as coloured squares that also carry their word.

    Args:
        drawn: from `race_map`.
        theme: light or dark.
    """
    story = drawn.story
    sizes, skews = [f"{size:g}" for size in drawn.sizes_gb], [f"{skew:g}" for skew in drawn.skews_seconds]
    figure = new_figure(
        theme,
        title={
            "text": f"Same launch, other arrival: SGLang {story.guard.release}, {story.ranks} ranks, "
            f"{gb(story.available_bytes):g} of {gb(story.host_bytes):g} GB available (simulated)"
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
