"""``curve``: the hit rate at every cache size, and what host tiers of several sizes buy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import format_gb
from hicache_lab.cli import traffic
from hicache_lab.cli.options import add_facts, positive, positive_float, several
from hicache_lab.preflight.ask import HOST_FACTS
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.traffic.cachesim import (
    HitCurve,
    SampledCurve,
    concurrent_requests,
    hit_curve,
    sampled_curve,
    tier_rates,
)
from hicache_lab.traffic.cost_benefit import CostBenefit
from hicache_lab.traffic.traces import Trace, format_of
from hicache_lab.traffic.traces.reader import on_disk, stream_name
from hicache_lab.views.cells.traffic import capacities, curve_record, trace_record

_NOTHING = 0.0005  # a hit rate that rounds to 0.0 %
# what says something of a host tier, which stands behind a device pool
_TIER_OPTIONS = ("host_tokens", "ratios", "sizes_gb", "model", "mean_resident_tokens", *HOST_FACTS, "overhead")
_RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def add_arguments(_command: str, parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    traffic.add_inputs(parser)
    parser.add_argument("--count", choices=("tokens", "blocks"), default="tokens", help="what the curve counts")
    parser.add_argument("--warm-up", type=float, default=0.0, metavar="SHARE", help="requests not counted, 0 … 1")
    parser.add_argument("--sample", type=float, metavar="RATE", help="estimate from a share of the blocks")
    parser.add_argument("--points", type=positive, default=20, metavar="N", help="sizes printed")
    parser.add_argument(
        "--ratios",
        type=several(positive_float),
        default=(),
        metavar="R[,R…]",
        help="--hicache-ratio values",
    )
    parser.add_argument(
        "--sizes-gb", type=several(positive), default=(), metavar="N[,N…]", help="--hicache-size values"
    )
    add_facts(parser, (*HOST_FACTS, "overhead"))
    parser.add_argument(
        "--mean-resident-tokens", type=positive_float, metavar="N", help="tokens a running request holds"
    )
    traffic.add_server_flags(parser)


def run(_command: str, args: argparse.Namespace) -> int:
    """Print the curve; with a device pool, the host tiers behind it."""
    config, read = traffic.launch_of(args), traffic.reading_of(args)
    if args.sample is not None:
        return _sampled(args, read)
    if not 0 <= args.warm_up < 1:
        raise UsageError(f"--warm-up: expected a share of at least 0 and below 1, got {args.warm_up}")
    traffic.lru_only(config, "curve is exact for lru", "simulate replays the others")
    tiered = any(getattr(args, name) for name in _TIER_OPTIONS) or config.hicache_ratio or config.hicache_size
    if not args.device_tokens and tiered:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it; a host tier is behind it")
    trace = read()
    trace.require_prefixes("a hit-rate curve")
    warm = int(trace.requests * args.warm_up)
    curve = hit_curve(trace, count=args.count, count_from=warm)
    record: dict[str, Any] = {
        "trace": trace_record(trace),
        "warnings": traffic.cautions(config),
        **curve_record(curve, args.points),
    }
    if args.device_tokens:
        in_tokens = curve if args.count == "tokens" else hit_curve(trace, count="tokens", count_from=warm)
        record["tiers"] = _tiers(args, config, trace, in_tokens)
    if args.mean_resident_tokens:
        record["concurrent_requests"] = concurrent_requests(args.device_tokens, args.mean_resident_tokens)
    print(json.dumps(record, indent=2) if args.json else _curve_text(record))
    return 0


def _sampled(args: argparse.Namespace, read: partial[Trace]) -> int:
    for name in ("device_tokens", *_TIER_OPTIONS, "warm_up"):
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')}: --sample estimates the curve alone, in blocks; leave --sample out "
                "(below 10⁸ blocks the exact curve takes seconds)"
            )
    curve = _sampled_curve(args, read)
    top = max(len(one) for one in curve.hits) / curve.rate
    record = {
        "provenance": curve.basis,
        "count": "blocks",
        "references": curve.references,
        "skipped": curve.skipped,
        "sample": curve.rate,
        "head_requests": curve.head_requests,
        "head_error_mean": curve.head_error_mean,
        "head_error_max": curve.head_error_max,
        "curve": [
            {
                "capacity_tokens": int(size) * curve.block_tokens,
                "hit_rate": float(curve.rate_at(size)),
                "spread": float(curve.spread_at(size)),
            }
            for size in capacities(top, args.points, curve.smallest_blocks)
        ],
    }
    if args.json:
        print(json.dumps(record, indent=2))
        return 0
    print(f"{curve.origin}: {curve.references:,} block references, sampled at {curve.rate:g} ({curve.basis})")
    for reason, count in curve.skipped.items():
        print(f"  left out: {count} × {reason}")
    print(
        f"  measured error on the first {curve.head_requests:,} requests: mean {100 * curve.head_error_mean:.2f}, "
        f"largest {100 * curve.head_error_max:.2f} points; "
        "hit rates of blocks, ± between samples"
    )
    points: Any = record["curve"]
    for point in points:
        print(f"  {point['capacity_tokens']:>15,} tokens  {point['hit_rate']:7.2%} ± {point['spread']:.2%}")
    return 0


def _sampled_curve(args: argparse.Namespace, read: partial[Trace]) -> SampledCurve:
    """The estimate; a file of a format that can be is read as a stream, anything else is loaded."""
    if not args.trace:
        return sampled_curve(read(), args.sample)
    named = Path(args.trace)
    with on_disk(named) as path:
        if not format_of(path, args.format).streamed:
            return sampled_curve(read.func(path, **read.keywords), args.sample)
        curve = sampled_curve(path, args.sample, block_tokens=args.block_tokens, skip_bad=args.skip_bad_lines)
        return curve if path == named else replace(curve, origin=f"measured: {stream_name(named)}")


def _tiers(args: argparse.Namespace, config: LaunchConfig, trace: Trace, curve: HitCurve) -> dict[str, Any]:
    """Hit rates of prompt tokens for several host tiers; with a model also their bytes and verdicts."""
    policy, question = traffic.policy_of(args, config), traffic.question_of(args, config)
    speeds = traffic.rates(args, question)
    case = CostBenefit(trace, curve, question, policy, speeds) if question is not None else None
    ratios, sizes_gb = args.ratios, args.sizes_gb
    if config.hicache_size:
        sizes_gb = (*sizes_gb, int(config.hicache_size))
    elif config.hicache_ratio:
        ratios = (*ratios, config.hicache_ratio)
    if case is None and sizes_gb:
        name = "--sizes-gb" if args.sizes_gb else "--hicache-size"
        raise UsageError(f"{name} needs --model: without it no tokens are known for the bytes")
    if not (ratios or sizes_gb or (case is None and args.host_tokens)):
        ratios = _RATIOS
    tiers = case.tiers(ratios, sizes_gb) if case else ()
    by_tokens = {tier.tokens: tier for tier in tiers}
    steps = dict(zip(by_tokens, case.rate_per_gb(tiers) if case else (), strict=True))
    device_rate = float(curve.rate_at_tokens(args.device_tokens))
    rows = []
    # without a model no flag's bytes are known, only what a ratio holds
    compared = by_tokens if case else [int(args.device_tokens * ratio) for ratio in ratios]
    for size in sorted({*args.host_tokens, *compared}):
        rate = float(tier_rates(curve, args.device_tokens, size, policy))
        row = {
            "host_tokens": size,
            "ratio": size / args.device_tokens,
            "hit_rate": rate,
            "host_hit_rate": rate - device_rate,
        }
        if size in by_tokens:
            row |= {key: value for key, value in asdict(by_tokens[size]).items() if key not in ("tokens", "ratio")}
            row["hit_rate_per_extra_host_gb"] = steps[size]
        saved = case.savings(size) if case else None
        rows.append(row | (asdict(saved) if saved else {}))
    knee = case.knee(tiers) if case else None
    return {
        "device_tokens": args.device_tokens,
        "write_policy": str(policy),
        "device_hit_rate": device_rate,
        "sizes": rows,
        "largest_safe": asdict(case.safe) if case and case.safe else None,
        "knee": knee.label if knee else None,
        "rates": asdict(speeds) if speeds else None,
    }


def _curve_text(record: dict[str, Any]) -> str:
    lines = traffic.trace_text(record["trace"])
    lines += [f"  warning: {text}" for text in record["warnings"]]
    lines.append(
        f"  an unlimited cache hits {record['ceiling']:.2%} of {record['count']}; more than "
        f"{record['largest_useful_tokens']:,} tokens bring nothing ({record['provenance']}, exact block LRU)"
    )
    tiers = record.get("tiers")
    if tiers is None:
        lines += [f"  {point['capacity_tokens']:>15,} tokens  {point['hit_rate']:7.2%}" for point in record["curve"]]
        return "\n".join(lines)
    lines.append(
        f"  device tier, {tiers['device_tokens']:,} tokens: {tiers['device_hit_rate']:.2%}; "
        f"with a host tier under {tiers['write_policy']}:"
    )
    for row in tiers["sizes"]:
        lines.append(_tier_text(row))
    if tiers["knee"] is None and any("host_bytes" in row for row in tiers["sizes"]):
        flat = tiers["sizes"][-1]["hit_rate"] - tiers["sizes"][0]["hit_rate"] < _NOTHING
        bent = "these settings all do the same" if flat else "a further byte buys at least what the average byte did"
        lines.append(f"  no knee up to there: {bent}")
    if tiers["knee"]:
        lines.append(f"  knee: {tiers['knee']} (beyond it an extra byte buys less than the average byte here)")
    if tiers["largest_safe"]:
        safe = tiers["largest_safe"]
        lines.append(f"  largest safe: {safe['label']} → {format_gb(safe['allocated_host_bytes'])} on the host")
    if "concurrent_requests" in record:
        lines.append(
            f"  running at once: {record['concurrent_requests']} requests, with any host tier (device pool only)"
        )
    return "\n".join(lines)


def _tier_text(row: dict[str, Any]) -> str:
    text = f"  {row['host_tokens']:>13,} tokens (ratio {row['ratio']:5.2f})"
    text += f"  {row['hit_rate']:7.2%}  +{row['host_hit_rate']:.2%}"
    if "host_bytes" in row:
        text += f"  {row['label']:<22} {format_gb(row['allocated_host_bytes'])} on the host, {row['verdict']}"
    if row.get("hit_rate_per_extra_host_gb") is not None:
        text += f", {100 * row['hit_rate_per_extra_host_gb']:.3f} points per extra GB"
    if "ttft_saved_mean_s" in row:
        hourly = row["saved_tokens_per_hour"]
        saved = f"{hourly:,.0f} prefill tokens/h" if hourly is not None else f"{row['saved_tokens']:,} prefill tokens"
        text += f"; saves {saved}, TTFT {1000 * row['ttft_saved_mean_s']:.0f} ms on average"
    return text
