"""Medians with their uncertainty: a percentile bootstrap, seeded, over whole runs.

Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapters 13 and 16. A run is the unit that is
resampled: requests within one run share its server, its cache and its minute, and are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval, in the unit of what it is an interval of."""

    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference with this interval is beyond the noise."""
        return self.low > 0 or self.high < 0


def _medians(values: Sequence[float], rng: np.random.Generator) -> Any:
    import numpy as np

    data = np.asarray(values, dtype=float)
    picks = rng.integers(0, len(data), size=(RESAMPLES, len(data)))
    return np.median(data[picks], axis=1)


def _interval(statistic: Any, confidence: float) -> Interval:
    import numpy as np

    tail = (1 - confidence) / 2
    low, high = np.quantile(statistic, [tail, 1 - tail])
    return Interval(float(low), float(high))


def check_confidence(confidence: float) -> None:
    """Refuse a level of confidence that makes no sense.

    Raises:
        UsageError: not between 0.5 and 1.
    """
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence: expected 0.5 to below 1, got {confidence}")


def median_interval(values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval | None:
    """Bootstrap interval of the median of repeated runs; None for a single run, which says nothing of noise.

    Args:
        values: one a run.
        confidence: coverage aimed at.
        seed: of the resampling; the same input gives the same interval.
    """
    import numpy as np

    check_confidence(confidence)
    if len(values) < 2:
        return None
    return _interval(_medians(values, np.random.default_rng(seed)), confidence)


def difference_interval(
    baseline: Sequence[float], values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval | None:
    """Bootstrap interval of median(values) − median(baseline), both resampled; None if either has a single run."""
    import numpy as np

    check_confidence(confidence)
    if len(values) < 2 or len(baseline) < 2:
        return None
    rng = np.random.default_rng(seed)
    return _interval(_medians(values, rng) - _medians(baseline, rng), confidence)


def chance_of_separation(n: int, m: int) -> float:
    """How often two samples of the same thing do not overlap at all, by luck: 2 / C(n + m, n).

    With few repeats a bootstrap interval excludes zero exactly when the samples do not overlap, so this is the false
    alarm rate: 1 in 3 for two runs against two, 1 in 10 for three, 1 in 35 for four.
    """
    return 2 / comb(n + m, n)
