"""The tuner's figure: pools stacked per rank and per host against RAM, and tokens against GB with the safe region.

The figure has a fixed set of traces, so that a slider can update it in place (``apply_tuner``) instead of building it
again; a new figure goes through the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_lab.base.units import gb
from hicache_lab.preflight import Advice, Answer
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.guard import beyond_reserve_bytes
from hicache_lab.sizing.pools import resident_bytes
from hicache_lab.views.figures.style import (
    GREEN,
    GREY,
    ORANGE,
    POOL_COLOURS,
    PURPLE,
    RED,
    VERDICT_COLOURS,
    Theme,
    faint,
    layout,
    line_colour,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SLOTS = 6
"""Pools of one rank that can be told apart: kv, indexer, swa, mamba, draft and one more."""
REGIONS = (
    ("fits", GREEN),
    ("tight: only the reserve is left", ORANGE),
    ("race: who checks first decides", PURPLE),
    ("refused, or the host runs out", RED),
)
_LINES = 3 + SLOTS + len(REGIONS)
_MILLION = 1_000_000


@dataclass(frozen=True)
class TunerData:
    """Every number the tuner draws; GB are 1e9 bytes, tokens are those of one rank's anchor pool.

    ``pools`` holds (label, GB on one rank, GB on the host) for each pool. The edges are GB per rank, in this order: up
    to ``fits_to_gb`` it FITS, up to ``tight_to_gb`` only the reserve is left, up to ``race_to_gb`` a start depends on
    which rank checks first; beyond, it is refused or the host runs out.
    """

    verdict: str
    ranks: int
    pools: tuple[tuple[str, float, float], ...]
    overhead_gb: float
    ram_gb: float
    allowed_gb: float
    tokens: int
    per_rank_gb: float
    ratio: float | None
    gb_per_million_tokens: float
    device_tokens: int | None
    fits_to_gb: float
    tight_to_gb: float
    race_to_gb: float
    safe_size_gb: int | None
    safe_ratio: float | None

    @property
    def most_gb(self) -> float:
        """The right end of the token axis: a little beyond the setting and the region."""
        return 1.15 * max(self.per_rank_gb, self.race_to_gb, 1.0)


def tuner_data(answer: Answer, advice: Advice) -> TunerData:
    """The numbers of one setting.

    Args:
        answer: the verdict; UNKNOWN gives empty bars.
        advice: the largest settings of the same launch.
    """
    question, rank = answer.question, answer.rank
    pools, rules = rank.pools if rank else (), question.rules
    ranks = max(1, answer.ranks_on_host or question.config.processes)
    host: dict[str, int] = {}
    for one in answer.ranks:
        for pool in one.pools:
            host[pool.spec.label] = host.get(pool.spec.label, 0) + resident_bytes(pool, rules)
    tokens = rank.tokens if rank else 0
    limit = question.limit_bytes or 0
    room = max(0, beyond_reserve_bytes(limit))
    fits, tight = max(0, room - question.comfortable_bytes) // ranks, room // ranks
    certain = tight if answer.guaranteed_start_bytes is None else answer.guaranteed_start_bytes
    budget = question.budget().budget_bytes if question.host else 0
    # a check that does not divide by the ranks lets them eat the reserve, up to what kills
    race = max(0, min(budget, limit // ranks))
    edges = [_askable(min(fits, certain), rules), _askable(min(tight, certain), rules), _askable(race, rules)]
    return TunerData(
        verdict=answer.verdict,
        ranks=ranks,
        pools=tuple((p.spec.label, gb(resident_bytes(p, rules)), gb(host[p.spec.label])) for p in pools[:SLOTS]),
        overhead_gb=gb(question.overhead_bytes),
        ram_gb=gb(question.host.effective_total_bytes) if question.host else 0.0,
        allowed_gb=max(0.0, gb(budget)),
        tokens=tokens,
        per_rank_gb=gb(answer.per_rank_bytes),
        ratio=pools[0].equivalent_ratio if pools and rank and rank.device_tokens else None,
        gb_per_million_tokens=gb(answer.per_rank_bytes) / tokens * _MILLION if tokens else 0.0,
        device_tokens=rank.device_tokens if rank else None,
        fits_to_gb=gb(edges[0]),
        tight_to_gb=gb(edges[1]),
        race_to_gb=gb(edges[2]),
        safe_size_gb=advice.size_gb,
        safe_ratio=advice.ratio,
    )


def _askable(n_bytes: int, rules: ReleaseRules) -> int:
    """The most that may be asked for so that ``n_bytes`` are taken: less where buffers are rounded up."""
    return 1 << n_bytes.bit_length() - 1 if rules.pinned_power_of_two and n_bytes else n_bytes


def tuner_figure(data: TunerData, theme: Theme = "light") -> Figure:
    """A complete figure of ``data``, ready to be shown or to become a FigureWidget."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(
        cols=2,
        column_widths=[0.45, 0.55],
        horizontal_spacing=0.12,
        specs=[[{}, {"secondary_y": True}]],
        subplot_titles=("bytes by pool", "tokens a rank, and the ratio that is the same"),
    )
    figure.update_layout(layout(theme, barmode="stack", height=480, bargap=0.35))
    figure.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin={"t": 40})
    figure.add_bar(x=[0, 1], y=[0, 0], name="server besides the pools", marker_color=GREY, row=1, col=1)
    for slot in range(SLOTS):
        figure.add_bar(x=[0, 1], y=[0, 0], name="", marker_color=POOL_COLOURS[slot], showlegend=False, row=1, col=1)
    limit = {"color": line_colour(theme), "width": 2, "dash": "dash"}
    check = {"color": line_colour(theme), "width": 2, "dash": "dot"}
    lines = [
        go.Scatter(x=[-0.5, 1.5], y=[0, 0], mode="lines", line=limit, name="host RAM"),
        go.Scatter(x=[-0.4, 0.4], y=[0, 0], mode="lines", line=check, name="most that one rank's check passes"),
    ]
    figure.add_traces(lines, rows=[1, 1], cols=[1, 1])
    for name, colour in REGIONS:
        region = go.Scatter(
            x=[0, 0], y=[0, 0], mode="none", fill="tozeroy", fillcolor=faint(colour), name=name, hoverinfo="skip"
        )
        figure.add_trace(region, row=1, col=2)
    line = go.Scatter(x=[0, 0], y=[0, 0], mode="lines", line={"color": line_colour(theme)}, name="tokens for these GB")
    point = go.Scatter(x=[0], y=[0], mode="markers+text", name="this setting")
    point.marker = {"size": 16, "symbol": "diamond", "line": {"color": line_colour(theme), "width": 1.5}}
    point.textposition, point.textfont = "top left", {"size": 14}
    figure.add_trace(line, row=1, col=2)
    figure.add_trace(point, row=1, col=2)
    # the right-hand axis only shows where a trace uses it
    ghost = go.Scatter(x=[0], y=[0], mode="markers", marker={"opacity": 0}, showlegend=False, hoverinfo="skip")
    figure.add_trace(ghost, row=1, col=2, secondary_y=True)
    figure.update_xaxes(tickvals=[0, 1], range=[-0.5, 1.5], row=1, col=1)
    figure.update_yaxes(title_text="host memory (GB = 1e9 bytes)", row=1, col=1)
    figure.update_xaxes(title_text="asked for by one rank (GB = 1e9 bytes)", row=1, col=2)
    figure.update_yaxes(title_text="host tokens a rank (millions)", row=1, col=2)
    figure.update_yaxes(title_text="host tokens per device token", showgrid=False, tickmode="auto", secondary_y=True)
    apply_tuner(figure, data)
    return figure


Values = dict[tuple[int | str, str], Any]
"""Trace number (or axis name) and property → value."""


def tuner_values(data: TunerData) -> Values:
    """Everything in the figure that ``data`` decides."""
    per_million, end = data.gb_per_million_tokens, data.most_gb
    top = end / per_million if per_million else 1.0
    edges = (0.0, data.fits_to_gb, data.tight_to_gb, data.race_to_gb, end)
    values: Values = {(0, "y"): (0, data.overhead_gb)}
    for slot in range(SLOTS):
        label, rank_gb, host_gb = data.pools[slot] if slot < len(data.pools) else ("", 0.0, 0.0)
        values |= {
            (1 + slot, "y"): (rank_gb, host_gb),
            (1 + slot, "name"): label,
            (1 + slot, "showlegend"): bool(label),
        }
    values[1 + SLOTS, "y"] = (data.ram_gb, data.ram_gb)
    values[2 + SLOTS, "y"] = (data.allowed_gb, data.allowed_gb)
    for region in range(len(REGIONS)):
        values[3 + SLOTS + region, "x"] = (edges[region], edges[region + 1])
        values[3 + SLOTS + region, "y"] = (top, top)
    ratio = top * _MILLION / data.device_tokens if data.device_tokens else 1.0
    return values | {
        (_LINES, "x"): (0, end),
        (_LINES, "y"): (0, top),
        (_LINES + 1, "x"): (data.per_rank_gb,),
        (_LINES + 1, "y"): (data.tokens / _MILLION,),
        (_LINES + 1, "text"): (data.verdict,),
        (_LINES + 1, "marker.color"): VERDICT_COLOURS[data.verdict],
        ("xaxis", "ticktext"): ("one rank", f"this host: {data.ranks} ranks"),
        ("xaxis2", "range"): (0, end),
        ("yaxis2", "range"): (0, top),
        ("yaxis3", "range"): (0, ratio),
        ("yaxis3", "visible"): data.device_tokens is not None,
    }


def apply_tuner(figure: Any, data: TunerData, shown: Values | None = None) -> Values:
    """Put ``data`` into a figure made by :func:`tuner_figure`, in place; use it inside ``batch_update()``.

    Args:
        figure: the figure or FigureWidget.
        data: the numbers to show.
        shown: what this function returned last time; only what differs is touched.

    Returns:
        The values now in the figure.
    """
    values = tuner_values(data)
    for (where, name), value in values.items():
        if shown is None or shown[where, name] != value:
            part = figure.data[where] if isinstance(where, int) else figure.layout[where]
            part[name] = value
    return values
