"""Controls wired to pure functions; they work in JupyterLab, and every figure has a static twin in ``figures``."""

from hicache_lab.views.widgets.cost_benefit import CostBenefitExplorer
from hicache_lab.views.widgets.tuner import Tuner, TunerSettings, judge, launch_line

__all__ = ["CostBenefitExplorer", "Tuner", "TunerSettings", "judge", "launch_line"]
