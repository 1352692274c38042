"""Results of other load generators: ``sglang.bench_serving``'s JSON lines and aiperf's aggregated JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.runs import Figure
from hicache_lab.runs.comparison.metrics import AIPERF, AIPERF_LATENCIES, AIPERF_PARTS, BENCH_SERVING, metric
from hicache_lab.runs.comparison.observations import Observation

MAX_BYTES = 1 << 30
_SETTINGS = (
    "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len", "fixed_output_len",
    "random_input_len", "random_output_len", "random_range_ratio", "num_prompts", "tag",
)  # fmt: skip
_MILLISECONDS = {"ms": 1.0, "sec": 1000.0, "s": 1000.0, "us": 0.001, "ns": 1e-6}


def read_results(path: Path) -> tuple[Observation, ...]:
    """The runs in a file of bench_serving (one a line) or aiperf (one).

    Raises:
        InputError: no such file, or neither of the two; the message names the line.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: larger than {MAX_BYTES} bytes; expected results, not a trace")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    document = _json(text)
    throughput = document.get("request_throughput") if isinstance(document, dict) else None
    if isinstance(throughput, dict) and "avg" in throughput and "unit" in throughput:
        return (_aiperf(document, path),)
    observations = []
    for at, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        record = _json(line)
        if not isinstance(record, dict) or not ("request_throughput" in record or "output_throughput" in record):
            raise InputError(
                f"{path}:{at}: expected a result of sglang.bench_serving (a JSON line with request_throughput), "
                "aiperf's profile_export_aiperf.json, or a run or sweep folder"
            )
        observations.append(_bench_serving(record, path, at))
    if not observations:
        raise InputError(f"{path}: no result in it")
    return tuple(observations)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def _bench_serving(record: Mapping[str, Any], path: Path, line: int) -> Observation:
    values = {
        ours: Figure(number, metric(ours).unit, "measured")
        for theirs, ours in BENCH_SERVING.items()
        if (number := _number(record.get(theirs))) is not None
    }
    settings = {name: record[name] for name in _SETTINGS if record.get(name) is not None}
    return Observation("", settings, values, f"{path}:{line}", "bench_serving", path=str(path))


def _aiperf(record: Mapping[str, Any], path: Path) -> Observation:
    values: dict[str, Figure] = {}
    for theirs, (ours, unit) in AIPERF.items():
        entry = record.get(theirs)
        if isinstance(entry, dict) and (number := _number(entry.get("avg"))) is not None:
            if entry.get("unit") not in {unit, unit.replace("sec", "s"), unit.replace("sec", "second")}:
                raise InputError(f"{path}: {theirs}: expected the unit {unit}, got {entry.get('unit')!r}")
            values[ours] = Figure(number, metric(ours).unit, "measured")
    for theirs, ours in AIPERF_LATENCIES.items():
        entry = record.get(theirs)
        if not isinstance(entry, dict):
            continue
        factor = _MILLISECONDS.get(str(entry.get("unit")))
        if factor is None:
            raise InputError(f"{path}: {theirs}: expected a unit of time, got {entry.get('unit')!r}")
        for part, name in AIPERF_PARTS.items():
            if (number := _number(entry.get(part))) is not None:
                values[f"{ours}_{name}_ms"] = Figure(number * factor, "ms", "measured")
    cancelled = {"caution": "the benchmark was cancelled before its end"} if record.get("was_cancelled") else {}
    # the part of its configuration that makes a setting; the rest is not stable over its versions
    config = record.get("input_config")
    config = config if isinstance(config, dict) else {}
    load, endpoint = config.get("loadgen"), config.get("endpoint")
    settings = dict(load) if isinstance(load, dict) else {}
    if isinstance(endpoint, dict) and endpoint.get("model_names"):
        settings["model"] = endpoint["model_names"]
    return Observation("", settings, values, str(path), "aiperf", cancelled, str(path))
