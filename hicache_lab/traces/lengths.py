"""Traces that record lengths only: Azure and BurstGPT CSV, and bench_serving's result file.

They say how long prompts are and when they came, not which of them share a prefix: no hit rate follows from them.
"""

from __future__ import annotations

import csv
import json
from datetime import datetime
from pathlib import Path

import numpy as np

from hicache_lab.errors import InputError
from hicache_lab.traces import files
from hicache_lab.traces.hashed import Skips
from hicache_lab.traces.trace import Trace

_NAMES = {
    # column → the names that published traces give it (lower case)
    "time": ("timestamp", "time", "arrival_time"),
    "input": ("contexttokens", "request tokens", "input_tokens", "input_length", "prompt_tokens"),
    "output": ("generatedtokens", "response tokens", "output_tokens", "output_length", "completion_tokens"),
}
LENGTHS_NOTE = "lengths only: no prefix information in this format"


def looks_like_lengths(header: str) -> bool:
    """Whether a first line is the header of such a CSV."""
    columns = [column.strip().lower() for column in header.lstrip("\ufeff").split(",")]
    return all(any(name in columns for name in _NAMES[wanted]) for wanted in ("input", "output"))


def read_lengths_csv(path: Path, *, skip_bad: bool = False) -> Trace:
    """Read a CSV with a prompt and an output length a line (Azure 2023/2024, BurstGPT and alike)."""
    rows = ((number, next(csv.reader([line]))) for number, line in files.lines(path))
    _, header = next(rows, (0, [""]))
    columns = [column.strip().lower() for column in header]
    columns[0] = columns[0].lstrip("\ufeff")
    place = {
        wanted: next((columns.index(name) for name in names if name in columns), -1) for wanted, names in _NAMES.items()
    }
    if place["input"] < 0 or place["output"] < 0:
        raise InputError(
            f"{path}:1: expected columns such as ContextTokens and GeneratedTokens, got {', '.join(header)}"
        )
    inputs, outputs, times = [], [], []
    skips = Skips()
    for number, row in rows:
        try:
            tokens = int(row[place["input"]]), int(row[place["output"]])
            stamp = _seconds(row[place["time"]]) if place["time"] >= 0 else None
            if min(tokens) < 0:
                raise ValueError("a negative length")
        except (ValueError, IndexError) as error:
            if not skip_bad:
                raise InputError(
                    f"{path}:{number}: expected whole numbers of tokens ({error}); fix the line, or leave bad lines "
                    "out with --skip-bad-lines"
                ) from None
            skips.add("bad line", f"{path}:{number}: {error}")
            continue
        inputs.append(tokens[0])
        outputs.append(tokens[1])
        times.append(stamp)
    known = [stamp for stamp in times if stamp is not None]
    return Trace.lengths_only(
        inputs,
        outputs,
        arrival_s=np.array(known) - known[0] if known and len(known) == len(inputs) else None,
        origin=f"measured: {path.name}",
        skipped=skips.counts,
        notes=(LENGTHS_NOTE,),
    )


def read_bench_serving(path: Path) -> Trace:
    """Read ``input_lens`` and ``output_lens`` of bench_serving's result file (written with ``--output-details``)."""
    inputs: list[int] = []
    outputs: list[int] = []
    runs = 0
    for number, line in files.lines(path):
        record = json.loads(line)
        lens = record.get("input_lens"), record.get("output_lens")
        if not all(isinstance(values, list) for values in lens):
            raise InputError(
                f"{path}:{number}: a bench_serving summary without input_lens; run it with --output-details, "
                "and log the server's requests (--log-requests --log-requests-level 3) for prefix information"
            )
        inputs += [int(value) for value in lens[0]]
        outputs += [int(value) for value in lens[1]]
        runs += 1
    notes = (LENGTHS_NOTE, *((f"{runs} runs, one after the other",) if runs > 1 else ()))
    return Trace.lengths_only(inputs, outputs, origin=f"measured: {path.name}", notes=notes)


def refuse_bench_multiturn(path: Path) -> InputError:
    """bench_multiturn writes averages, no requests; its workload can be described instead."""
    return InputError(
        f"{path}: bench_multiturn's result file holds averages, no requests; describe the same workload instead: "
        "--generate bench_multiturn --param clients=… --param rounds=… --param request_tokens=… --param output_tokens=…"
    )


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    # Azure stamps carry seven decimals; Python reads six
    head, _, fraction = text.strip().partition(".")
    try:
        return datetime.fromisoformat(head).timestamp() + (float(f"0.{fraction[:9]}") if fraction.isdigit() else 0.0)
    except ValueError:
        return None
