"""Parameterized reruns: one YAML file is a grid of notebook runs, checked whole before anything runs.

``load_grid`` reads the file, ``make_plan`` checks every point (names, types, and the host's memory for every point
that starts a server), ``run_sweep`` runs what may run and can be interrupted and resumed, ``load_sweep`` reads the
result back. Importing this does not load papermill.
"""

from hicache_lab.runs.comparison import recommend
from hicache_lab.runs.comparison.text import comparison_rows, main_figures
from hicache_lab.sweeps.collecting import collect
from hicache_lab.sweeps.engine import Options, run_sweep
from hicache_lab.sweeps.grid import Grid, load_grid
from hicache_lab.sweeps.ledger import Point, SweepRecord, load_sweep
from hicache_lab.sweeps.plan import Plan, make_plan
from hicache_lab.sweeps.report import comparison_figures, recommendation_text, write_comparison
from hicache_lab.sweeps.rows import (
    compare_collection,
    plan_rows,
    planned_tradeoffs,
    point_rows,
    prediction_rows,
    safe_bytes,
    safe_gb,
)

__all__ = [
    "Grid",
    "Options",
    "Plan",
    "Point",
    "SweepRecord",
    "collect",
    "compare_collection",
    "comparison_figures",
    "comparison_rows",
    "load_grid",
    "load_sweep",
    "main_figures",
    "make_plan",
    "plan_rows",
    "planned_tradeoffs",
    "point_rows",
    "prediction_rows",
    "recommend",
    "recommendation_text",
    "run_sweep",
    "safe_bytes",
    "safe_gb",
    "write_comparison",
]
