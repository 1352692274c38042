"""Figures of a comparison: every figure against its baseline, hits by tier, benefit against host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hicache_lab.comparison import Cell, Comparison, metric
from hicache_lab.figures.capacity import plain
from hicache_lab.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    SKY,
    VERDICT_COLOURS,
    Theme,
    layout,
    line_colour,
    new_figure,
)
from hicache_lab.units import gb

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FINDING_COLOURS = {
    "baseline": GREY,
    "same": GREY,
    "inside the noise": GREY,
    "one run": SKY,
    "not there": SKY,
}
TIERS: Mapping[str, str] = {
    "device_hit_tokens": "found on the device",
    "host_hit_tokens": "found on the host",
    "storage_hit_tokens": "found in storage",
}
_MOST_PANELS = 9


def _colour(cell: Cell) -> str:
    """Better, worse, or not known to differ; the finding itself is also written out."""
    if cell.improved is not None:
        return GREEN if cell.improved else RED
    return _FINDING_COLOURS.get(cell.finding, BLUE)


def comparison_figure(comparison: Comparison, names: Sequence[str] = (), theme: Theme = "light") -> Figure:
    """One panel a figure: the median of each setting with its bootstrap interval, every run as a point.

    Args:
        comparison: the settings.
        names: which figures, at most nine; empty takes the first ones.
        theme: light or dark.
    """
    from plotly.subplots import make_subplots

    chosen = list(names or comparison.metrics)[:_MOST_PANELS]
    columns = min(3, max(1, len(chosen)))
    rows = -(-len(chosen) // columns) or 1
    figure = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[metric(name).title for name in chosen],
        vertical_spacing=min(0.5 / rows, 0.35),
        horizontal_spacing=0.09,
    )
    for place, name in enumerate(chosen):
        row, column = place // columns + 1, place % columns + 1
        cells = [(setting.label, setting.cells[name]) for setting in comparison.settings if name in setting.cells]
        _panel(figure, cells, row, column)
        unit = cells[0][1].unit if cells else ""
        figure.update_yaxes(title_text=unit or "value", rangemode="tozero", row=row, col=column)
    figure.update_layout(
        layout(
            theme,
            height=80 + 300 * rows,
            showlegend=False,
            title={"text": f"Settings against {plain(comparison.baseline)} ({comparison.confidence:.0%} intervals)"},
        )
    )
    return figure


def _panel(figure: Figure, cells: Sequence[tuple[str, Cell]], row: int, column: int) -> None:
    labels = [plain(label) for label, _ in cells]
    above = [cell.interval.high - cell.median if cell.interval else 0.0 for _, cell in cells]
    below = [cell.median - cell.interval.low if cell.interval else 0.0 for _, cell in cells]
    figure.add_bar(
        x=labels,
        y=[cell.median for _, cell in cells],
        marker_color=[_colour(cell) for _, cell in cells],
        error_y={"type": "data", "array": above, "arrayminus": below},
        text=[cell.finding if cell.finding != "baseline" else "" for _, cell in cells],
        textposition="inside",
        name="median",
        row=row,
        col=column,
    )
    figure.add_scatter(
        x=[label for label, (_, cell) in zip(labels, cells, strict=True) for _ in cell.values],
        y=[value for _, cell in cells for value in cell.values],
        mode="markers",
        marker={"color": ORANGE, "size": 6, "line": {"width": 1}},
        name="runs",
        row=row,
        col=column,
    )


def hits_figure(comparison: Comparison, theme: Theme = "light") -> Figure | None:
    """Where prompt tokens were found, setting by setting; None if no tier was recorded."""
    names = [name for name in TIERS if any(name in setting.cells for setting in comparison.settings)]
    if not names:
        return None
    figure = new_figure(
        theme,
        title={"text": "Where prompt tokens were found"},
        xaxis={"title": {"text": "setting"}},
        yaxis={"title": {"text": "prompt tokens, median of runs"}, "rangemode": "tozero"},
        barmode="stack",
    )
    for name, colour in zip(names, (BLUE, ORANGE, GREEN), strict=False):
        figure.add_bar(
            x=[plain(setting.label) for setting in comparison.settings],
            y=[setting.cells[name].median if name in setting.cells else None for setting in comparison.settings],
            name=TIERS[name],
            marker_color=colour,
        )
    return figure


@dataclass(frozen=True)
class Tradeoff:
    """One setting in the trade-off figure.

    Attributes:
        label: the setting.
        host_bytes: what it takes from the host.
        benefit: what it brings; None for a setting that was never run.
        verdict: preflight's word.
    """

    label: str
    host_bytes: int
    benefit: float | None
    verdict: str = ""


def tradeoff_figure(
    points: Sequence[Tradeoff],
    *,
    safe_bytes: int | None,
    ram_bytes: int | None,
    benefit: str,
    source: str,
    theme: Theme = "light",
) -> Figure:
    """What each setting brings against what it takes from the host, with the line that is safe.

    Args:
        points: settings; those without a benefit stand on the axis, marked as not run.
        safe_bytes: the most that leaves the reserve free; the region beyond it is shaded.
        ram_bytes: RAM of the host.
        benefit: the y axis, with its unit.
        source: where benefit and bytes come from; stands in the title.
        theme: light or dark.
    """
    figure = new_figure(
        theme,
        title={"text": f"What a setting brings, and what it takes ({plain(source)})"},
        xaxis={"title": {"text": "host memory of all ranks (GB = 1e9 bytes)"}, "rangemode": "tozero"},
        yaxis={"title": {"text": plain(benefit)}, "rangemode": "tozero"},
    )
    ran = sorted((point for point in points if point.benefit is not None), key=lambda point: point.host_bytes)
    figure.add_scatter(
        x=[gb(point.host_bytes) for point in ran],
        y=[point.benefit for point in ran],
        text=[plain(point.label) for point in ran],
        mode="lines+markers+text",
        textposition="top center",
        marker={"size": 12, "color": [VERDICT_COLOURS.get(point.verdict, BLUE) for point in ran]},
        line={"color": GREY, "dash": "dot"},
        name="run",
    )
    skipped = [point for point in points if point.benefit is None]
    if skipped:
        figure.add_scatter(
            x=[gb(point.host_bytes) for point in skipped],
            y=[0] * len(skipped),
            text=[f"{plain(point.label)}<br><b>{point.verdict}</b>" for point in skipped],
            mode="markers+text",
            textposition="top center",
            marker={"size": 13, "symbol": "x", "color": RED},
            name="not run",
        )
    _lines(figure, max((point.host_bytes for point in points), default=0), safe_bytes, ram_bytes, theme)
    return figure


def _lines(figure: Figure, most: int, safe_bytes: int | None, ram_bytes: int | None, theme: Theme) -> None:
    end = gb(max(most, safe_bytes or 0, ram_bytes or 0)) * 1.08
    if safe_bytes is not None:
        figure.add_vrect(x0=gb(safe_bytes), x1=end, fillcolor=RED, opacity=0.12, line_width=0)
    lines: list[tuple[int | None, str, str]] = [(safe_bytes, "safe", "dash"), (ram_bytes, "host RAM", "solid")]
    for n_bytes, text, dash in lines:
        if n_bytes is not None:
            mark: dict[str, Any] = {"color": line_colour(theme), "width": 2, "dash": dash}
            figure.add_vline(
                x=gb(n_bytes),
                line=mark,
                annotation={"text": f"{text}: {gb(n_bytes):,.0f} GB", "textangle": -90},
                annotation_position="bottom left" if text == "safe" else "bottom right",
            )
    figure.update_xaxes(range=[0, end])
