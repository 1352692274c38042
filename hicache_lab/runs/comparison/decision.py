"""Which setting to take: the cheapest of those that cannot be told from the best."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_lab.runs.comparison.compare import EXACT, Cell, Comparison, Setting
from hicache_lab.runs.comparison.metrics import metric
from hicache_lab.runs.comparison.statistics import difference_interval


@dataclass(frozen=True)
class Recommendation:
    """A setting, and why.

    Attributes:
        label: the setting.
        objective: the figure that decided.
        best: the setting with the best median; often the same.
        equals: settings that cannot be told from the best, the best included.
        reason: in one sentence.
    """

    label: str
    objective: str
    best: str
    equals: tuple[str, ...]
    reason: str


def recommend(comparison: Comparison, *, seed: int = 0) -> Recommendation | None:
    """The cheapest setting among those whose objective is the best, or inside the noise of it.

    Args:
        comparison: of settings that may run; those that preflight skipped are not in it.
        seed: of the resampling.

    Returns:
        None if no figure that decides was measured, or it has no better direction.
    """
    name, cost = comparison.objective, comparison.cost
    direction = metric(name).better if name else ""
    rivals = [one for one in comparison.settings if name in one.cells]
    if name is None or not direction or not rivals:
        return None

    def merit(setting: Setting) -> float:
        return setting.cells[name].median if direction == "higher" else -setting.cells[name].median

    best = max(rivals, key=merit)
    top = best.cells[name]

    def alike(one: Cell) -> bool:
        if one.source in EXACT and top.source in EXACT:
            return one.median == top.median
        interval = difference_interval(top.values, one.values, confidence=comparison.confidence, seed=seed)
        # single runs: nothing shows that they differ, and nothing that they do not; the better one is kept
        return interval is not None and not interval.excludes_zero

    equals = [one for one in rivals if one is best or alike(one.cells[name])]
    chosen = best
    if cost is not None and all(cost in one.cells for one in equals):
        chosen = min(equals, key=lambda one: (one.cells[cost].median, -merit(one)))
    return Recommendation(
        chosen.label, name, best.label, tuple(one.label for one in equals), _reason(chosen, best, equals, comparison)
    )


def _reason(chosen: Setting, best: Setting, equals: list[Setting], comparison: Comparison) -> str:
    name = comparison.objective or ""
    cell = chosen.cells[name]
    text = f"{chosen.label}: {metric(name).title} {cell.median:,.4g} {cell.unit}".rstrip()
    if chosen is not best:
        text += (
            f"; {best.label} has {best.cells[name].median:,.4g}, a difference inside the noise, "
            "and takes more of the host"
        )
    elif len(equals) > 1:
        others = ", ".join(one.label for one in equals if one is not best)
        text += f"; {others} cannot be told from it"
    else:
        text += ", the best of all"
    if cell.source not in EXACT and min(len(one.runs) for one in comparison.settings) < 2:
        text += " (single runs: repeat before deciding)"
    return text
