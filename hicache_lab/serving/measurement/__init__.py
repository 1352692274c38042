"""One measurement of one server: what it runs, what was predicted for it, what a load saw.

``measure`` takes it, ``read_run`` reads a recorded one, ``predict`` computes what the flags should give and
``comparison`` puts both side by side.
"""

from __future__ import annotations

from hicache_lab.serving.measurement.compare import (
    before_after,
    comparison,
    figures_of,
    hit_rows,
    latency_rows,
    run_conclusion,
    throughput_row,
)
from hicache_lab.serving.measurement.predict import predict
from hicache_lab.serving.measurement.run import WORKLOADS, ServerRun, make_load_plan, measure, read_run, recorded_runs
from hicache_lab.serving.measurement.simulate import simulate_run

__all__ = [
    "WORKLOADS",
    "ServerRun",
    "before_after",
    "comparison",
    "figures_of",
    "hit_rows",
    "latency_rows",
    "make_load_plan",
    "measure",
    "predict",
    "read_run",
    "recorded_runs",
    "run_conclusion",
    "simulate_run",
    "throughput_row",
]
