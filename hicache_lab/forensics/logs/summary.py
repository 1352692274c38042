"""What ``hicache-lab parse --json`` prints (docs/parse-json.md describes it) and its text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any

from hicache_lab.base.units import format_both, format_gb
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.collect import Log
from hicache_lab.forensics.logs.prefix import for_terminal
from hicache_lab.forensics.logs.run import Run

SCHEMA = "hicache-lab/parse/1"
_TEXT = 500
_PEAKS = ("token_usage", "running_req", "queue_req")


def to_json(log: Log) -> dict[str, Any]:
    """The whole log as plain values."""
    times = [at for run in log.runs for at in (run.first, run.last) if at is not None]
    return {
        "schema": SCHEMA,
        "sources": [{"name": source.name, "files": list(source.paths)} for source in log.sources],
        "lines": log.lines,
        "recognised_lines": log.recognised_lines,
        "is_sglang": log.is_sglang,
        "first": _iso(min(times, default=None)),
        "last": _iso(max(times, default=None)),
        "access": dict(log.access),
        "runs": [run_json(run) for run in log.runs],
    }


def run_json(run: Run) -> dict[str, Any]:
    """One launch as plain values; sizes in bytes, of one rank unless the name says total."""
    batches = run.batches
    ready = run.milestone("ready")
    seen, expected = run.ranks_seen, run.expected_ranks
    releases = run.releases
    return {
        "run": run.index,
        "source": run.stream,
        "file": run.start.file,
        "line": run.start.line,
        "first": _iso(run.first),
        "last": _iso(run.last),
        "ready": _iso(ready.at) if ready else None,
        "releases": {"first": releases.first, "last": releases.last} if releases else None,
        "server_args": {str(key): _plain(value) for key, value in run.args.items()},
        "ranks": {"seen": seen, "expected": expected, "missing": max(expected - len(seen), 0) if expected else None},
        "device": {
            "tokens": run.device_tokens,
            "kv_bytes": _device_bytes(run),
            "pools": [_pool(pool) | {"final": pool.final} for pool in run.of(ev.DevicePool)],
        },
        "host": {
            "pools": [_pool(pool) for pool in run.host_pools],
            "by_rank": run.host_bytes_by_rank(),
            "by_pool": _by_pool(run),
            "total_bytes": run.host_bytes,
            "projected_total_bytes": run.projected_host_bytes,
            "complete": bool(run.host_pools) and (run.ranks or 0) <= len(run.host_bytes_by_rank()),
        },
        "batches": {"prefill": batches.prefill, "decode": batches.decode, "by_rank": dict(batches.by_rank)},
        "peaks": {
            name: {"value": peak.value, "file": peak.where.file, "line": peak.where.line} if peak else None
            for name, peak in ((name, batches.peaks.get(name)) for name in _PEAKS)
        },
        "hit_ratio": batches.hit_ratio,
        "cached_tokens": batches.cached_tokens,
        "new_tokens": batches.new_tokens,
        "throughput": {
            "mean_token_s": batches.mean_throughput,
            "max_token_s": batches.throughput_max or None,
            "decode_lines": batches.throughput_lines,
            "first_after_idle": batches.fresh,
        },
        "retractions": {
            "lines": run.counts["retraction"],
            "requests": sum(event.retracted or 0 for event in run.of(ev.Retraction)),
        },
        "errors": [
            {
                "kind": event.kind,
                "rank": event.rank.label,
                "at": _iso(event.at),
                "file": event.where.file,
                "line": event.where.line,
                "text": event.text[:_TEXT],
            }
            for event in run.events
            if event.is_error
        ],
        "events": dict(sorted(run.counts.items())),
    }


def to_text(log: Log) -> str:
    """The same for people, a screen a launch."""
    names = ", ".join(source.name for source in log.sources)
    out = [f"{names}: {log.lines:,} lines, {log.recognised_lines:,} recognised"]
    out += [line for run in log.runs for line in _run_text(run)]
    return "\n".join(for_terminal(line) for line in out)


def _run_text(run: Run) -> list[str]:
    batches, releases = run.batches, run.releases
    seen, expected = run.ranks_seen, run.expected_ranks
    out = ["", f"run {run.index}  {run.start}  {_iso(run.first) or '?'} … {_iso(run.last) or '?'}"]
    out.append(f"  release      {releases or 'not told by the wording'}" + (" (from the wording)" if releases else ""))
    shown = " ".join(label or "(untagged)" for label in seen) or "none"
    out.append(f"  ranks        {shown}" + (f"  ({len(seen)} of {expected})" if expected else ""))
    flags = {key: run.args[key] for key in _SHOWN if run.args.get(key) not in (None, False, "")}
    if flags:
        out.append("  arguments    " + " ".join(f"{key}={value}" for key, value in flags.items()))
    if run.device_tokens is not None:
        size = _device_bytes(run)
        out.append(f"  device       {run.device_tokens:,} tokens a rank" + (f", {format_both(size)}" if size else ""))
    if run.host_pools:
        total, projected = run.host_bytes, run.projected_host_bytes
        pools = ", ".join(f"{name} {format_gb(size)}" for name, size in _by_pool(run).items())
        out.append(f"  host         {format_both(total)} over {len(run.host_bytes_by_rank())} ranks: {pools}")
        if projected != total:
            out.append(f"               {format_both(projected)} if the ranks not shown take the same (computed)")
    if batches.prefill or batches.decode:
        ratio = "–" if batches.hit_ratio is None else f"{batches.hit_ratio:.1%}"
        out.append(f"  batches      {batches.prefill:,} prefill, {batches.decode:,} decode; hit ratio {ratio}")
        shown_peaks = [(name, batches.peaks[name]) for name in _PEAKS if name in batches.peaks]
        peaks = "  ".join(f"{name} {peak.value:g} (line {peak.where.line})" for name, peak in shown_peaks)
        out.append(f"  peaks        {peaks}")
    if batches.mean_throughput is not None:
        out.append(
            f"  throughput   mean {batches.mean_throughput:,.1f} token/s, max {batches.throughput_max:,.1f}; "
            f"{batches.fresh} first lines after idling left out"
        )
    if run.counts["retraction"]:
        out.append(f"  retractions  {run.counts['retraction']}")
    failures = [event for event in run.events if event.is_error]
    out += [f"  {event.where}  {event.rank.label or '-'}  {event.text[:160]}" for event in failures[:12]]
    if len(failures) > 12:
        out.append(f"  … and {len(failures) - 12} more; --json lists them")
    return out


_SHOWN = (
    "model_path tp_size pp_size dp_size nnodes page_size mem_fraction_static enable_hierarchical_cache hicache_ratio "
    "hicache_size hicache_write_policy"
).split()


def _device_bytes(run: Run) -> int | None:
    by_rank: dict[str, int] = {}
    for pool in run.of(ev.DevicePool):
        if pool.final and pool.bytes:
            by_rank[pool.rank.label] = by_rank.get(pool.rank.label, 0) + pool.bytes
    return max(by_rank.values(), default=None)


def _by_pool(run: Run) -> dict[str, int]:
    found: dict[str, int] = {}
    for pool in run.host_pools:
        found[pool.pool] = found.get(pool.pool, 0) + pool.bytes
    return found


def _pool(pool: ev.HostPool | ev.DevicePool) -> dict[str, Any]:
    return {
        "rank": pool.rank.label,
        "pool": pool.pool,
        "tokens": pool.tokens,
        "bytes": pool.bytes,
        "file": pool.where.file,
        "line": pool.where.line,
    }


def event_json(event: ev.Event) -> dict[str, Any]:
    """Any event as plain values (``parse --follow --json`` prints one a line)."""
    out: dict[str, Any] = {"kind": event.kind, "at": _iso(event.at), "rank": event.rank.label}
    out |= {"file": event.where.file, "line": event.where.line}
    for each in fields(event):
        value = getattr(event, each.name)
        if each.name not in ("where", "at", "rank", "text", "prefix", "launch") and value is not None:
            out[each.name] = _plain(value)
    return out | {"text": event.text[:_TEXT]}


def _iso(at: datetime | None) -> str | None:
    return at.isoformat() if at is not None else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
