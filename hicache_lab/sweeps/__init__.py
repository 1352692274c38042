"""Parameterized reruns: one YAML file is a grid of notebook runs, checked whole before anything runs.

``load_grid`` reads the file, ``make_plan`` checks every point (names, types, and the host's memory for every point
that starts a server), ``run_sweep`` runs what may run and can be interrupted and resumed, ``load_sweep`` reads the
result back. Importing this loads neither papermill nor dask.
"""

from hicache_lab.sweeps.engine import Options, run_sweep
from hicache_lab.sweeps.grid import Axis, Grid, load_grid
from hicache_lab.sweeps.ledger import PointRecord, SweepRecord, is_sweep, load_sweep
from hicache_lab.sweeps.plan import Plan, Point, make_plan
from hicache_lab.sweeps.safety import Decision
from hicache_lab.sweeps.workers import dask_executor

__all__ = [
    "Axis",
    "Decision",
    "Grid",
    "Options",
    "Plan",
    "Point",
    "PointRecord",
    "SweepRecord",
    "dask_executor",
    "is_sweep",
    "load_grid",
    "load_sweep",
    "make_plan",
    "run_sweep",
]
