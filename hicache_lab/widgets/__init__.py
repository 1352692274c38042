"""Controls wired to pure functions; they work in JupyterLab, and every figure has a static twin in ``figures``."""

from hicache_lab.widgets.payoff import PayoffExplorer
from hicache_lab.widgets.tuner import Tuner, TunerSettings, judge, launch_line

__all__ = ["PayoffExplorer", "Tuner", "TunerSettings", "judge", "launch_line"]
