"""Settings against a baseline: medians, bootstrap intervals, and whether a difference is more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hicache_lab.base.display import Displayed, one_line
from hicache_lab.base.errors import UsageError, did_you_mean
from hicache_lab.runs.comparison.metrics import COSTS, OBJECTIVES, Direction, metric
from hicache_lab.runs.comparison.observations import Observation
from hicache_lab.runs.comparison.statistics import (
    CONFIDENCE,
    Interval,
    chance_of_separation,
    check_confidence,
    difference_interval,
    median_interval,
)

Finding = Literal["baseline", "same", "higher", "lower", "inside the noise", "one run", "not there"]
"""What a difference from the baseline is; "one run" cannot be told from noise."""

EXACT = frozenset({"computed", "simulated", "replayed"})
"""Sources without noise: the same input gives the same number, so one run is enough."""


# recorded texts that a reader of the numbers must know
_CAUTIONS = ("caution", "too_busy")


@dataclass(frozen=True)
class Cell:
    """One figure of one setting.

    Attributes:
        name, unit, source, better: the figure, and which way is better.
        values: one a run.
        median: of them.
        interval: bootstrap interval of the median; None with one run.
        delta: median minus the baseline's median; None without a baseline value.
        delta_interval: bootstrap interval of the difference.
        finding: what the difference is.
    """

    name: str
    unit: str
    source: str
    better: Direction
    values: tuple[float, ...]
    median: float
    interval: Interval | None
    delta: float | None
    delta_interval: Interval | None
    finding: Finding

    @property
    def delta_share(self) -> float | None:
        """The difference over the baseline's median."""
        if self.delta is None or self.median == self.delta:
            return None
        return self.delta / (self.median - self.delta)

    @property
    def improved(self) -> bool | None:
        """True for better, False for worse, None where the difference is not known to be one."""
        if not self.better or self.finding not in {"higher", "lower"}:
            return None
        return self.finding == self.better


@dataclass(frozen=True)
class Setting:
    """All runs of one setting."""

    label: str
    runs: tuple[Observation, ...]
    cells: Mapping[str, Cell]

    @property
    def words(self) -> dict[str, str]:
        """Recorded texts that all its runs agree on."""
        first = self.runs[0].words
        return {name: text for name, text in first.items() if all(run.words.get(name) == text for run in self.runs)}


@dataclass(frozen=True)
class Pair:
    """What was predicted and what was then seen, in one setting."""

    setting: str
    name: str
    unit: str
    predicted: float
    observed: float
    predicted_source: str
    observed_source: str

    @property
    def difference(self) -> float:
        """Observed minus predicted."""
        return self.observed - self.predicted


@dataclass(frozen=True)
class Comparison(Displayed):
    """Settings, the baseline first among equals.

    Attributes:
        baseline: label of the setting the others are compared with.
        settings: in the order they were given.
        metrics: names of the figures compared.
        left_out: (label, why) of what is not in it: failed, skipped.
        notes: what a reader must know.
        confidence: of the intervals.
        objective: the figure that decides, if any was measured.
        cost: the figure that says what a setting takes, if known.
    """

    baseline: str
    settings: tuple[Setting, ...]
    metrics: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    confidence: float
    objective: str | None
    cost: str | None

    def __repr__(self) -> str:
        runs = sum(len(setting.runs) for setting in self.settings)
        return f"Comparison({len(self.settings)} settings, {runs} runs, against {one_line(self.baseline)})"

    def setting(self, label: str) -> Setting:
        """One setting by its label."""
        return next(one for one in self.settings if one.label == label)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Figures recorded as predicted_X and observed_X (or measured_X), setting by setting."""
        pairs = []
        for setting in self.settings:
            there = dict.fromkeys(name for run in setting.runs for name in run.values)
            for name in there:
                bare = name.removeprefix("predicted_")
                observed = next((n for n in (f"observed_{bare}", f"measured_{bare}", bare) if n in there), None)
                if bare != name and observed is not None:
                    left = [run.values[name] for run in setting.runs if name in run.values]
                    right = [run.values[observed] for run in setting.runs if observed in run.values]
                    middles = (median(one.value for one in left), median(one.value for one in right))
                    pairs.append(Pair(setting.label, bare, right[0].unit, *middles, left[0].source, right[0].source))
        return tuple(pairs)


def compare(
    observations: Sequence[Observation],
    *,
    baseline: str | None = None,
    metrics: Sequence[str] = (),
    objective: str | None = None,
    left_out: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Comparison:
    """Compare settings.

    Args:
        observations: runs with labels (``named`` gives them); runs of one label are repeats.
        baseline: a label; None takes the first.
        metrics: figures to compare; empty takes all that at least one setting has.
        objective: the figure that decides; None takes the first known one that was measured.
        left_out: (label, why) of runs that are not there.
        notes: what else a reader must know; they come first.
        confidence: of the bootstrap intervals.
        seed: of their resampling.

    Raises:
        UsageError: nothing to compare, no such confidence or seed, or an unknown baseline, metric or objective (the
            message lists those there are).
    """
    check_confidence(confidence)
    if seed < 0:
        raise UsageError(f"--seed: expected 0 or more, got {seed}")
    if not observations:
        why = "; ".join(f"{label}: {reason}" for label, reason in left_out)
        raise UsageError(f"nothing to compare: no complete run ({why or 'none given'})")
    groups: dict[str, list[Observation]] = {}
    for one in observations:
        groups.setdefault(one.label, []).append(one)
    first = _known("baseline", baseline, groups) or next(iter(groups))
    there = tuple(dict.fromkeys(name for one in observations for name in one.values))
    for name in metrics:
        _known("metric", name, there)
    chosen = tuple(metrics) or there
    goal = _known("objective", objective, there) or next((name for name in OBJECTIVES if name in there), None)
    names = tuple(dict.fromkeys([*chosen, *([goal] if goal else [])]))
    settings = tuple(
        Setting(label, tuple(runs), _cells(runs, groups[first], names, label == first, confidence, seed))
        for label, runs in groups.items()
    )
    cost = next((name for name in COSTS if name in there), None)
    all_notes = (*notes, *_notes(settings, first, names, confidence))
    return Comparison(first, settings, names, tuple(left_out), all_notes, confidence, goal, cost)


def _known(what: str, name: str | None, known: Sequence[str] | Mapping[str, object]) -> str | None:
    if name is None or name in known:
        return name
    raise UsageError(f"{what} {name!r}: not there{did_you_mean(name, known)}; there are {', '.join(known) or 'none'}")


def _cells(
    runs: Sequence[Observation],
    baseline: Sequence[Observation],
    names: Sequence[str],
    is_baseline: bool,
    confidence: float,
    seed: int,
) -> dict[str, Cell]:
    cells = {}
    for name in names:
        values = [run.values[name] for run in runs if name in run.values]
        if not values:
            continue
        before = [run.values[name] for run in baseline if name in run.values]
        units = sorted({value.unit for value in [*values, *before]})
        if len(units) > 1:
            shown = ", ".join(units)
            raise UsageError(f"{name}: recorded in different units ({shown}); these runs cannot be compared in it")
        numbers = [value.value for value in values]
        base = [value.value for value in before]
        middle = median(numbers)
        delta = middle - median(base) if base and not is_baseline else None
        interval = difference_interval(base, numbers, confidence=confidence, seed=seed) if delta is not None else None
        exact = all(value.source in EXACT for value in [*values, *before])
        cells[name] = Cell(
            name=name,
            unit=values[0].unit,
            source=values[0].source,
            better=metric(name).better,
            values=tuple(numbers),
            median=middle,
            interval=median_interval(numbers, confidence=confidence, seed=seed),
            delta=delta,
            delta_interval=interval,
            finding="baseline" if is_baseline else _finding(delta, interval, exact),
        )
    return cells


def _finding(delta: float | None, interval: Interval | None, exact: bool) -> Finding:
    if delta is None:
        return "not there"
    if exact or (interval is not None and interval.excludes_zero):
        return "same" if delta == 0 else "higher" if delta > 0 else "lower"
    return "one run" if interval is None else "inside the noise"


def _notes(settings: Sequence[Setting], baseline: str, names: Sequence[str], confidence: float) -> list[str]:
    notes = []
    counts = {setting.label: len(setting.runs) for setting in settings}
    noisy = any(cell.source not in EXACT for setting in settings for cell in setting.cells.values())
    if noisy and len(settings) > 1:
        if min(counts.values()) < 2:
            notes.append(
                "measured once: a difference of single runs cannot be told from noise; repeat (`repeats: 5`) to tell"
            )
        smallest = min(count for label, count in counts.items() if label != baseline)
        chance = chance_of_separation(counts[baseline], smallest)
        if min(counts[baseline], smallest) > 1 and chance > 1 - confidence:
            notes.append(
                f"few repeats: with {counts[baseline]} runs against {smallest}, two equal settings come out fully "
                f"apart in {chance:.0%} of cases; 4 against 4 make it 3 %"
            )
        judged = sum(cell.delta_interval is not None for setting in settings for cell in setting.cells.values())
        if judged >= 20:
            notes.append(
                f"{judged} differences are judged at {confidence:.0%}: about {judged * (1 - confidence):.0f} of them "
                "would look real by luck alone"
            )
    for setting in settings:
        for word in _CAUTIONS:
            cautions = [run.words[word] for run in setting.runs if word in run.words]
            if cautions:
                notes.append(f"{setting.label}, {len(cautions)} of {len(setting.runs)} runs: {cautions[0]}")
    for name in names:
        missing = [setting.label for setting in settings if name not in setting.cells]
        if missing and len(missing) < len(settings):
            notes.append(f"{name} was not recorded for {', '.join(missing)}")
    return notes
