"""pandas DataFrames of a log: batches, host and device allocations, errors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.files import atomic_write
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.batch import BOOLEANS
from hicache_lab.forensics.logs.collect import Log
from hicache_lab.forensics.logs.columns import MISSING, MISSING_FLAG

if TYPE_CHECKING:
    import pandas as pd


def batches(log: Log, phase: str) -> pd.DataFrame:
    """The ``decode`` or ``prefill`` lines, one row each, in the order of the log.

    Columns: ``at`` (as printed, no zone), ``file``, ``line``, ``run``, ``rank``, ``iteration``, ``fresh`` (first decode
    line after idling: its throughput includes the pause), then every field the lines carry. A field that a line does
    not carry is missing, never zero.

    Raises:
        UsageError: the log was read without columns.
    """
    import pandas as pd

    if log.columns is None:
        raise UsageError("the log was read without its batch lines: use read_log(…, columns=True)")
    columns = log.columns.columns(phase)
    out: dict[str, Any] = {
        # as int64 the marker of a missing time is NaT's own
        "at": columns.pop("at_ms").view("datetime64[ms]"),
        "file": pd.Categorical.from_codes(columns.pop("file"), categories=pd.Index(log.columns.files)),
        "line": columns.pop("line"),
        "run": columns.pop("run"),
        "rank": pd.Categorical.from_codes(columns.pop("rank"), categories=pd.Index(log.columns.ranks)),
    }
    for name, values in columns.items():
        if name in BOOLEANS:
            out[name] = _nullable(values, values == MISSING_FLAG, "boolean")
        elif values.dtype == np.int32:
            out[name] = _nullable(values, values == MISSING, "Int32")
        else:
            out[name] = values
    return pd.DataFrame(out, copy=False)


def _nullable(values: Any, absent: Any, dtype: str) -> Any:
    import pandas as pd

    if not absent.any():
        return values.astype(np.bool_) if dtype == "boolean" else values
    if dtype == "boolean":
        return pd.arrays.BooleanArray(values == 1, absent)
    return pd.arrays.IntegerArray(np.where(absent, 0, values).astype(np.int32), absent)


def allocations(log: Log) -> pd.DataFrame:
    """Host and device pools: one row a line, with ``tier``, ``pool``, ``tokens`` and ``bytes`` of one rank."""
    import pandas as pd

    names = ["at", "file", "line", "run", "rank", "tier", "pool", "tokens", "bytes", "final"]
    rows = []
    for run in log.runs:
        pools: list[ev.HostPool | ev.DevicePool] = [*run.of(ev.HostPool), *run.of(ev.DevicePool)]
        for pool in pools:
            stands = (pool.at, pool.where.file, pool.where.line, run.index, pool.rank.label)
            tier, final = ("device", pool.final) if isinstance(pool, ev.DevicePool) else ("host", True)
            rows.append((*stands, tier, pool.pool, pool.tokens, pool.bytes, final))
    frame = pd.DataFrame(rows, columns=names)
    return frame.astype({"at": "datetime64[ms]", "tokens": "Int64", "bytes": "Int64"})


def errors(log: Log) -> pd.DataFrame:
    """Everything that failed, one row a statement, in the order of the log."""
    import pandas as pd

    rows = [
        (event.at, event.where.file, event.where.line, run.index, event.rank.label, event.kind, event.text)
        for run in log.runs
        for event in run.events
        if event.is_error
    ]
    frame = pd.DataFrame(rows, columns=["at", "file", "line", "run", "rank", "kind", "text"])
    return frame.astype({"at": "datetime64[ms]"})


def write_parquet(log: Log, folder: Path) -> list[Path]:
    """Write ``decode``, ``prefill``, ``allocations`` and ``errors`` as parquet files; each appears whole or not at all.

    Raises:
        HostError: the folder cannot be written.
    """
    frames = {
        "decode": batches(log, "decode"),
        "prefill": batches(log, "prefill"),
        "allocations": allocations(log),
        "errors": errors(log),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, frame in frames.items():
            path = folder / f"{name}.parquet"
            atomic_write(path, functools.partial(frame.to_parquet, index=False))
            written.append(path)
    except OSError as error:
        raise HostError(f"{folder}: cannot be written: {error.strerror}; choose another --parquet folder") from error
    return written
