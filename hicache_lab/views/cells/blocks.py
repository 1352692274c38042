"""Tables of any values as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hicache_lab.base.markdown import markdown_table


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers get thousands separators, None stays empty."""
    return markdown_table(header, [[_cell(value) for value in row] for row in rows])


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same keys as a table."""
    return table(list(rows[0]), [list(row.values()) for row in rows]) if rows else "*nothing*"


def facts_table(facts: Mapping[str, Any]) -> str:
    """Names and values, one pair a line."""
    return table(("fact", "value"), list(facts.items()))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
