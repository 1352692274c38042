"""Pure figure functions: records in, a complete ``plotly`` figure out.

Axis titles carry units, the host's limit is always drawn, colours are told apart by colour-blind readers and never
carry the meaning alone. ``theme`` is ``light`` or ``dark``.
"""

from hicache_lab.views.figures.capacity import beliefs_figure, memory_figure, releases_figure, settings_figure
from hicache_lab.views.figures.comparison import Tradeoff, comparison_figure, hits_figure, tradeoff_figure
from hicache_lab.views.figures.cost_benefit import (
    apply_cost_benefit,
    cost_benefit_data,
    cost_benefit_figure,
    curve_figure,
    hit_curve_figure,
)
from hicache_lab.views.figures.incident import incident_figure
from hicache_lab.views.figures.measurement import latency_figure, moves_figure, pools_figure, tiers_figure
from hicache_lab.views.figures.race import race_figure, race_map_figure
from hicache_lab.views.figures.style import VERDICT_COLOURS, Theme
from hicache_lab.views.figures.tuner import apply_tuner, tuner_data, tuner_figure, tuner_values

__all__ = [
    "VERDICT_COLOURS",
    "Theme",
    "Tradeoff",
    "apply_cost_benefit",
    "apply_tuner",
    "beliefs_figure",
    "comparison_figure",
    "cost_benefit_data",
    "cost_benefit_figure",
    "curve_figure",
    "hit_curve_figure",
    "hits_figure",
    "incident_figure",
    "latency_figure",
    "memory_figure",
    "moves_figure",
    "pools_figure",
    "race_figure",
    "race_map_figure",
    "releases_figure",
    "settings_figure",
    "tiers_figure",
    "tradeoff_figure",
    "tuner_data",
    "tuner_figure",
    "tuner_values",
]
