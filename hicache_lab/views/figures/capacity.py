"""Figures of host memory: who believed what, what settings and releases would take, what was used over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, gb
from hicache_lab.preflight import Answer
from hicache_lab.views.figures.style import (
    BLUE,
    GREY,
    ORANGE,
    RED,
    VERDICT_COLOURS,
    Theme,
    line_colour,
    new_figure,
    paper_colour,
)

if TYPE_CHECKING:
    from datetime import datetime

    from plotly.graph_objects import Figure


def _limit_line(figure: Figure, n_bytes: int, text: str, theme: Theme) -> None:
    figure.add_hline(
        y=gb(n_bytes),
        line={"color": line_colour(theme), "width": 2, "dash": "dash"},
        annotation={"text": f"{text}: {gb(n_bytes):,.0f} GB", "font": {"size": 12}},
        annotation_position="top right",
    )


def _limits(figure: Figure, answer: Answer, theme: Theme) -> None:
    host = answer.question.host
    if host is not None:
        _limit_line(figure, host.effective_total_bytes, "host RAM", theme)


def beliefs_figure(answer: Answer, theme: Theme = "light") -> Figure:
    """What each rank allows itself against what the ranks take of the host, rank by rank.

    Args:
        answer: a verdict with a known host.
        theme: light or dark.

    Raises:
        UsageError: the verdict knows no host or no pools.
    """
    question = answer.question
    if question.host is None or not answer.ranks:
        raise UsageError("beliefs_figure: the verdict needs a host (--host-ram) and pools")
    ranks = [f"rank {number}" for number in range(answer.ranks_on_host)]
    taken, total, alone, staggered = [], 0, [], []
    for rank in answer.ranks:
        alone.append(gb(question.budget().budget_bytes))
        staggered.append(max(0.0, gb(question.budget(total).budget_bytes)))
        total += rank.resident_bytes(question.rules)
        taken.append(gb(total))
    figure = new_figure(
        theme,
        title={"text": "What each rank allows itself, and what all take of the host"},
        xaxis={"title": {"text": "rank, in the order they check"}},
        yaxis={"title": {"text": "host memory (GB = 1e9 bytes)"}, "rangemode": "tozero"},
    )
    figure.add_bar(x=ranks, y=taken, name="taken by this rank and those before it", marker_color=RED)
    figure.add_scatter(
        x=ranks, y=alone, name="allowed, if all check together", mode="lines+markers", line={"color": BLUE, "width": 3}
    )
    figure.add_scatter(
        x=ranks,
        y=staggered,
        name="allowed, if each comes after the others took theirs",
        mode="lines+markers",
        line={"color": ORANGE, "width": 3, "dash": "dot"},
        marker={"symbol": "diamond", "size": 9},
    )
    _limits(figure, answer, theme)
    return figure


def _amount(answer: Answer) -> str:
    """What is taken, and what was asked for where buffers are rounded up visibly."""
    taken, asked = round(gb(answer.resident_bytes)), round(gb(answer.host_bytes))
    return f"{taken:,} GB" if taken == asked else f"{taken:,} GB<br>({asked:,} asked)"


def _verdict_bars(figure: Figure, labels: Sequence[str], answers: Sequence[Answer], theme: Theme) -> None:
    """One bar a label: the bytes that become resident, named by its verdict; a refusal shows what would have been."""
    for verdict in dict.fromkeys(answer.verdict for answer in answers):
        chosen = [(label, one) for label, one in zip(labels, answers, strict=True) if one.verdict == verdict]
        figure.add_bar(
            x=[label for label, _ in chosen],
            y=[gb(one.resident_bytes) for _, one in chosen],
            name=verdict,
            marker={"color": VERDICT_COLOURS[verdict], "pattern": {"shape": "/" if verdict == "REFUSED" else ""}},
        )
        for label, one in chosen:
            figure.add_annotation(
                x=label,
                y=gb(one.resident_bytes),
                text=f"{_amount(one)}<br><b>{verdict}</b>",
                showarrow=False,
                yshift=24,
                bgcolor=paper_colour(theme),
            )


def settings_figure(answers: Mapping[str, Answer], theme: Theme = "light") -> Figure:
    """What several settings of one launch take of the host, each with its verdict.

    Args:
        answers: the setting's name → its verdict.
        theme: light or dark.
    """
    figure = new_figure(
        theme,
        title={"text": "What each setting takes of the host"},
        xaxis={"title": {"text": "setting"}, "categoryorder": "array", "categoryarray": list(answers)},
        yaxis={"title": {"text": "all ranks together (GB = 1e9 bytes)"}, "rangemode": "tozero"},
    )
    _limits(figure, next(iter(answers.values())), theme)
    _verdict_bars(figure, list(answers), list(answers.values()), theme)
    return figure


def releases_figure(answers: Mapping[str, Answer], theme: Theme = "light") -> Figure:
    """One launch under several releases.

    Args:
        answers: the release → its verdict on the same flags.
        theme: light or dark.
    """
    figure = settings_figure(answers, theme)
    figure.update_layout(
        title={"text": "The same flags on other releases"},
        xaxis={"title": {"text": "SGLang release"}, "type": "category"},
    )
    return figure


def memory_figure(
    times: Sequence[datetime],
    used_bytes: Sequence[int],
    limit_bytes: int,
    events: Sequence[tuple[datetime, str]] = (),
    *,
    source: str,
    theme: Theme = "light",
) -> Figure:
    """Host memory over time, with the host's limit and what happened.

    Args:
        times: one moment a sample.
        used_bytes: memory in use at each.
        limit_bytes: RAM of the host (or limit of the container).
        events: moments to mark, with a short text each (shown as text, never as markup).
        source: where the samples come from: measured, reconstructed, simulated; stands in the title.
        theme: light or dark.
    """
    if len(times) != len(used_bytes):
        raise UsageError(f"memory_figure: {len(times)} times and {len(used_bytes)} samples")
    figure = new_figure(
        theme,
        title={"text": f"Host memory in use ({source})"},
        xaxis={"title": {"text": "time"}},
        yaxis={"title": {"text": "memory (GB = 1e9 bytes)"}, "range": [0, 1.12 * limit_bytes / GB]},
    )
    figure.add_scatter(
        x=list(times), y=[gb(used) for used in used_bytes], name="used", mode="lines", fill="tozeroy", line_color=BLUE
    )
    _limit_line(figure, limit_bytes, "limit", theme)
    for number, (moment, text) in enumerate(events):
        # neighbours would lie on each other: texts go down in steps
        mark = {"color": GREY, "width": 1, "dash": "dot"}
        figure.add_shape(type="line", x0=moment, x1=moment, y0=0, y1=1, yref="paper", line=mark)
        figure.add_annotation(
            x=moment,
            y=0.97 - 0.08 * (number % 8),
            yref="paper",
            text=plain(text),
            showarrow=False,
            xanchor="right",
            font={"size": 11},
        )
    return figure


def plain(text: str) -> str:
    """Text from outside as plotly shows it: its small markup is not interpreted."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
