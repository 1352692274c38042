"""A plan and a sweep as rows of a table and as points of the trade-off figure; column titles carry units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hicache_lab.base.errors import did_you_mean
from hicache_lab.base.units import gb
from hicache_lab.runs.comparison import Comparison, compare
from hicache_lab.runs.comparison.statistics import CONFIDENCE
from hicache_lab.sizing.guard import beyond_reserve_bytes
from hicache_lab.sweeps.collecting import Collection
from hicache_lab.sweeps.ledger import Point, SweepRecord
from hicache_lab.sweeps.plan import Plan
from hicache_lab.views.figures.comparison import Tradeoff

Rows = list[dict[str, Any]]


def _settings(sweep: Plan | SweepRecord) -> list[Point]:
    """One point a setting: repeats are judged alike."""
    return list({point.label: point for point in reversed(sweep.points)}.values())[::-1]


def plan_rows(plan: Plan) -> Rows:
    """Each setting of a grid with its verdict."""
    return [
        {
            "setting": point.label,
            "runs": sum(other.label == point.label for other in plan.points),
            "verdict": point.decision.verdict or "starts nothing",
            "decision": "skip" if point.status == "skipped" else "run",
            "host memory of all ranks (GB)": round(gb(point.decision.host_bytes), 2)
            if point.decision.host_bytes
            else None,
            "why": point.decision.reason,
        }
        for point in _settings(plan)
    ]


def safe_bytes(sweep: Plan | SweepRecord) -> int | None:
    """The most that all ranks may take so that the reserve stays; None if no point starts a server."""
    limits = [point.decision.limit_bytes for point in sweep.points if point.decision.limit_bytes is not None]
    return beyond_reserve_bytes(min(limits)) if limits else None


def safe_gb(plan: Plan) -> float | None:
    """``safe_bytes`` in GB (1e9)."""
    limit = safe_bytes(plan)
    return None if limit is None else gb(limit)


def planned_tradeoffs(sweep: Plan | SweepRecord) -> list[Tradeoff]:
    """Settings by what they would take, before any has run; those that are skipped without a benefit."""
    return [
        Tradeoff(
            point.label, point.decision.host_bytes, None if point.status == "skipped" else 0.0, point.decision.verdict
        )
        for point in _settings(sweep)
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
            "why": point.why,
        }
        for point in (sweep.points if sweep else ())
    ]


def compare_collection(
    collection: Collection,
    *,
    baseline: str = "",
    objective: str = "",
    metrics: Sequence[str] = (),
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Compare what was collected as asked for, and where nothing is asked for as its sweep's grid says.

    What the grid names and no run has (a baseline that was skipped, a misspelt figure) gives way and is said in a
    note: the runs are made, and are not to be lost for a name.

    Raises:
        UsageError: a baseline, a figure or an objective that was asked for and is not there.
    """
    sweep, notes = collection.sweep, list[str]()
    labels = dict.fromkeys(one.label for one in collection.observations)
    names = dict.fromkeys(name for one in collection.observations for name in one.values)

    def there(what: str, wanted: Iterable[str | None], known: Iterable[str]) -> list[str]:
        given = [name for name in wanted if name]
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known)
                notes.append(f"the grid's {what} {name} is in no complete run and was left aside{hint}")
        return [name for name in given if name in known]

    own = there("baseline", [sweep.baseline], labels) if sweep and not baseline else []
    figures = there("figure", sweep.metrics, names) if sweep and not metrics else []
    goal = there("objective", [sweep.objective], names) if sweep and not objective else []
    return compare(
        collection.observations,
        baseline=baseline or next(iter(own), None),
        metrics=metrics or figures,
        objective=objective or next(iter(goal), None),
        left_out=collection.left_out,
        notes=notes if collection.observations else (),
        confidence=confidence,
        seed=seed,
    )


def prediction_rows(comparison: Comparison) -> Rows:
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
