"""Figures of a comparison: every figure against its baseline, hits by tier, benefit against host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import TYPE_CHECKING, Any

from hicache_lab.base.units import gb
from hicache_lab.runs.comparison import Cell, Comparison, metric
from hicache_lab.views.figures.capacity import plain
from hicache_lab.views.figures.style import (
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

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_FINDING_COLOURS = {
    "baseline": GREY,
    "same": GREY,
    "inside the noise": GREY,
    "one run": SKY,
    "not there": SKY,
}
_LINEAR_SPREAD = 20
# of a label on a page about 1,100 pixels wide: a letter's width and a line's height, as shares of the axes
_LETTER, _LINE, _MOST_LIFTED = 0.007, 0.065, 5
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
    end = gb(max([safe_bytes or 0, ram_bytes or 0, *(point.host_bytes for point in points)]))
    scale = _Scale.of([gb(point.host_bytes) for point in points], end)
    figure = new_figure(
        theme,
        title={"text": f"What a setting brings, and what it takes ({plain(source)})"},
        xaxis={"title": {"text": f"host memory of all ranks (GB = 1e9 bytes{scale.said})"}, **scale.axis(end)},
        yaxis={"title": {"text": plain(benefit)}, "rangemode": "tozero"},
    )
    ran = sorted((point for point in points if point.benefit is not None), key=lambda point: point.host_bytes)
    places = [scale.place(gb(point.host_bytes)) for point in ran]
    figure.add_scatter(
        x=places,
        y=[point.benefit for point in ran],
        text=_lifted(ran, [place / scale.place(end) for place in places] if end else places),
        customdata=[gb(point.host_bytes) for point in ran],
        hovertemplate="%{customdata:,.4~g} GB, %{y}<extra>%{text}</extra>",
        mode="lines+markers+text",
        textposition="top center",
        cliponaxis=False,
        marker={"size": 12, "color": [VERDICT_COLOURS.get(point.verdict, BLUE) for point in ran]},
        line={"color": GREY, "dash": "dot"},
        name="run",
    )
    skipped = [point for point in points if point.benefit is None]
    if skipped:
        figure.add_scatter(
            x=[scale.place(gb(point.host_bytes)) for point in skipped],
            y=[0] * len(skipped),
            text=[f"{plain(point.label)}<br><b>{point.verdict}</b>" for point in skipped],
            customdata=[gb(point.host_bytes) for point in skipped],
            hovertemplate="%{customdata:,.4~g} GB<extra>%{text}</extra>",
            mode="markers+text",
            textposition="top center",
            cliponaxis=False,
            marker={"size": 13, "symbol": "x", "color": RED},
            name="not run",
        )
    _lines(figure, scale, end, safe_bytes, ram_bytes, theme)
    return figure


@dataclass(frozen=True)
class _Scale:
    """Where bytes stand on the axis: linear, or logarithmic with a place for 0 (log10(1 + GB / unit)).

    A setting that was refused may ask for a thousand times what the others take; on a linear axis they are one dot.
    """

    unit_gb: float | None

    @classmethod
    def of(cls, values_gb: Sequence[float], end_gb: float) -> _Scale:
        least = min((value for value in values_gb if value > 0), default=end_gb)
        return cls(least / 2 if least * _LINEAR_SPREAD < end_gb else None)

    @property
    def said(self) -> str:
        return ", log scale" if self.unit_gb else ""

    def place(self, value_gb: float) -> float:
        return log10(1 + value_gb / self.unit_gb) if self.unit_gb else value_gb

    def axis(self, end_gb: float) -> dict[str, Any]:
        """The range, with room for labels at both ends, and on a log scale the ticks."""
        whole = self.place(end_gb) or 1.0
        axis: dict[str, Any] = {"range": [-0.06 * whole, 1.08 * whole]}
        if self.unit_gb:
            decades = range(floor(log10(self.unit_gb)) + 1, floor(log10(end_gb)) + 1)
            ticks = [0.0, *(float(f"{digit}e{power}") for power in decades for digit in (1, 3))]
            ticks = [tick for tick in ticks if tick <= end_gb]
            axis |= {"tickvals": [self.place(tick) for tick in ticks], "ticktext": [f"{tick:,.10g}" for tick in ticks]}
        return axis


def _lifted(points: Sequence[Tradeoff], places: Sequence[float]) -> list[str]:
    """Labels of points from left to right, lifted by empty lines where they would run into one to their left."""
    most = max((point.benefit or 0.0 for point in points), default=0.0) or 1.0
    taken: list[tuple[float, float, float]] = []
    found = []
    for point, place in zip(points, places, strict=True):
        half, height = len(point.label) * _LETTER / 2, (point.benefit or 0.0) / most
        level = 0
        while level < _MOST_LIFTED and any(
            abs(place - x) < half + other and abs(height + level * _LINE - y) < _LINE * 0.9 for x, y, other in taken
        ):
            level += 1
        taken.append((place, height + level * _LINE, half))
        found.append(plain(point.label) + "<br> " * level)
    return found


def _lines(
    figure: Figure, scale: _Scale, end: float, safe_bytes: int | None, ram_bytes: int | None, theme: Theme
) -> None:
    if safe_bytes is not None:
        right = 1.08 * scale.place(end)
        figure.add_vrect(x0=scale.place(gb(safe_bytes)), x1=right, fillcolor=RED, opacity=0.12, line_width=0)
    lines: list[tuple[int | None, str, str]] = [(safe_bytes, "safe", "dash"), (ram_bytes, "host RAM", "solid")]
    for n_bytes, text, dash in lines:
        if n_bytes is not None:
            mark: dict[str, Any] = {"color": line_colour(theme), "width": 2, "dash": dash}
            figure.add_vline(
                x=scale.place(gb(n_bytes)),
                line=mark,
                annotation={"text": f"{text}: {gb(n_bytes):,.0f} GB", "textangle": -90},
                annotation_position="top left" if text == "safe" else "top right",
            )
