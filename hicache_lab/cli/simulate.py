"""``simulate``: replay a trace by a release's own cache rules; cached tokens by tier."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.files import atomic_write
from hicache_lab.cli import traffic
from hicache_lab.cli.options import positive, whole
from hicache_lab.preflight import Question
from hicache_lab.preflight.host_tiers import HostTier, host_tier
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.pages import resolve_page_size
from hicache_lab.traffic.cachesim import (
    EvictionPolicy,
    ReplaySettings,
    TierHits,
    WritePolicy,
    replay,
    replay_blocks,
    savings,
)
from hicache_lab.views.cells.traffic import replay_record, trace_record


def add_arguments(_command: str, parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    traffic.add_inputs(parser)
    parser.add_argument("--rules", choices=("nodes", "blocks"), default="nodes", help="HiCache's rules, or plain LRU")
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=1,
        metavar="N",
        help="clients that wait for an answer before they send the trace's next request (default: 1)",
    )
    parser.add_argument(
        "--turnaround-steps",
        type=whole,
        metavar="N",
        help="with --concurrency: scheduler steps between an answer and its client's next request (default: 2)",
    )
    parser.add_argument("--by-request", type=Path, metavar="FILE.csv", help="write cached tokens of every request")
    traffic.add_server_flags(parser)


def run(_command: str, args: argparse.Namespace) -> int:
    """Replay one configuration."""
    config, read = traffic.launch_of(args), traffic.reading_of(args)
    if not args.device_tokens:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it")
    if len(args.host_tokens) > 1:
        raise UsageError("--host-tokens: simulate takes one size; curve compares many")
    if args.rules == "blocks":
        traffic.lru_only(config, "--rules blocks is plain LRU", "take --rules nodes")
        for flag, is_set in (
            ("--concurrency", args.concurrency > 1),
            ("--turnaround-steps", args.turnaround_steps is not None),
        ):
            if is_set:
                raise UsageError(f"{flag}: --rules blocks takes requests one by one; take --rules nodes")
    if args.turnaround_steps is not None and args.concurrency == 1:
        raise UsageError("--turnaround-steps: one client is alone however long it takes; give --concurrency too")
    if args.by_request:
        _check_writable(args.by_request, args.trace)
    policy, question = traffic.policy_of(args, config), traffic.question_of(args, config)
    speeds = traffic.rates(args, question)
    tier = _tier(args, config, question)
    host = args.host_tokens[0] if args.host_tokens else tier.tokens if tier else 0
    page = resolve_page_size(config, question.geometry, question.rules)[0] if question else config.page_size or 1
    trace = read()
    trace.require_prefixes("a simulation")
    record: dict[str, Any] = {"trace": trace_record(trace), "host_tier": asdict(tier) if tier else None}
    if args.rules == "blocks":
        hits: TierHits = replay_blocks(trace, args.device_tokens, host, policy)
        record |= {"provenance": "simulated", "rules": "blocks", "traffic": None, "refused": 0, "warnings": []}
    else:
        hits = result = replay(trace, _replay_settings(args, config, policy, host, page))
        record |= replay_record(result)
    record |= {
        "device_tokens": args.device_tokens,
        "host_tokens": host,
        "page_size": trace.block_tokens if args.rules == "blocks" else page,
        "write_policy": str(policy),
        "device_hit_rate": hits.device_rate,
        "host_hit_rate": hits.total_rate - hits.device_rate,
        "hit_rate": hits.total_rate,
    }
    record["warnings"] += traffic.cautions(config)
    if speeds is not None:
        record["worth"] = asdict(savings(hits, speeds, trace.duration_s))
    if args.by_request:
        _write_by_request(args.by_request, hits)
    print(json.dumps(record, indent=2) if args.json else _simulate_text(record))
    return 0


def _tier(args: argparse.Namespace, config: LaunchConfig, question: Question | None) -> HostTier | None:
    if args.host_tokens:
        if config.hicache_ratio or config.hicache_size:
            raise UsageError("--host-tokens: give the host pool in tokens, or by --hicache-ratio or --hicache-size")
        return None
    if question is None:
        if config.hicache_ratio or config.hicache_size:
            raise UsageError("--hicache-ratio and --hicache-size need --model; without it give --host-tokens")
        return None
    if config.hicache_size:
        return host_tier(question, size_gb=int(config.hicache_size))
    return host_tier(question, ratio=config.hicache_ratio or rules_for(args.sglang_version).default_ratio or 2.0)


def _replay_settings(
    args: argparse.Namespace, config: LaunchConfig, policy: WritePolicy, host: int, page: int
) -> ReplaySettings:
    other = dict(config.other)
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
        turnaround_steps=ReplaySettings.turnaround_steps if args.turnaround_steps is None else args.turnaround_steps,
        chunked_prefill_tokens=_chunk(config, page),
    )


def _chunk(config: LaunchConfig, page: int) -> int:
    """Tokens of a prefill batch; 0 and below: no bound.

    Source: managers/scheduler.py and the server arguments' check, the same in 0.5.3 to 0.5.23.
    """
    size = config.chunked_prefill_size
    if size is None:
        return ReplaySettings.chunked_prefill_tokens
    if size > 0 and size % page:
        raise UsageError(f"--chunked-prefill-size {size}: the server takes only multiples of the page of {page} tokens")
    return size if size > 0 else 2**40


def _check_writable(path: Path, trace: str | None) -> None:
    """Say before a long replay what would stop its rows from being written, or what they would destroy."""
    if path.exists() and not path.is_file():
        raise UsageError(f"--by-request {path}: is a folder or a device; give a file")
    if trace and path.exists() and Path(trace).exists() and path.samefile(trace):
        raise UsageError(f"--by-request {path}: is the trace itself; give another file")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise UsageError(f"--by-request {path}: the folder {path.parent} does not exist or cannot be written")


def _write_by_request(path: Path, hits: TierHits) -> None:
    import pandas as pd

    rows = pd.DataFrame({name: getattr(hits, name) for name in ("input_tokens", "device_tokens", "host_tokens")})
    try:
        atomic_write(path, lambda part: rows.to_csv(part, index_label="request"))
    except OSError as error:
        raise UsageError(f"--by-request {path}: {error.strerror}") from None
    print(f"wrote {path}", file=sys.stderr)


def _simulate_text(record: dict[str, Any]) -> str:
    lines = traffic.trace_text(record["trace"])
    lines.append(
        f"  {record['provenance']} ({record['rules']}): device {record['device_tokens']:,} tokens, host "
        f"{record['host_tokens']:,} tokens, page {record['page_size']}, {record['write_policy']}"
        + (f", {clients} clients at once" if (clients := record.get("concurrency", 1)) > 1 else "")
    )
    lines.append(
        f"  cached {record['hit_rate']:.2%} of prompt tokens: {record['device_hit_rate']:.2%} on the device, "
        f"{record['host_hit_rate']:.2%} loaded back from the host"
    )
    moved = record["traffic"]
    if moved:
        lines.append(
            f"  moved {moved['backed_up']:,} tokens to the host and {moved['loaded_back']:,} back; "
            f"{moved['dropped']:,} left the device without a copy, {moved['host_evicted']:,} left the host"
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
