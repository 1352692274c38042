"""``curve`` and ``simulate``: what cache sizes buy on a trace."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hicache_lab.cachesim import (
    EvictionPolicy,
    HitCurve,
    Rates,
    ReplaySettings,
    SampledCurve,
    TierHits,
    WritePolicy,
    concurrent_requests,
    growth,
    hit_curve,
    replay,
    replay_blocks,
    sampled_curve,
    worth,
)
from hicache_lab.errors import UsageError
from hicache_lab.hosttier import HostTier, host_tier, host_tiers, largest_safe
from hicache_lab.launch import LaunchConfig, parse_launch, refusals
from hicache_lab.launch.flags import known_flags
from hicache_lab.preflight import Question, ask
from hicache_lab.releases import rules_for
from hicache_lab.sizing.pages import resolve_page_size
from hicache_lab.traces import FORMATS, GENERATORS, Trace, Workload, load_tokenizer
from hicache_lab.units import GB, format_gb

NEWEST = "0.5.23"
_SHORT_FORMS = ("--tp", "--pp", "--dp", "--ep", "--dcp")
_RATIOS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def add_arguments(command: str, parser: argparse.ArgumentParser) -> None:
    """Options of both commands; SGLang's own flags are taken as the server takes them."""
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="a trace file (plain, gzip or zstandard)")
    parser.add_argument("--generate", metavar="NAME", help=f"instead of a file: {', '.join(GENERATORS)}")
    parser.add_argument("--param", action="append", default=[], metavar="K=V", help="a parameter of --generate")
    parser.add_argument("--format", default="auto", metavar="F", help=f"auto, {', '.join(FORMATS)}")
    parser.add_argument("--block-tokens", type=_whole, metavar="N", help="tokens a block of the trace")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="tokenizer.json for text prompts")
    parser.add_argument("--sessions-at-once", type=_whole, default=8, metavar="N", help="conversations side by side")
    parser.add_argument("--skip-bad-lines", action="store_true", help="count bad records instead of stopping")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    parser.add_argument("--device-tokens", type=_whole, metavar="N", help="max_total_num_tokens, as the server logs it")
    parser.add_argument("--host-tokens", type=_wholes, default=(), metavar="N[,N…]", help="host pool sizes in tokens")
    parser.add_argument("--model", metavar="M", help="sizes the host pool in bytes; a name or a config.json")
    parser.add_argument("--sglang-version", default=NEWEST, metavar="V", help=f"the release (default {NEWEST})")
    parser.add_argument("--prefill-tokens-per-s", type=float, metavar="X", help="prefill rate of the engine")
    parser.add_argument("--load-back-gb-per-s", type=float, metavar="X", help="host to device, GB (1e9)/s of one rank")
    parser.epilog = "SGLang's own flags (--tp-size, --hicache-ratio, --hicache-write-policy, …) are taken as they are."
    if command == "curve":
        parser.add_argument("--count", choices=("tokens", "blocks"), default="tokens", help="what the hit rate counts")
        parser.add_argument("--warm-up", type=float, default=0.0, metavar="SHARE", help="requests not counted, 0 … 1")
        parser.add_argument("--sample", type=float, metavar="RATE", help="estimate from a share of the blocks")
        parser.add_argument("--points", type=_whole, default=20, metavar="N", help="sizes printed")
        parser.add_argument("--ratios", type=_floats, metavar="R[,R…]", help="--hicache-ratio values to compare")
        parser.add_argument("--sizes-gb", type=_wholes, default=(), metavar="N[,N…]", help="--hicache-size values")
        parser.add_argument("--host-ram", metavar="449GB", help="draws the largest safe host tier")
        parser.add_argument("--available", metavar="445GB", help="MemAvailable before the launch")
        parser.add_argument("--overhead", metavar="40GB", help="the server's own host memory besides the pools")
        parser.add_argument("--mean-resident-tokens", type=float, metavar="N", help="tokens a running request holds")
    else:
        parser.add_argument(
            "--rules", choices=("nodes", "blocks"), default="nodes", help="HiCache's rules, or plain LRU"
        )
        parser.add_argument("--concurrency", type=_whole, default=1, metavar="N", help="clients waiting for answers")
        parser.add_argument("--by-request", type=Path, metavar="FILE.csv", help="write cached tokens of every request")
    _add_server_flags(parser)


class _ServerFlag(argparse.Action):
    """Keeps one of SGLang's own options as it was written, for the launch parser."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        kept = [*(getattr(namespace, self.dest, None) or []), str(option_string)]
        given = values if isinstance(values, list) else [] if values is None else [values]
        setattr(namespace, self.dest, kept + [str(value) for value in given])


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Take every option that some release has: only then argparse knows its values from the trace's name."""
    own = {option for action in parser._actions for option in action.option_strings}
    arities = {name: flag.arity for name, flag in known_flags().items()} | dict.fromkeys(_SHORT_FORMS, "1")
    for name, arity in arities.items():
        if name not in own:
            count: str | int | None = {"0": 0, "1": None}.get(arity, arity)
            parser.add_argument(name, action=_ServerFlag, nargs=count, dest="server_flags", help=argparse.SUPPRESS)


def _whole(text: str) -> int:
    return int(text.replace("_", "").replace(",", ""))


def _wholes(text: str) -> tuple[int, ...]:
    return tuple(int(part.replace("_", "")) for part in text.split(",") if part)


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part)


def run(command: str, args: argparse.Namespace) -> int:
    """Answer one of the two commands."""
    config = _config(args)
    workload = _workload(args)
    return _simulate(args, config, workload) if command == "simulate" else _curve(args, config, workload)


# ---- what is asked ----


def _workload(args: argparse.Namespace) -> Workload:
    parameters = {}
    for pair in args.param:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--param: expected K=V, got {pair!r}")
        parameters[key] = value
    if parameters and not args.generate:
        raise UsageError("--param belongs to --generate")
    if args.generate:
        if args.block_tokens is not None:
            parameters["block_tokens"] = str(args.block_tokens)
        if args.trace:
            raise UsageError(f"give a trace file or --generate, not both ({args.trace}, {args.generate})")
        return Workload(generator=args.generate, parameters=tuple(parameters.items()))
    if not args.trace:
        raise UsageError("expected a TRACE file, or --generate NAME; see hicache-lab curve --help")
    reading = {
        "format": args.format,
        "block_tokens": args.block_tokens,
        "tokenizer": load_tokenizer(args.tokenizer) if args.tokenizer else None,
        "sessions_at_once": args.sessions_at_once,
        "skip_bad": args.skip_bad_lines,
    }
    return Workload(path=args.trace, reading=tuple(reading.items()))


def _config(args: argparse.Namespace) -> LaunchConfig:
    line = ["python", "-m", "sglang.launch_server", "--model-path", args.model or "unnamed", *(args.server_flags or [])]
    config = parse_launch(line)
    for refused in refusals(config, args.sglang_version):
        raise UsageError(refused.message)
    return config


def _question(args: argparse.Namespace, config: LaunchConfig, **facts: Any) -> Question | None:
    if not args.model:
        stated = [name for name, value in facts.items() if value is not None]
        if stated:
            raise UsageError(f"--{stated[0].replace('_', '-')} needs --model: without it no bytes are known")
        return None
    if not args.device_tokens:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it; --model needs it for sizes")
    from dataclasses import replace

    given = {name: value for name, value in facts.items() if value is not None}
    sized = replace(config, enable_hierarchical_cache=True, source=None)
    return ask(args.model, args.sglang_version, config=sized, device_tokens=args.device_tokens, **given)


def _policy(args: argparse.Namespace, config: LaunchConfig) -> WritePolicy:
    default = rules_for(args.sglang_version).default_write_policy or "write_through"
    return WritePolicy.parse(config.hicache_write_policy or default)


def _rates(args: argparse.Namespace, tier: HostTier | None) -> Rates | None:
    given = args.prefill_tokens_per_s, args.load_back_gb_per_s
    if given == (None, None):
        return None
    if None in given or tier is None:
        raise UsageError(
            "time saved needs --prefill-tokens-per-s, --load-back-gb-per-s and --model (for the bytes of a token)"
        )
    return Rates(given[0], given[1] * GB, max(round(tier.per_rank_bytes / tier.tokens), 1))


# ---- curve ----


def _curve(args: argparse.Namespace, config: LaunchConfig, workload: Workload) -> int:
    if args.sample is not None:
        return _sampled(args, workload)
    if not 0 <= args.warm_up < 1:
        raise UsageError(f"--warm-up: expected a share of at least 0 and below 1, got {args.warm_up}")
    trace = workload.load()
    trace.require_prefixes("a hit-rate curve")
    curve = hit_curve(trace, count=args.count, count_from=int(trace.requests * args.warm_up))
    top = max(curve.largest_useful_blocks, 1)
    sizes = np.unique(np.geomspace(1, top, max(args.points, 2)).round().astype(np.int64))
    record: dict[str, Any] = {
        "provenance": curve.basis,
        "trace": trace_record(trace),
        "count": curve.count,
        "requests_counted": curve.requests,
        "ceiling": curve.ceiling,
        "largest_useful_tokens": curve.largest_useful_blocks * curve.block_tokens,
        "curve": [
            {"capacity_tokens": int(size) * curve.block_tokens, "hit_rate": float(curve.rate_at(size))}
            for size in sizes
        ],
    }
    behind = args.host_tokens or args.ratios or args.sizes_gb or args.model or args.host_ram
    if not args.device_tokens and behind:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it; a host tier is behind it")
    if args.device_tokens:
        record["tiers"] = _tiers(args, config, trace, curve)
    if args.mean_resident_tokens:
        if not args.device_tokens:
            raise UsageError("--mean-resident-tokens needs --device-tokens")
        record["concurrent_requests"] = concurrent_requests(args.device_tokens, args.mean_resident_tokens)
    print(json.dumps(record, indent=2) if args.json else _curve_words(record))
    return 0


def _sampled(args: argparse.Namespace, workload: Workload) -> int:
    streamed = workload.path is not None and args.format in ("auto", "mooncake")
    source: Path | Trace = Path(str(workload.path)) if streamed else workload.load()
    curve: SampledCurve = sampled_curve(source, args.sample)
    top = max(len(one) for one in curve.hits) / curve.rate
    sizes = np.unique(np.geomspace(1, top, max(args.points, 2)).round().astype(np.int64))
    record = {
        "provenance": curve.basis,
        "references": curve.references,
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
            for size in sizes
        ],
    }
    if args.json:
        print(json.dumps(record, indent=2))
        return 0
    print(f"{curve.origin}: {curve.references:,} block references, sampled at {curve.rate:g} ({curve.basis})")
    print(
        f"  measured error on the first {curve.head_requests:,} requests: mean {100 * curve.head_error_mean:.2f}, "
        f"largest {100 * curve.head_error_max:.2f} points"
    )
    points: Any = record["curve"]
    for point in points:
        print(f"  {point['capacity_tokens']:>15,} tokens  {point['hit_rate']:7.2%} ± {point['spread']:.2%}")
    return 0


def _tiers(args: argparse.Namespace, config: LaunchConfig, trace: Trace, curve: HitCurve) -> dict[str, Any]:
    policy = _policy(args, config)
    question = _question(args, config, host_ram=args.host_ram, available=args.available, overhead=args.overhead)
    tiers, safe = _settings_to_compare(args, config, question)
    tokens = sorted({*args.host_tokens, *(tier.tokens for tier in tiers)})
    if not tokens:
        tokens = [int(args.device_tokens * ratio) for ratio in args.ratios or _RATIOS]
    by_tokens = {tier.tokens: tier for tier in tiers}
    rates = _rates(args, tiers[0] if tiers else None)
    device = float(curve.rate_at_tokens(args.device_tokens))
    rows = []
    for size in tokens:
        reach = policy.reach(args.device_tokens // curve.block_tokens, size // curve.block_tokens)
        row: dict[str, Any] = {
            "host_tokens": size,
            "ratio": size / args.device_tokens,
            "hit_rate": float(curve.rate_at(reach)),
        }
        row["host_hit_rate"] = row["hit_rate"] - device
        if size in by_tokens:
            row |= {key: value for key, value in asdict(by_tokens[size]).items() if key not in ("tokens", "ratio")}
        if rates is not None:
            hits = replay_blocks(trace, args.device_tokens, size, policy)
            row |= asdict(worth(hits, rates, trace.duration_s))
        rows.append(row)
    found: dict[str, Any] = {
        "device_tokens": args.device_tokens,
        "write_policy": str(policy),
        "device_hit_rate": device,
        "sizes": rows,
        "largest_safe": asdict(safe) if safe else None,
        "knee": None,
    }
    sized = [row for row in rows if "host_bytes" in row]
    if len(sized) > 1:
        grown = growth(
            curve, args.device_tokens, [r["host_tokens"] for r in sized], [r["host_bytes"] for r in sized], policy
        )
        found["knee"] = None if grown.knee is None else sized[grown.knee]["label"]
        for row, gain in zip(sized[1:], grown.rate_per_gb, strict=True):
            row["hit_rate_per_extra_host_gb"] = float(gain)
    return found


def _settings_to_compare(
    args: argparse.Namespace, config: LaunchConfig, question: Question | None
) -> tuple[tuple[HostTier, ...], HostTier | None]:
    if question is None:
        return (), None
    ratios: Sequence[float] = args.ratios or ()
    sizes: Sequence[int] = args.sizes_gb
    if config.hicache_size:
        sizes = (*sizes, int(config.hicache_size))
    elif config.hicache_ratio:
        ratios = (*ratios, config.hicache_ratio)
    if not ratios and not sizes:
        ratios = _RATIOS
    safe = largest_safe(question)
    tiers = host_tiers(question, ratios=ratios, sizes_gb=sizes)
    if safe is not None and safe.tokens not in {tier.tokens for tier in tiers}:
        tiers = tuple(sorted((*tiers, safe), key=lambda tier: tier.tokens))
    return tiers, safe


def trace_record(trace: Trace) -> dict[str, Any]:
    """A trace's facts for a result."""
    return {
        "origin": trace.origin,
        "requests": trace.requests,
        "references": trace.references,
        "unique_blocks": trace.unique_blocks,
        "block_tokens": trace.block_tokens,
        "input_tokens": trace.total_input_tokens,
        "output_tokens": int(trace.output_tokens.sum()),
        "duration_s": trace.duration_s,
        "skipped": trace.skipped,
        "notes": list(trace.notes),
    }


def _trace_words(record: dict[str, Any]) -> list[str]:
    lines = [
        f"{record['origin']}: {record['requests']:,} requests, {record['input_tokens']:,} prompt tokens in "
        f"{record['references']:,} blocks of {record['block_tokens']}"
    ]
    lines += [f"  left out: {count} × {reason}" for reason, count in record["skipped"].items()]
    return lines + [f"  note: {note}" for note in record["notes"]]


def _curve_words(record: dict[str, Any]) -> str:
    lines = _trace_words(record["trace"])
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
        lines.append(_tier_words(row))
    if tiers["knee"] is None and any("host_bytes" in row for row in tiers["sizes"]):
        lines.append("  no knee up to there: a further byte buys at least what the average byte did")
    if tiers["knee"]:
        lines.append(f"  knee: {tiers['knee']} (beyond it an extra byte buys less than the average byte here)")
    if tiers["largest_safe"]:
        safe = tiers["largest_safe"]
        lines.append(f"  largest safe: {safe['label']} → {format_gb(safe['host_bytes'])} on the host")
    if "concurrent_requests" in record:
        lines.append(
            f"  running at once: {record['concurrent_requests']} requests, with any host tier (device pool only)"
        )
    return "\n".join(lines)


def _tier_words(row: dict[str, Any]) -> str:
    text = f"  {row['host_tokens']:>13,} tokens (ratio {row['ratio']:5.2f})"
    text += f"  {row['hit_rate']:7.2%}  +{row['host_hit_rate']:.2%}"
    if "host_bytes" in row:
        text += f"  {row['label']:<22} {format_gb(row['host_bytes'])} on the host, {row['verdict']}"
    if row.get("hit_rate_per_extra_host_gb") is not None:
        text += f", {100 * row['hit_rate_per_extra_host_gb']:.3f} points per extra GB"
    if "ttft_saved_mean_s" in row:
        hourly = row["saved_tokens_per_hour"]
        saved = f"{hourly:,.0f} prefill tokens/h" if hourly is not None else f"{row['saved_tokens']:,} prefill tokens"
        text += f"; saves {saved}, TTFT {1000 * row['ttft_saved_mean_s']:.0f} ms on average"
    return text


# ---- simulate ----


def _simulate(args: argparse.Namespace, config: LaunchConfig, workload: Workload) -> int:
    if not args.device_tokens:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it")
    if len(args.host_tokens) > 1:
        raise UsageError("--host-tokens: simulate takes one size; curve compares many")
    policy = _policy(args, config)
    question = _question(args, config)
    tier = None
    if question is not None and not args.host_tokens:
        ratio = config.hicache_ratio or rules_for(args.sglang_version).default_ratio or 2.0
        size = int(config.hicache_size) if config.hicache_size else None
        tier = host_tier(question, ratio=None if size else ratio, size_gb=size)
    elif not args.host_tokens and config.hicache_ratio:
        raise UsageError("--hicache-ratio needs --model; without it give --host-tokens")
    host = args.host_tokens[0] if args.host_tokens else tier.tokens if tier else 0
    page = resolve_page_size(config, question.geometry, question.rules)[0] if question else config.page_size or 1
    trace = workload.load()
    record: dict[str, Any] = {"trace": trace_record(trace), "host_tier": asdict(tier) if tier else None}
    if args.rules == "blocks":
        trace.require_prefixes("a simulation")
        hits = replay_blocks(trace, args.device_tokens, host, policy)
        warnings: tuple[str, ...] = ()
        record |= {"rules": "blocks", "traffic": None, "refused": 0}
    else:
        result = replay(trace, _replay_settings(args, config, policy, host, page))
        hits = TierHits(result.device_tokens, result.host_tokens, result.input_tokens)
        warnings = result.warnings
        record |= {"rules": f"nodes, sglang {args.sglang_version}", "traffic": asdict(result.traffic)}
        record |= {"refused": len(result.refused), "host_left_tokens": int(result.host_left_tokens.sum())}
    record |= {
        "provenance": "simulated" if args.rules == "blocks" else "replayed",
        "device_tokens": args.device_tokens,
        "host_tokens": host,
        "page_size": page,
        "write_policy": str(policy),
        "device_hit_rate": hits.device_rate,
        "host_hit_rate": hits.total_rate - hits.device_rate,
        "hit_rate": hits.total_rate,
        "warnings": list(warnings),
    }
    rates = _rates(args, tier)
    if rates is not None:
        record["worth"] = asdict(worth(hits, rates, trace.duration_s))
    if args.by_request:
        _write_by_request(args.by_request, hits)
    print(json.dumps(record, indent=2) if args.json else _simulate_words(record))
    return 0


def _replay_settings(
    args: argparse.Namespace, config: LaunchConfig, policy: WritePolicy, host: int, page: int
) -> ReplaySettings:
    other = dict(config.other)
    chunk = config.chunked_prefill_size or 8192
    return ReplaySettings(
        device_tokens=args.device_tokens,
        host_tokens=host,
        page_size=page,
        write_policy=policy,
        eviction=EvictionPolicy.named(
            str(other.get("--radix-eviction-policy") or "lru"), other.get("--radix-eviction-policy-config")
        ),
        release=args.sglang_version,
        concurrency=args.concurrency,
        chunked_prefill_tokens=chunk if chunk > 0 else 2**40,
    )


def _write_by_request(path: Path, hits: TierHits) -> None:
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("w", encoding="utf-8") as out:
            out.write("request,input_tokens,device_tokens,host_tokens\n")
            for index, row in enumerate(zip(hits.input_tokens, hits.device_tokens, hits.host_tokens, strict=True)):
                out.write(f"{index},{row[0]},{row[1]},{row[2]}\n")
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"--by-request {path}: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)


def _simulate_words(record: dict[str, Any]) -> str:
    lines = _trace_words(record["trace"])
    lines.append(
        f"  {record['provenance']} ({record['rules']}): device {record['device_tokens']:,} tokens, host "
        f"{record['host_tokens']:,} tokens, page {record['page_size']}, {record['write_policy']}"
    )
    lines.append(
        f"  cached {record['hit_rate']:.2%} of prompt tokens: {record['device_hit_rate']:.2%} on the device, "
        f"{record['host_hit_rate']:.2%} loaded back from the host"
    )
    traffic = record["traffic"]
    if traffic:
        lines.append(
            f"  moved {traffic['backed_up']:,} tokens to the host and {traffic['loaded_back']:,} back; "
            f"{traffic['dropped']:,} left the device without a copy, {traffic['host_evicted']:,} left the host"
        )
    if "worth" in record:
        gained = record["worth"]
        hourly = gained["saved_tokens_per_hour"]
        lines.append(
            f"  saves {gained['saved_tokens']:,} prefill tokens"
            + (f" ({hourly:,.0f} an hour)" if hourly is not None else "")
            + f"; TTFT {1000 * gained['ttft_saved_mean_s']:.0f} ms on average, "
            f"{1000 * gained['ttft_saved_p95_s']:.0f} ms at p95; {gained['helped_requests']:.1%} of requests helped"
        )
    return "\n".join(lines + [f"  warning: {text}" for text in record["warnings"]])
