"""A load's result on disk: ``load.json``, ``requests.parquet``, ``metrics.parquet``."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hicache_lab.base.errors import InputError
from hicache_lab.serving.load.pace import Lag
from hicache_lab.serving.load.results import SCHEMA_VERSION, LoadResult, RequestRecord, ServerSample

if TYPE_CHECKING:
    import pandas as pd


def written_whole(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside ``target`` and rename: it appears whole, or what was there stays."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        write(aside)
        aside.chmod(0o644)
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)


def frame(kind: type, rows: Sequence[Any]) -> pd.DataFrame:
    """Records of one kind as a table whose columns have types that survive parquet."""
    import pandas as pd

    columns = [field.name for field in fields(kind)]
    data = {column: [getattr(row, column) for row in rows] for column in columns}
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


def read_result(folder: Path) -> LoadResult:
    """Read what ``LoadResult.write`` wrote.

    Raises:
        InputError: a file is missing, damaged or of another schema; the message names it.
    """
    import pandas as pd

    path = folder / "load.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA_VERSION:
            raise InputError(f"{path}: schema {data.get('schema')!r}, this version reads {SCHEMA_VERSION}")
        path = folder / "requests.parquet"
        records = _rows(RequestRecord, pd.read_parquet(path))
        path = folder / "metrics.parquet"
        samples = _rows(ServerSample, pd.read_parquet(path))
        path = folder / "load.json"
        kept = ("plan", "seed", "parameters", "base_url", "started_unix_s", "duration_s", "ended")
        return LoadResult(
            **{name: data[name] for name in kept},
            records=records,
            samples=samples,
            lag=Lag(**data["lag"]),
            notes=tuple(data["notes"]),
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"{path}: expected a load's result as this package writes it; {error}") from error


def _rows(kind: Callable[..., Any], table: pd.DataFrame) -> tuple[Any, ...]:
    return tuple(kind(**{str(name): _plain(value) for name, value in row.items()}) for row in table.to_dict("records"))


def _plain(value: Any) -> Any:
    """A parquet cell as the record holds it: lists become tuples, missing values None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return tuple(value)
    missing = value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))
    return None if missing else value
