"""Figures of cost and benefit: hit rate over tokens, and hit rate over the host's GB with the limits drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_lab.base.units import GB, gb
from hicache_lab.preflight.host_tiers import HostTier
from hicache_lab.traffic.cachesim import HitCurve, WritePolicy, tier_rates
from hicache_lab.traffic.cost_benefit import CostBenefit
from hicache_lab.views.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    VERDICT_COLOURS,
    Theme,
    layout,
    line_colour,
    new_figure,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_POINTS = 200


@dataclass(frozen=True)
class CostBenefitData:
    """Every number of the cost-benefit figure; GB are 1e9 bytes of the whole host, rates are per cent.

    Attributes:
        host_gb: the axis, shape (n,).
        through, back: hit rates under write_through and write_back, shape (n,).
        device: hit rate of the device tier alone.
        ceiling: hit rate of an unlimited cache.
        point_gb, point: the setting on show.
        label, verdict: its name and preflight's word.
        safe_gb: the largest safe tier, or None.
        ram_gb: the host's memory, or None.
    """

    host_gb: tuple[float, ...]
    through: tuple[float, ...]
    back: tuple[float, ...]
    device: float
    ceiling: float
    point_gb: float
    point: float
    label: str
    verdict: str
    safe_gb: float | None
    ram_gb: float | None


def cost_benefit_data(case: CostBenefit, tier: HostTier) -> CostBenefitData:
    """Look the curve up along the host's GB; nothing is simulated here."""
    host = case.question.host
    ram = gb(host.total_bytes) if host is not None else None
    end = max(1.15 * (ram or 0.0), 1.05 * gb(tier.allocated_host_bytes))
    axis = np.linspace(0, end, _POINTS)
    tokens = np.array([case.tokens_within(host_gb * GB) for host_gb in axis])

    def rates(policy: WritePolicy) -> tuple[float, ...]:
        return tuple((100 * tier_rates(case.curve, case.device_tokens, tokens, policy)).tolist())

    return CostBenefitData(
        host_gb=tuple(axis.tolist()),
        through=rates(WritePolicy.WRITE_THROUGH),
        back=rates(WritePolicy.WRITE_BACK),
        device=100 * case.device_rate,
        ceiling=100 * case.curve.ceiling,
        point_gb=gb(tier.allocated_host_bytes),
        point=100 * case.rate(tier.tokens),
        label=tier.label,
        verdict=tier.verdict,
        safe_gb=gb(case.safe.allocated_host_bytes) if case.safe else None,
        ram_gb=ram,
    )


def cost_benefit_figure(data: CostBenefitData, theme: Theme = "light") -> Figure:
    """Hit rate over host memory, both write policies, with the device tier, the ceiling, the limits and the setting."""
    import plotly.graph_objects as go

    figure = go.Figure(layout=layout(theme))
    figure.add_scatter(x=[0], y=[0], mode="lines", line={"color": BLUE, "width": 3}, name="write_through")
    figure.add_scatter(
        x=[0], y=[0], mode="lines", line={"color": ORANGE, "width": 3, "dash": "dash"}, name="write_back"
    )
    figure.add_scatter(x=[0, 0], y=[0, 0], mode="lines", line={"color": GREY, "dash": "dot"}, name="device tier alone")
    figure.add_scatter(
        x=[0, 0], y=[0, 0], mode="lines", line={"color": GREY, "dash": "longdash"}, name="unlimited cache"
    )
    figure.add_scatter(x=[0, 0], y=[0, 0], mode="lines", line={"color": GREEN, "width": 2}, name="largest safe tier")
    limit = {"color": line_colour(theme), "width": 2, "dash": "dash"}
    figure.add_scatter(x=[0, 0], y=[0, 0], mode="lines", line=limit, name="host RAM")
    figure.add_scatter(x=[0], y=[0], mode="markers+text", name="this setting", textposition="bottom right")
    figure.data[6].marker = {"size": 14, "symbol": "diamond", "line": {"color": line_colour(theme), "width": 1.5}}
    figure.update_xaxes(title_text="host memory of all ranks (GB = 1e9 bytes)")
    figure.update_yaxes(title_text="hit rate (% of prompt tokens)", rangemode="tozero")
    apply_cost_benefit(figure, data)
    return figure


def apply_cost_benefit(figure: Any, data: CostBenefitData, shown: CostBenefitData | None = None) -> None:
    """Put ``data`` into a figure made by :func:`cost_benefit_figure`, in place; use it inside ``batch_update()``.

    Args:
        figure: the figure or FigureWidget.
        data: the numbers to show.
        shown: what the figure shows now; lines that stay as they are are not touched.
    """
    top = max(data.ceiling, data.point) * 1.12 or 1.0
    ends = [data.host_gb[0], data.host_gb[-1]]
    lines = figure.data
    if shown is None or _background(data) != _background(shown):
        lines[0].x, lines[0].y = data.host_gb, data.through
        lines[1].x, lines[1].y = data.host_gb, data.back
        lines[2].x, lines[2].y = ends, [data.device] * 2
        lines[3].x, lines[3].y = ends, [data.ceiling] * 2
        for line, place in ((lines[4], data.safe_gb), (lines[5], data.ram_gb)):
            line.x, line.y = ([place] * 2, [0, top]) if place is not None else ([None], [None])
            line.showlegend = place is not None
        figure.update_xaxes(range=ends)
        figure.update_yaxes(range=[0, top])
    lines[6].x, lines[6].y, lines[6].text = [data.point_gb], [data.point], [f"{data.label}: {data.point:.1f} %"]
    lines[6].marker.color = VERDICT_COLOURS[data.verdict]


def _background(data: CostBenefitData) -> tuple[object, ...]:
    """Everything but the point."""
    return data.host_gb, data.through, data.back, data.device, data.ceiling, data.safe_gb, data.ram_gb


def hit_curve_figure(curve: HitCurve, theme: Theme = "light") -> Figure:
    """Hit rate at every size of one tier, on a logarithmic axis."""
    sizes = np.unique(np.geomspace(1, max(curve.largest_useful_blocks, 2), _POINTS).astype(np.int64))
    figure = new_figure(theme)
    figure.add_scatter(
        x=(sizes * curve.block_tokens).tolist(),
        y=(100 * curve.rate_at(sizes)).tolist(),
        mode="lines",
        line={"color": BLUE, "width": 3},
        name=f"hit rate at this size ({curve.basis}, exact)",
    )
    figure.update_xaxes(type="log", title_text="cache size (tokens)")
    figure.update_yaxes(title_text=f"hit rate (% of prompt {curve.count})", rangemode="tozero")
    return figure


def curve_figure(case: CostBenefit, theme: Theme = "light") -> Figure:
    """The hit curve of a case with the device pool marked."""
    figure = hit_curve_figure(case.curve, theme)
    figure.add_vline(x=case.device_tokens, line={"color": line_colour(theme), "dash": "dash"})
    figure.add_annotation(
        x=np.log10(case.device_tokens), y=1, yref="paper", text="device pool", showarrow=False, xanchor="left", xshift=6
    )
    return figure
