"""A comparison of runs as a table of its main figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_lab.runs.comparison import Comparison, recommend
from hicache_lab.runs.comparison.text import as_json, comparison_rows, main_figures
from hicache_lab.views.cells.blocks import rows_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.views.figures import Theme


def markdown(record: Comparison) -> str:
    """One row a setting, and the setting to take."""
    taken = recommend(record)
    return rows_table(comparison_rows(record)) + (f"\n\ntake: {taken.label}" if taken else "")


def plot(record: Comparison, theme: Theme = "light") -> Figure:
    """The main figures, setting beside setting."""
    from hicache_lab.views.figures import comparison_figure

    return comparison_figure(record, main_figures(record), theme)


def to_dict(record: Comparison) -> dict[str, Any]:
    """What ``compare --json`` prints."""
    return as_json(record, recommend(record))
