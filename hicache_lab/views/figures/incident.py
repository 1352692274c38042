"""An incident over time: memory where samples exist, otherwise the moments alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from hicache_lab.forensics.incident.facts import Facts
from hicache_lab.forensics.incident.timeline import Moment, timeline
from hicache_lab.views.figures.capacity import memory_figure, plain
from hicache_lab.views.figures.style import BLUE, GREEN, ORANGE, RED, Theme, new_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROWS = {"memory": GREEN, "server": BLUE, "kernel": RED}


def incident_figure(
    facts: Facts, moments: Sequence[Moment] | None = None, *, source: str, theme: Theme = "light"
) -> Figure | None:
    """Memory in use with the important moments on it, or the moments in rows by who said them.

    Args:
        facts: what was gathered; its samples with a time and a used amount make the curve.
        moments: the timeline; None makes it of the facts.
        source: measured or reconstructed; stands in the title.
        theme: light or dark.

    Returns:
        None where nothing carries a time.
    """
    moments = timeline(facts) if moments is None else moments
    timed = [(s.at, s.in_use_bytes) for s in facts.memory if s.at is not None and s.in_use_bytes is not None]
    limit = min((a for a in (facts.total, facts.container_limit) if a is not None), key=lambda a: a.bytes, default=None)
    important = [(m.at, m.what) for m in moments if m.at is not None and m.important and m.source != "memory"]
    if len(timed) > 1 and limit is not None:
        times, used = [at for at, _ in timed], [used for _, used in timed]
        return memory_figure(times, used, limit.bytes, _inside(important, times), source=source, theme=theme)
    dated = [m for m in moments if m.at is not None]
    if not dated:
        return None
    figure = new_figure(
        theme,
        title={"text": f"What happened, by who said it ({source})"},
        xaxis={"title": {"text": "time"}},
        yaxis={"title": {"text": "said by"}, "categoryorder": "array", "categoryarray": list(_ROWS)},
    )
    for who, colour in _ROWS.items():
        mine = [m for m in dated if m.source == who]
        if not mine:
            continue
        figure.add_scatter(
            x=[m.at for m in mine],
            y=[who] * len(mine),
            mode="markers",
            name=who,
            marker={
                "color": colour,
                "size": 12,
                "line": {"color": ORANGE, "width": [2 if m.important else 0 for m in mine]},
            },
            hovertext=[plain(m.what) for m in mine],
            hoverinfo="text+x",
        )
    return figure


def _inside(events: Sequence[tuple[datetime, str]], times: Sequence[datetime]) -> list[tuple[datetime, str]]:
    """Events within the samples' span: one far outside would press the curve into a corner."""
    first, last = min(times), max(times)
    return [(at, text) for at, text in events if first <= at <= last]
