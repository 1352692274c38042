"""hicache_lab: exact SGLang HiCache sizing, log forensics, cache simulation and end-to-end runs.

>>> import hicache_lab as hl
>>> answer = hl.plan("kimi-k2.5", "0.5.8", tp_size=8, device_tokens=116_000, hicache_size=300,
...                  host_ram="449GB", available="445GB")
>>> answer.verdict
'OOM_RISK'
>>> answer.advice.size_gb
48

Importing the package loads nothing but this file: a function, or a part such as ``hl.figures``, is imported when it is
first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_lab import host, race, runs, sweeps
    from hicache_lab.api import (
        Markdown,
        across_releases,
        compare,
        diagnose,
        explain,
        hit_curve,
        largest,
        models,
        plan,
        preflight,
        read_log,
        read_trace,
        releases,
        simulate,
    )
    from hicache_lab.base import resources, units
    from hicache_lab.forensics import cases, prefill_rate
    from hicache_lab.serving import measurement
    from hicache_lab.sglang import launch, source
    from hicache_lab.traffic import cachesim, cost_benefit
    from hicache_lab.views import figures, report, tables, widgets

__version__ = "0.2.0"

__all__ = [
    "Markdown",
    "across_releases",
    "cachesim",
    "cases",
    "compare",
    "cost_benefit",
    "diagnose",
    "explain",
    "figures",
    "hit_curve",
    "host",
    "largest",
    "launch",
    "measurement",
    "models",
    "plan",
    "prefill_rate",
    "preflight",
    "race",
    "read_log",
    "read_trace",
    "releases",
    "report",
    "resources",
    "runs",
    "simulate",
    "source",
    "sweeps",
    "tables",
    "units",
    "widgets",
]

# the parts that notebooks use beside the functions
_PARTS = {
    "cachesim": "traffic.cachesim",
    "cases": "forensics.cases",
    "cost_benefit": "traffic.cost_benefit",
    "figures": "views.figures",
    "host": "host",
    "launch": "sglang.launch",
    "measurement": "serving.measurement",
    "prefill_rate": "forensics.prefill_rate",
    "race": "race",
    "report": "views.report",
    "resources": "base.resources",
    "runs": "runs",
    "source": "sglang.source",
    "sweeps": "sweeps",
    "tables": "views.tables",
    "units": "base.units",
    "widgets": "views.widgets",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PARTS:
        return import_module(f"{__name__}.{_PARTS[name]}")
    return getattr(import_module(f"{__name__}.api"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Door(ModuleType):
    """This package as a module, whose ``preflight`` stays the function.

    Python binds a package's imported modules to it by their names, and ``hicache_lab.preflight`` is a wing too.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__ and name not in _PARTS):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door
