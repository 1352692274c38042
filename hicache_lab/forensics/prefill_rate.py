"""The prefill rate of an engine, fitted from its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hicache_lab.base.errors import InputError, UsageError

_LEAST_BATCHES = 4


def prefill_rate_of(log: str | Path) -> tuple[float, str]:
    """Fit the prefill rate from a server log.

    A ``Prefill batch`` line prints the tokens of the batch *before* it over the time since (sglang 0.5.10,
    ``log_prefill_stats``), idle time included. So each line is paired with the batch before it, and the faster half,
    where the engine did not wait for work, is fitted.

    Returns:
        Tokens a second, and how they were found, for a reader of the result.

    Raises:
        InputError: fewer than four usable batches.
    """
    from hicache_lab.forensics.logs.collect import read_log

    columns = read_log(log, columns=True).columns
    rows = columns.columns("prefill") if columns is not None else {}
    if not {"new_token", "input_throughput", "rank", "run"} <= set(rows):
        raise InputError(f"{log}: holds no prefill batches with an input throughput; give --prefill-tokens-per-s")
    mine = rows["rank"] == rows["rank"].min(initial=0)
    tokens = rows["new_token"][mine].astype(np.float64)
    speed, run = rows["input_throughput"][mine].astype(np.float64), rows["run"][mine]
    usable = (tokens[:-1] > 0) & (speed[1:] > 0) & (run[1:] == run[:-1])
    before, after = tokens[:-1][usable], speed[1:][usable]
    if before.size < _LEAST_BATCHES:
        raise InputError(f"{log}: {before.size} usable prefill batches, at least {_LEAST_BATCHES} are needed for a fit")
    busy = after >= np.median(after)
    rate = fit_tokens_per_s(before[busy].tolist(), (before[busy] / after[busy]).tolist())
    return rate, f"prefill rate fitted from {int(busy.sum())} batches of {Path(log).name}"


def fit_tokens_per_s(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Throughput that explains measured (tokens, seconds) pairs best: least squares through the origin.

    Raises:
        UsageError: fewer than two usable pairs.
    """
    done, took = np.asarray(tokens, np.float64), np.asarray(seconds, np.float64)
    usable = (done > 0) & (took > 0)
    if usable.sum() < 2:
        raise UsageError("fitting a rate: expected at least two prefills with tokens and seconds")
    return float((done[usable] ** 2).sum() / (done[usable] * took[usable]).sum())
