"""Parameterized reruns: one YAML file is a grid of notebook runs, checked whole before anything runs.

``load_grid`` reads the file, ``make_plan`` checks every point (names, types, and the host's memory for every point
that starts a server), ``run_sweep`` runs what may run and can be interrupted and resumed, ``load_sweep`` reads the
result back. Importing this does not load papermill.
"""

from hicache_lab.sweeps.collecting import Collection, collect
from hicache_lab.sweeps.engine import Options, run_sweep
from hicache_lab.sweeps.grid import Axis, Grid, load_grid
from hicache_lab.sweeps.ledger import Point, SweepRecord, is_sweep, load_sweep
from hicache_lab.sweeps.plan import Plan, make_plan
from hicache_lab.sweeps.report import comparison_document, comparison_figures, conclusion, write_comparison
from hicache_lab.sweeps.rows import (
    compare_collection,
    main_figures,
    pair_rows,
    plan_rows,
    planned_tradeoffs,
    point_rows,
    safe_bytes,
    safe_gb,
    setting_rows,
)
from hicache_lab.sweeps.safety import Decision

__all__ = [
    "Axis",
    "Collection",
    "Decision",
    "Grid",
    "Options",
    "Plan",
    "Point",
    "SweepRecord",
    "collect",
    "compare_collection",
    "comparison_document",
    "comparison_figures",
    "conclusion",
    "is_sweep",
    "load_grid",
    "load_sweep",
    "main_figures",
    "make_plan",
    "pair_rows",
    "plan_rows",
    "planned_tradeoffs",
    "point_rows",
    "run_sweep",
    "safe_bytes",
    "safe_gb",
    "setting_rows",
    "write_comparison",
]
