"""Records as tables that survive parquet, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas as pd

Record = TypeVar("Record")


def table_of(kind: type, records: Sequence[Any]) -> pd.DataFrame:
    """Records of one dataclass, a row each; the columns have types that survive parquet."""
    import pandas as pd

    columns = [field.name for field in fields(kind)]
    data = {column: [getattr(record, column) for record in records] for column in columns}
    for column, values in data.items():
        if values and isinstance(values[0], tuple):
            data[column] = [list(value) for value in values]
    table = pd.DataFrame(data, columns=columns)
    for column in columns:
        if column.endswith("_tokens") or column.startswith("cached_") or column in {"running", "waiting"}:
            table[column] = table[column].astype("Int64")
        elif column in {"due_s", "ttft_s", "e2e_s", "device_used_share"}:
            table[column] = table[column].astype("float64")
        elif column in {"error", "missing"}:
            table[column] = table[column].astype("string")
    return table


def records_of(kind: Callable[..., Record], table: pd.DataFrame) -> tuple[Record, ...]:
    """What ``table_of`` made a table of.

    Raises:
        TypeError: a column that the record does not have, or a missing one.
    """
    return tuple(kind(**{str(name): _cell(value) for name, value in row.items()}) for row in table.to_dict("records"))


def _cell(value: Any) -> Any:
    """A parquet cell as the record holds it: lists become tuples, missing values None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return tuple(value)
    missing = value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))
    return None if missing else value
