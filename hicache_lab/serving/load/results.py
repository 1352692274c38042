"""What a load measured: one record a request, the server's counters over time, and what they add up to."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_lab.base.errors import HostError, InputError
from hicache_lab.base.files import atomic_write
from hicache_lab.serving.load.pace import Lag

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
Record = TypeVar("Record")


@dataclass(frozen=True)
class RequestRecord:
    """One request, measured at the client; token counts are the server's.

    Attributes:
        index: in sending order from 1; warm-up requests count down from -1.
        phase, session, turn: its place in the plan.
        warmup: sent before measuring; in no summary.
        due_s: when it should have been sent (open loop), after the start; None in a closed loop.
        sent_s: when it was, after the start.
        ttft_s: sent until the first token.
        itl_s: gaps between tokens.
        e2e_s: sent until the last byte.
        prompt_tokens, completion_tokens: as the server counts; None if it did not get to tell.
        cached_tokens: prompt tokens found in a cache, None if not told.
        cached_device, cached_host, cached_storage: by tier, None if not told.
        output_ids: the answer's ids where the endpoint gives them.
        error: why it failed, or None.
    """

    index: int
    phase: str
    session: int
    turn: int
    warmup: bool
    due_s: float | None
    sent_s: float
    ttft_s: float | None = None
    itl_s: tuple[float, ...] = ()
    e2e_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cached_device: int | None = None
    cached_host: int | None = None
    cached_storage: int | None = None
    output_ids: tuple[int, ...] = ()
    error: str | None = None

    @property
    def end_s(self) -> float | None:
        """When its last byte came, after the start."""
        return None if self.e2e_s is None else self.sent_s + self.e2e_s


@dataclass(frozen=True)
class ServerSample:
    """The server's counters at one moment; counters are since its start and counted once over ranks.

    Attributes:
        at_s: after the load's start.
        host_used_tokens: in the host pool of one rank.
        device_used_share: of the device pool, 0 to 1.
        running, waiting: requests.
        cached_device, cached_host, cached_storage: prompt tokens found there so far.
        prompt_tokens: prompt tokens so far.
        evicted_tokens: pushed off the device so far.
        loaded_back_tokens: copied from host to device so far.
        missing: why there are no numbers (metrics vanished, server gone), or None.
    """

    at_s: float
    host_used_tokens: int | None = None
    device_used_share: float | None = None
    running: int | None = None
    waiting: int | None = None
    cached_device: int | None = None
    cached_host: int | None = None
    cached_storage: int | None = None
    prompt_tokens: int | None = None
    evicted_tokens: int | None = None
    loaded_back_tokens: int | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of one latency in seconds; ``count`` 0 leaves the others None."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Percentiles by nearest rank: each is a value that was measured."""
        ordered = sorted(values)
        if not ordered:
            return cls(0, None, None, None, None, None, None)

        def at(share: float) -> float:
            return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

        mean = math.fsum(ordered) / len(ordered)
        return cls(len(ordered), mean, at(0.5), at(0.9), at(0.95), at(0.99), ordered[-1])


@dataclass(frozen=True)
class Hits:
    """Where prompt tokens were found; the parts are None where the server does not tell the tier."""

    prompt_tokens: int
    cached_tokens: int | None
    device: int | None
    host: int | None
    storage: int | None

    @property
    def share(self) -> float | None:
        """Cached over all prompt tokens."""
        if self.cached_tokens is None or not self.prompt_tokens:
            return None
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True)
class LoadResult:
    """A finished, stopped or broken load.

    Attributes:
        plan, seed, parameters: what was sent.
        base_url: where to.
        records: every request sent, warm-up first.
        samples: the server's counters over time.
        started_unix_s: when measuring began.
        duration_s: from then to the end.
        ended: ``complete``, ``duration``, ``cap: …``, ``interrupted`` or ``gave up: …``.
        lag: how late the client ran.
        notes: what a reader must know: a busy machine, metrics that vanished, a server that was restarted.
    """

    plan: str
    seed: int
    parameters: dict[str, Any]
    base_url: str
    records: tuple[RequestRecord, ...]
    samples: tuple[ServerSample, ...]
    started_unix_s: float
    duration_s: float
    ended: str
    lag: Lag
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[RequestRecord, ...]:
        """Requests after the warm-up."""
        return tuple(record for record in self.records if not record.warmup)

    @property
    def succeeded(self) -> tuple[RequestRecord, ...]:
        """Measured requests that were answered to the end."""
        return tuple(record for record in self.measured if record.error is None)

    @property
    def requests_per_s(self) -> float:
        """Answered requests over the time from the first measured request to the last byte."""
        return len(self.succeeded) / self._busy_s if self.succeeded else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Answer tokens over the same time."""
        tokens = sum(record.completion_tokens or 0 for record in self.succeeded)
        return tokens / self._busy_s if self.succeeded else 0.0

    @property
    def _busy_s(self) -> float:
        ends = [record.end_s for record in self.succeeded if record.end_s is not None]
        return max(max(ends) - min(record.sent_s for record in self.measured), 1e-9)

    @property
    def ttft(self) -> Spread:
        """Time to first token."""
        return Spread.of(r.ttft_s for r in self.succeeded if r.ttft_s is not None)

    @property
    def itl(self) -> Spread:
        """Inter-token times, every gap of every request."""
        return Spread.of(gap for record in self.succeeded for gap in record.itl_s)

    @property
    def e2e(self) -> Spread:
        """End-to-end latency."""
        return Spread.of(r.e2e_s for r in self.succeeded if r.e2e_s is not None)

    def hits(self, phase: str | None = None) -> Hits:
        """Prompt tokens by the tier they were found in, of all phases or one."""
        chosen = [r for r in self.succeeded if phase is None or r.phase == phase]

        def total(name: str) -> int | None:
            known = [value for record in chosen if (value := getattr(record, name)) is not None]
            return sum(known) if known else None

        tiers = [total(name) for name in ("cached_tokens", "cached_device", "cached_host", "cached_storage")]
        return Hits(sum(r.prompt_tokens or 0 for r in chosen), *tiers)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the records and samples, JSON-ready."""
        hits = self.hits()
        return {
            "schema": SCHEMA_VERSION,
            "plan": self.plan,
            "seed": self.seed,
            "parameters": self.parameters,
            "base_url": self.base_url,
            "started_unix_s": self.started_unix_s,
            "duration_s": self.duration_s,
            "ended": self.ended,
            "lag": asdict(self.lag),
            "notes": list(self.notes),
            "too_busy": self.lag.too_busy,
            "requests": len(self.measured),
            "failed": len(self.measured) - len(self.succeeded),
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "ttft_s": asdict(self.ttft),
            "itl_s": asdict(self.itl),
            "e2e_s": asdict(self.e2e),
            "hits": {**asdict(hits), "share": hits.share},
        }

    def write(self, folder: Path) -> None:
        """Write ``load.json``, ``requests.parquet`` and ``metrics.parquet``, each whole or not at all.

        Raises:
            HostError: the disk is full or the folder cannot be written; what was there before is untouched.
        """
        text = json.dumps(self.as_dict(), indent=1, allow_nan=False)
        requests, samples = table_of(RequestRecord, self.records), table_of(ServerSample, self.samples)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / "requests.parquet", lambda path: requests.to_parquet(path, index=False))
            atomic_write(folder / "metrics.parquet", lambda path: samples.to_parquet(path, index=False))
            atomic_write(folder / "load.json", text)
        except OSError as error:
            reason = error.strerror or str(error)
            raise HostError(f"could not write the load's result into {folder}: {reason}") from error

    @classmethod
    def read(cls, folder: Path) -> LoadResult:
        """Read what ``write`` wrote.

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
            records = records_of(RequestRecord, pd.read_parquet(path))
            path = folder / "metrics.parquet"
            samples = records_of(ServerSample, pd.read_parquet(path))
            path = folder / "load.json"
            names = ("plan", "seed", "parameters", "base_url", "started_unix_s", "duration_s", "ended")
            return cls(
                **{name: data[name] for name in names},
                records=records,
                samples=samples,
                lag=Lag(**data["lag"]),
                notes=tuple(data["notes"]),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: expected a load's result as this package writes it; {error}") from error


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
