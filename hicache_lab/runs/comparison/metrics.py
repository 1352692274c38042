"""What is compared: names, titles, units and which way is better; and the names other load generators use.

A figure that a notebook records under a name that is not here is compared too, without a judgement on its direction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_LATENCY = re.compile(r"(?:^|_)(?:ttft|itl|tpot|e2e)_(?:\w+_)?m?s$")
_HIT_SHARE = re.compile(r"(?:hit|cached)_(?:share|rate|ratio)$")

Direction = Literal["higher", "lower", ""]
"""Which way is better; empty: neither (bytes of a tier are a price, not a merit)."""


@dataclass(frozen=True)
class Metric:
    """A known figure."""

    title: str
    unit: str
    better: Direction


_PARTS = ("mean", "p50", "p75", "p90", "p95", "p99", "max")
_LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end-to-end latency",
}

KNOWN: Mapping[str, Metric] = {
    "output_tokens_per_s": Metric("output throughput", "tokens/s", "higher"),
    "input_tokens_per_s": Metric("input throughput", "tokens/s", "higher"),
    "total_tokens_per_s": Metric("total throughput", "tokens/s", "higher"),
    "requests_per_s": Metric("request throughput", "requests/s", "higher"),
    **{
        f"{name}_{part}_ms": Metric(f"{title}, {part}", "ms", "lower")
        for name, title in _LATENCIES.items()
        for part in _PARTS
    },
    "hit_share": Metric("prompt tokens found in a cache", "share of prompt tokens", "higher"),
    "device_hit_tokens": Metric("prompt tokens found on the device", "tokens", ""),
    "host_hit_tokens": Metric("prompt tokens found on the host", "tokens", ""),
    "storage_hit_tokens": Metric("prompt tokens found in storage", "tokens", ""),
    "failed_requests": Metric("failed requests", "requests", "lower"),
    "completed_requests": Metric("completed requests", "requests", ""),
    "duration_s": Metric("duration", "s", ""),
    "host_gb": Metric("host memory of all ranks", "GB", ""),
    "per_rank_gb": Metric("host memory of one rank", "GB per rank", ""),
    "concurrency": Metric("requests in flight, mean", "requests", ""),
    "accept_length": Metric("accepted draft tokens a step", "tokens", "higher"),
}

OBJECTIVES = ("output_tokens_per_s", "hit_share", "requests_per_s", "ttft_p50_ms", "ttft_mean_ms")
"""What decides, if nothing else is asked for: the first of these that was measured."""

COSTS = ("host_gb", "per_rank_gb")
"""What a setting takes from the host: the first of these that is known."""

# sglang.bench_serving, the JSON line it appends to --output-file (0.4.4 to 0.5.23: python/sglang/bench_serving.py)
BENCH_SERVING: Mapping[str, str] = {
    "request_throughput": "requests_per_s",
    "input_throughput": "input_tokens_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_throughput": "total_tokens_per_s",
    "duration": "duration_s",
    "completed": "completed_requests",
    "concurrency": "concurrency",
    "accept_length": "accept_length",
    **{
        f"{theirs}_{field}_ms": f"{ours}_{part}_ms"
        for field, ours in (
            ("ttft", "ttft"), ("itl", "itl"), ("tpot", "tpot"), ("e2e_latency", "e2e"),
        )
        for theirs, part in (
            ("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p95", "p95"), ("p99", "p99"), ("max", "max"),
        )
    },
}  # fmt: skip

# aiperf, profile_export_aiperf.json: {tag: {"unit": …, "avg": …, "p50": …}}
AIPERF: Mapping[str, tuple[str, str]] = {
    "request_throughput": ("requests_per_s", "requests/sec"),
    "output_token_throughput": ("output_tokens_per_s", "tokens/sec"),
    "total_token_throughput": ("total_tokens_per_s", "tokens/sec"),
    "request_count": ("completed_requests", "requests"),
    "error_request_count": ("failed_requests", "requests"),
    "benchmark_duration": ("duration_s", "sec"),
}
AIPERF_LATENCIES: Mapping[str, str] = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "itl",
    "request_latency": "e2e",
}
# each of its latency records has these; its inter_token_latency is a mean per request, not a gap
AIPERF_PARTS: Mapping[str, str] = {"avg": "mean", **{part: part for part in _PARTS if part != "mean"}}


def metric(name: str, unit: str = "") -> Metric:
    """A known figure, or one that is described by its name: a latency is better low, a rate or a hit share high."""
    if name in KNOWN:
        return KNOWN[name]
    better: Direction = "higher" if name.endswith("_per_s") or _HIT_SHARE.search(name) else ""
    return Metric(name.replace("_", " "), unit, "lower" if _LATENCY.search(name) else better)
