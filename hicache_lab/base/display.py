"""What the records that a user meets have in common: a line, a table, a figure, plain data.

A record stands in its own wing, and tables and figures stand far above it, in ``views``. So it asks the door
(``hicache_lab.api``) for them; this is the only place in the wings that looks up to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from hicache_lab.base.errors import missing_packages_named

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure


def door() -> Any:
    """The module of the functions that ``import hicache_lab as hl`` offers."""
    from hicache_lab import api

    return api


def one_line(text: str) -> str:
    """A name from outside for a ``repr``: what is not printable does not break the line."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


class Displayed:
    """A record that a notebook shows as a table, and that leads on to its figure and its plain data."""

    def _repr_markdown_(self) -> str:
        return str(door().markdown(self))

    def plot(self, theme: Literal["light", "dark"] = "light") -> Figure:
        """The figure of this record.

        Args:
            theme: light or dark.

        Raises:
            UsageError: it has none, or a fact that the figure needs is not known; the message names it.
        """
        return door().plot(self, theme)

    def to_dict(self) -> dict[str, Any]:
        """The numbers of this record as plain values, under the keys that the command line prints with ``--json``."""
        found: dict[str, Any] = door().to_dict(self)
        return found


class Markdown(str):
    """Markdown text that a notebook shows as such."""

    __slots__ = ()

    def _repr_markdown_(self) -> str:
        return str(self)


class Rows(list[dict[str, Any]]):
    """Rows of one table: a list of dicts with the same keys, shown as a table."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        super().__init__(dict(row) for row in rows)

    def __repr__(self) -> str:
        return f"Rows({len(self)} × {', '.join(self[0]) if self else 'nothing'})"

    def _repr_markdown_(self) -> str:
        return str(door().markdown(self))

    @property
    @missing_packages_named()
    def frame(self) -> DataFrame:
        """The same as a DataFrame."""
        import pandas as pd

        return pd.DataFrame(list(self))
