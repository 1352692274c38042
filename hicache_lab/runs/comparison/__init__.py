"""Runs against each other: figures of run folders, sweeps, bench_serving and aiperf in one table, with their noise.

A run is the unit: repeats of a setting give a median and a bootstrap interval, and a difference from the baseline that
the interval does not tell from zero is called "inside the noise".
"""

from hicache_lab.runs.comparison.compare import Cell, Comparison, compare
from hicache_lab.runs.comparison.decision import Recommendation, recommend
from hicache_lab.runs.comparison.foreign import read_results
from hicache_lab.runs.comparison.metrics import metric
from hicache_lab.runs.comparison.observations import Observation, named, observe_run
from hicache_lab.runs.comparison.statistics import chance_of_separation, difference_interval, median_interval

__all__ = [
    "Cell",
    "Comparison",
    "Observation",
    "Recommendation",
    "chance_of_separation",
    "compare",
    "difference_interval",
    "median_interval",
    "metric",
    "named",
    "observe_run",
    "read_results",
    "recommend",
]
