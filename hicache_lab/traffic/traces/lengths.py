"""Traces that record lengths only: Azure and BurstGPT CSV, and bench_serving's result file.

They say how long prompts are and when they came, not which of them share a prefix: no hit rate follows from them.
"""

from __future__ import annotations

import csv
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.traffic.traces import files
from hicache_lab.traffic.traces.files import Skips
from hicache_lab.traffic.traces.times import arrivals, seconds
from hicache_lab.traffic.traces.trace import MOST_EXACT, Trace

_NAMES = {
    # column → the names that published traces give it (lower case)
    "time": ("timestamp", "time", "arrival_time"),
    "input": ("contexttokens", "request tokens", "input_tokens", "input_length", "prompt_tokens"),
    "output": ("generatedtokens", "response tokens", "output_tokens", "output_length", "completion_tokens"),
}
LENGTHS_NOTE = "lengths only: no prefix information in this format"


_HEADER_CHARACTERS = 4096


def looks_like_lengths(header: str) -> bool:
    """Whether a first line is the header of such a CSV, its lines ending as they may."""
    columns = _columns(_fields(header[:_HEADER_CHARACTERS].partition("\r")[0]))
    return columns["input"] >= 0 and columns["output"] >= 0


def _fields(line: str) -> list[str]:
    """The fields of one line of CSV.

    Raises:
        ValueError: a field of more than 131,072 characters, or a carriage return in the middle.
    """
    try:
        return next(csv.reader([line]), [])
    except csv.Error as error:
        cure = "; its lines end in CR alone: tr '\\r' '\\n' < FILE > NEW" if "\r" in line.rstrip() else ""
        raise ValueError(f"not a line of CSV ({error}{cure})") from None


def _columns(header: list[str]) -> dict[str, int]:
    """Where time, input and output stand; -1: in no column."""
    names = [name.strip().lower() for name in header]
    return {
        column: next((names.index(name) for name in known if name in names), -1) for column, known in _NAMES.items()
    }


def read_lengths_csv(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a CSV with a prompt and an output length a line (Azure 2023/2024, BurstGPT and alike)."""
    lines = files.lines(path)
    first, text = next(lines, (1, ""))
    try:
        header = _fields(text)
    except ValueError as error:
        raise InputError(f"{path}:{first}: {error}") from None
    place = _columns(header)
    if place["input"] < 0 or place["output"] < 0:
        raise InputError(
            f"{path}:{first}: expected columns such as ContextTokens and GeneratedTokens, got {', '.join(header)}"
        )
    inputs: list[int] = []
    outputs: list[int] = []
    times: list[float | None] = []
    skips = Skips(skip_bad)
    for number, line in lines:
        try:
            row = _fields(line)
            tokens = _length(row[place["input"]]), _length(row[place["output"]])
            stamp = seconds(row[place["time"]]) if place["time"] >= 0 else None
        except (ValueError, IndexError) as error:
            reason = "a column is missing" if isinstance(error, IndexError) else str(error)
            skips.bad("line", f"{path}:{number}", f"expected whole numbers of tokens ({reason})")
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
    skips = Skips(skip_bad)
    runs = 0
    for number, line in files.lines(path):
        try:
            asked, answered = _lengths_of_run(line)
        except ValueError as error:
            skips.bad("line", f"{path}:{number}", error)
            continue
        inputs += asked
        outputs += answered
        runs += 1
    if not inputs:
        raise InputError(f"{path}: holds no request")
    notes = (LENGTHS_NOTE, *((f"{runs} runs, one after the other",) if runs > 1 else ()))
    return Trace.lengths_only(inputs, outputs, origin=f"measured: {path.name}", skipped=skips.counts, notes=notes)


def _lengths_of_run(line: str) -> tuple[list[int], list[int]]:
    record = files.decode_json(line)
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
