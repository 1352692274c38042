"""A comparison in words and rows: the same figures for the terminal, the report and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hicache_lab.runs.comparison.compare import Cell, Comparison
from hicache_lab.runs.comparison.decision import Recommendation
from hicache_lab.runs.comparison.metrics import KNOWN, metric
from hicache_lab.runs.comparison.statistics import Interval

HEADER = ("setting", "runs", "median", "interval", "against the baseline", "finding")
MOST_SHOWN = 8
MAIN_FIGURES = 6


def number(value: float) -> str:
    """Four significant digits, whole numbers whole."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _interval(interval: Interval | None) -> str:
    return f"{number(interval.low)} … {number(interval.high)}" if interval else ""


def _delta(cell: Cell) -> str:
    if cell.delta is None:
        return ""
    share = f" ({cell.delta_share:+.1%})".replace("-", "−") if cell.delta_share is not None else ""
    sign = "+" if cell.delta > 0 else "" if cell.delta == 0 else "−"
    return f"{sign}{number(abs(cell.delta))}{share}"


def _finding(cell: Cell) -> str:
    if cell.improved is None:
        return cell.finding
    return f"{cell.finding} ({'better' if cell.improved else 'worse'})"


def rows(comparison: Comparison, name: str) -> list[tuple[str, ...]]:
    """One row a setting that has the figure, under ``HEADER``."""
    table_rows: list[tuple[str, ...]] = []
    for setting in comparison.settings:
        cell = setting.cells.get(name)
        if cell is not None:
            middle = number(cell.median)
            table_rows.append(
                (setting.label, str(len(cell.values)), middle, _interval(cell.interval), _delta(cell), _finding(cell))
            )
    return table_rows


def main_figures(comparison: Comparison) -> tuple[str, ...]:
    """Names of the figures that a first look needs."""
    return shown_first(comparison)[:MAIN_FIGURES]


def comparison_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """One row a setting, the main figures as columns: the median and what it is against the baseline."""
    table = []
    for setting in comparison.settings:
        row: dict[str, Any] = {"setting": setting.label, "runs": len(setting.runs)}
        for name in main_figures(comparison):
            cell = setting.cells.get(name)
            column = f"{name} ({cell.unit})" if cell and cell.unit else name
            row[column] = f"{number(cell.median)}  {cell.finding}" if cell else ""
        table.append(row)
    columns = list(dict.fromkeys(column for row in table for column in row))
    return [{column: row.get(column, "") for column in columns} for row in table]


def prediction_cells(comparison: Comparison) -> list[tuple[str, ...]]:
    """Setting, figure, predicted, observed and the difference, a row a pair."""
    return [
        (pair.setting, pair.name, number(pair.predicted), number(pair.observed), number(pair.difference))
        for pair in comparison.pairs
    ]


def title(comparison: Comparison, name: str) -> str:
    """A figure's title with its unit and where it comes from."""
    cells = [setting.cells[name] for setting in comparison.settings if name in setting.cells]
    sources = ", ".join(dict.fromkeys(cell.source for cell in cells))
    unit = cells[0].unit if cells else ""
    better = f"; {metric(name).better} is better" if metric(name).better else ""
    return f"{metric(name).title}{f' ({unit})' if unit else ''} — {name}, {sources}{better}"


def shown_first(comparison: Comparison) -> tuple[str, ...]:
    """The figures worth a screen: what decides and what it costs first, then the known ones, then the rest."""
    lead = [name for name in (comparison.objective, comparison.cost) if name in comparison.metrics]
    known = [name for name in KNOWN if name in comparison.metrics]
    return tuple(dict.fromkeys([*[n for n in lead if n], *known, *comparison.metrics]))


def align(table: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows as text in columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in table
    ]


def text(comparison: Comparison, recommendation: Recommendation | None, *, most: int = MOST_SHOWN) -> str:
    """The comparison for a terminal."""
    names = shown_first(comparison)
    count = len(comparison.settings)
    lines = [f"{count} settings against {comparison.baseline}" if count > 1 else f"1 setting: {comparison.baseline}"]
    for name in names[:most]:
        lines += ["", title(comparison, name), *align([HEADER, *rows(comparison, name)])]
    if len(names) > most:
        lines += [
            "",
            f"{len(names) - most} more figures: --metric NAME, --all, --json ({', '.join(names[most:][:12])} …)",
        ]
    if comparison.pairs:
        table = [("setting", "figure", "predicted", "observed", "difference"), *prediction_cells(comparison)]
        lines += ["", "predicted against observed", *align(table)]
    lines += [f"left out: {label}: {why}" for label, why in comparison.left_out]
    lines += [f"note: {note}" for note in comparison.notes]
    if recommendation:
        lines += ["", f"take {recommendation.reason}"]
    return "\n".join(lines)


def as_json(comparison: Comparison, recommendation: Recommendation | None) -> dict[str, Any]:
    """Every number of a comparison, JSON-ready."""
    return {
        "baseline": comparison.baseline,
        "confidence": comparison.confidence,
        "objective": comparison.objective,
        "settings": [
            {
                "label": setting.label,
                "runs": len(setting.runs),
                "origins": [run.origin for run in setting.runs],
                "settings": dict(setting.runs[0].settings),
                "words": setting.words,
                "metrics": {name: _cell(cell) for name, cell in setting.cells.items()},
            }
            for setting in comparison.settings
        ],
        "predicted_and_observed": [
            {name: getattr(pair, name) for name in ("setting", "name", "unit", "predicted", "observed", "difference")}
            for pair in comparison.pairs
        ],
        "left_out": [{"label": label, "why": why} for label, why in comparison.left_out],
        "notes": list(comparison.notes),
        "recommendation": asdict(recommendation) | {"equals": list(recommendation.equals)} if recommendation else None,
    }


def _cell(cell: Cell) -> dict[str, Any]:
    delta = cell.delta_interval
    return {
        "unit": cell.unit,
        "source": cell.source,
        "better": cell.better or None,
        "values": list(cell.values),
        "median": cell.median,
        "low": cell.interval.low if cell.interval else None,
        "high": cell.interval.high if cell.interval else None,
        "delta": cell.delta,
        "delta_share": cell.delta_share,
        "delta_low": delta.low if delta else None,
        "delta_high": delta.high if delta else None,
        "finding": cell.finding,
        "improved": cell.improved,
    }
