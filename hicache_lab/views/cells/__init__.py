"""Records as the last line of a notebook cell: as Markdown, as a figure, as plain values; one module a wing.

Each module imports its own wing only, so that a verdict is shown where nothing but the core is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hicache_lab.base.display import Rows
from hicache_lab.views.cells.blocks import rows_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.views.figures import Theme


def _module(record: object) -> Any:
    """The module for the wing that the record's class stands in."""
    return import_module(f"{__name__}.{type(record).__module__.split('.')[1]}")


def markdown(record: object) -> str:
    """A record as Markdown; text from outside is escaped."""
    return rows_table(record) if isinstance(record, Rows) else str(_module(record).markdown(record))


def plot(record: object, theme: Theme = "light") -> Figure:
    """The figure of a record."""
    return _module(record).plot(record, theme)


def to_dict(record: object) -> dict[str, Any]:
    """A record as plain values."""
    found: dict[str, Any] = _module(record).to_dict(record)
    return found
