"""Traces that record lengths only: Azure and BurstGPT CSV, and bench_serving's result file.

They say how long prompts are and when they came, not which of them share a prefix: no hit rate follows from them.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.hashed import Skips
from hicache_lab.traffic.traces.times import arrivals, seconds
from hicache_lab.traffic.traces.trace import MOST_EXACT, Trace

_NAMES = {
    # column → the names that published traces give it (lower case)
    "time": ("timestamp", "time", "arrival_time"),
    "input": ("contexttokens", "request tokens", "input_tokens", "input_length", "prompt_tokens"),
    "output": ("generatedtokens", "response tokens", "output_tokens", "output_length", "completion_tokens"),
}
LENGTHS_NOTE = "lengths only: no prefix information in this format"


def looks_like_lengths(header: str) -> bool:
    """Whether a first line is the header of such a CSV."""
    columns = [column.strip().lower() for column in next(csv.reader([header]), [])]
    return all(any(name in columns for name in _NAMES[wanted]) for wanted in ("input", "output"))


def read_lengths_csv(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a CSV with a prompt and an output length a line (Azure 2023/2024, BurstGPT and alike)."""
    rows = ((number, next(csv.reader([line]))) for number, line in files.lines(path))
    _, header = next(rows, (0, [""]))
    columns = [column.strip().lower() for column in header]
    place = {
        wanted: next((columns.index(name) for name in names if name in columns), -1) for wanted, names in _NAMES.items()
    }
    if place["input"] < 0 or place["output"] < 0:
        raise InputError(
            f"{path}:1: expected columns such as ContextTokens and GeneratedTokens, got {', '.join(header)}"
        )
    inputs: list[int] = []
    outputs: list[int] = []
    times: list[float | None] = []
    skips = Skips()
    for number, row in rows:
        try:
            tokens = _length(row[place["input"]]), _length(row[place["output"]])
            stamp = seconds(row[place["time"]]) if place["time"] >= 0 else None
        except (ValueError, IndexError) as error:
            reason = "a column is missing" if isinstance(error, IndexError) else str(error)
            if not skip_bad:
                raise InputError(
                    f"{path}:{number}: expected whole numbers of tokens ({reason}); fix the line, or leave bad lines "
                    "out with --skip-bad-lines"
                ) from None
            skips.add("bad line", f"{path}:{number}: {reason}")
            continue
        inputs.append(tokens[0])
        outputs.append(tokens[1])
        times.append(stamp)
    if not inputs:
        raise InputError(f"{path}: holds no request")
    arrival_s, notes = arrivals(times)
    return Trace.lengths_only(
        inputs,
        outputs,
        arrival_s=arrival_s,
        origin=f"measured: {path.name}",
        skipped=skips.counts,
        notes=(LENGTHS_NOTE, *notes),
    )


def _length(value: object) -> int:
    """A whole number of tokens; "374.0" is one, too: pandas writes a column with gaps so."""
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < MOST_EXACT or number != int(number):
        raise ValueError(f"got {value!r}")
    return int(number)


def read_bench_serving(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read ``input_lens`` and ``output_lens`` of bench_serving's result file (written with ``--output-details``)."""
    inputs: list[int] = []
    outputs: list[int] = []
    skips = Skips()
    runs = 0
    for number, line in files.lines(path):
        try:
            asked, answered = _lengths_of_run(line)
        except ValueError as error:
            if not skip_bad:
                raise InputError(f"{path}:{number}: {error}") from None
            skips.add("bad line", f"{path}:{number}: {error}")
            continue
        inputs += asked
        outputs += answered
        runs += 1
    if not inputs:
        raise InputError(f"{path}: holds no request")
    notes = (LENGTHS_NOTE, *((f"{runs} runs, one after the other",) if runs > 1 else ()))
    return Trace.lengths_only(inputs, outputs, origin=f"measured: {path.name}", skipped=skips.counts, notes=notes)


def _lengths_of_run(line: str) -> tuple[list[int], list[int]]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); fix the line, or leave bad lines out with --skip-bad-lines") from None
    lens = [record.get(key) for key in ("input_lens", "output_lens")] if isinstance(record, dict) else []
    lists = [values for values in lens if isinstance(values, list)]
    if len(lists) != 2:
        raise ValueError(
            "a bench_serving summary without input_lens; run it with --output-details, "
            "and log the server's requests (--log-requests --log-requests-level 3) for prefix information"
        )
    try:
        asked, answered = ([_length(value) for value in values] for values in lists)
    except ValueError as error:
        raise ValueError(f"expected input_lens and output_lens as whole numbers of tokens, {error}") from None
    if len(asked) != len(answered):
        raise ValueError(f"{len(asked)} input_lens and {len(answered)} output_lens; the file is damaged")
    return asked, answered


def refuse_bench_multiturn(path: Path) -> InputError:
    """bench_multiturn writes averages, no requests; its workload can be described instead."""
    return InputError(
        f"{path}: bench_multiturn's result file holds averages, no requests; describe the same workload instead: "
        "--generate bench_multiturn --param clients=… --param rounds=… --param request_tokens=… --param output_tokens=…"
    )
