"""A plan and a sweep as rows of a table and as points of the trade-off figure; column titles carry units."""

from __future__ import annotations

from typing import Any

from hicache_lab.comparison import Comparison, compare
from hicache_lab.comparison.words import number, shown_first
from hicache_lab.figures.comparison import Tradeoff
from hicache_lab.releases import RESERVE_BYTES
from hicache_lab.sweeps.collecting import Collection
from hicache_lab.sweeps.ledger import SweepRecord
from hicache_lab.sweeps.plan import Plan, Point
from hicache_lab.units import gb

Rows = list[dict[str, Any]]
MAIN_FIGURES = 6


def _settings(plan: Plan) -> list[Point]:
    """One point a setting: repeats are judged alike."""
    return list({point.label: point for point in reversed(plan.points)}.values())[::-1]


def plan_rows(plan: Plan) -> Rows:
    """Each setting of a grid with its verdict."""
    return [
        {
            "setting": point.label,
            "runs": sum(other.label == point.label for other in plan.points),
            "verdict": point.decision.verdict or "starts nothing",
            "decision": "run" if point.decision.run else "skip",
            "host memory of all ranks (GB)": round(gb(point.decision.host_bytes), 2)
            if point.decision.host_bytes
            else None,
            "why": point.decision.reason,
        }
        for point in _settings(plan)
    ]


def safe_bytes(plan: Plan) -> int | None:
    """The most that all ranks may take so that the reserve stays; None if no point starts a server."""
    limits = [point.decision.limit_bytes for point in plan.points if point.decision.limit_bytes is not None]
    return min(limits) - RESERVE_BYTES if limits else None


def safe_gb(plan: Plan) -> float | None:
    """``safe_bytes`` in GB (1e9)."""
    limit = safe_bytes(plan)
    return None if limit is None else gb(limit)


def planned_tradeoffs(plan: Plan) -> list[Tradeoff]:
    """Settings of a plan by what they would take, before any has run."""
    return [
        Tradeoff(point.label, point.decision.host_bytes, 0.0 if point.decision.run else None, point.decision.verdict)
        for point in _settings(plan)
        if point.decision.host_bytes is not None
    ]


def point_rows(sweep: SweepRecord | None) -> Rows:
    """How each point of a sweep ended."""
    return [
        {
            "setting": point.label,
            "run": point.repeat + 1,
            "status": point.status,
            "seconds": point.seconds,
            "why": point.reason if point.status == "skipped" else point.error.message if point.error else "",
        }
        for point in (sweep.points if sweep else ())
    ]


def compare_collection(collection: Collection, *, baseline: str = "", objective: str = "") -> Comparison:
    """Compare what was collected as its sweep's grid says, or as asked for.

    A baseline of the grid that was skipped or has failed gives way to the first setting.
    """
    sweep = collection.sweep
    labels = {one.label for one in collection.observations}
    own = sweep.baseline if sweep and sweep.baseline in labels else None
    return compare(
        collection.observations,
        baseline=baseline or own,
        metrics=sweep.metrics if sweep else (),
        objective=objective or (sweep.objective if sweep else None),
        left_out=collection.left_out,
    )


def main_figures(comparison: Comparison) -> tuple[str, ...]:
    """Names of the figures that a first look needs."""
    return shown_first(comparison)[:MAIN_FIGURES]


def setting_rows(comparison: Comparison) -> Rows:
    """One row a setting, the main figures as columns: the median and what it is against the baseline."""
    rows = []
    for setting in comparison.settings:
        row: dict[str, Any] = {"setting": setting.label, "runs": len(setting.runs)}
        for name in main_figures(comparison):
            cell = setting.cells.get(name)
            column = f"{name} ({cell.unit})" if cell and cell.unit else name
            row[column] = f"{number(cell.median)}  {cell.finding}" if cell else ""
        rows.append(row)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [{column: row.get(column, "") for column in columns} for row in rows]


def pair_rows(comparison: Comparison) -> Rows:
    """Predicted beside observed, setting by setting."""
    return [
        {
            "setting": pair.setting,
            "figure": pair.name,
            "predicted": pair.predicted,
            "observed": pair.observed,
            "difference": pair.difference,
            "unit": pair.unit,
            "predicted is": pair.predicted_source,
        }
        for pair in comparison.pairs
    ]
