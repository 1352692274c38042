"""Traces, hit curves and replays as tables; ``curve --json`` and ``simulate --json`` hold the same records."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.cachesim import HitCurve, ReplayResult, hit_curve
from hicache_lab.traffic.traces import Trace
from hicache_lab.views.cells.blocks import facts_table, table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from hicache_lab.views.figures import Theme

_POINTS = 12


def capacities(top: float, points: int, least: int = 1) -> list[int]:
    """Capacities in blocks, spread evenly over the orders of magnitude."""
    spread = np.geomspace(least, max(top, least + 1), max(points, 2))
    sizes: list[int] = np.unique(spread.round().astype(np.int64)).tolist()
    return sizes


def curve_points(curve: HitCurve, points: int = _POINTS) -> list[dict[str, Any]]:
    """Hit rates at some capacities, up to the largest that brings anything."""
    return [
        {"capacity_tokens": int(size) * curve.block_tokens, "hit_rate": float(curve.rate_at(size))}
        for size in capacities(curve.largest_useful_blocks, points)
    ]


def _percent(share: float) -> str:
    return f"{share:.2%}"


def markdown(record: Trace | HitCurve | ReplayResult) -> str:
    """What a trace holds; a curve's capacities and hit rates; a replay's tokens by tier."""
    if isinstance(record, HitCurve):
        column = f"hit rate ({record.count})"
        points = [(point["capacity_tokens"], _percent(point["hit_rate"])) for point in curve_points(record)]
        return table(("capacity (tokens)", column), points)
    if isinstance(record, Trace):
        skipped = "; ".join(f"{count} × {reason}" for reason, count in record.skipped.items())
        return facts_table(trace_record(record) | {"skipped": skipped, "notes": "; ".join(record.notes)})
    settings, moved = record.settings, record.moved
    return facts_table(
        {
            f"hit rate, rules of {settings.release}": _percent(record.total_rate),
            "found on the device": _percent(record.device_rate),
            "loaded back from the host": _percent(record.host_rate),
            "device pool (tokens)": settings.device_tokens,
            "host pool (tokens)": settings.host_tokens,
            "copied to the host (tokens)": moved.backed_up,
            "loaded back (tokens)": moved.loaded_back,
            "warnings": "; ".join(record.warnings),
        }
    )


def plot(record: Trace | HitCurve | ReplayResult, theme: Theme = "light") -> Figure:
    """The hit rate at every size, of a curve or of a trace."""
    from hicache_lab.views.figures import hit_curve_figure

    if isinstance(record, ReplayResult):
        raise UsageError("plot: one replay has no figure; the curve of its trace has one: hl.hit_curve(trace).plot()")
    return hit_curve_figure(hit_curve(record, count="tokens") if isinstance(record, Trace) else record, theme)


def to_dict(record: Trace | HitCurve | ReplayResult) -> dict[str, Any]:
    """What ``curve --json`` and ``simulate --json`` print of it."""
    if isinstance(record, Trace):
        return trace_record(record)
    return curve_record(record) if isinstance(record, HitCurve) else replay_record(record)


def trace_record(trace: Trace) -> dict[str, Any]:
    """A trace's facts."""
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


def curve_record(curve: HitCurve, points: int = _POINTS) -> dict[str, Any]:
    """A curve's facts, and its hit rate at some sizes."""
    return {
        "provenance": curve.basis,
        "count": curve.count,
        "requests_counted": curve.requests,
        "ceiling": curve.ceiling,
        "largest_useful_tokens": curve.largest_useful_blocks * curve.block_tokens,
        "curve": curve_points(curve, points),
    }


def replay_record(result: ReplayResult) -> dict[str, Any]:
    """What a replay was given and what it found."""
    settings = result.settings
    return {
        "provenance": "replayed",
        "rules": f"nodes, sglang {settings.release}",
        "concurrency": settings.concurrency,
        "turnaround_steps": settings.turnaround_steps,
        "traffic": asdict(result.moved),
        "refused": len(result.refused),
        "host_left_tokens": int(result.host_left_tokens.sum()),
        "warnings": list(result.warnings),
        "device_tokens": settings.device_tokens,
        "host_tokens": settings.host_tokens,
        "page_size": settings.page_size,
        "write_policy": str(settings.write_policy),
        "device_hit_rate": result.device_rate,
        "host_hit_rate": result.total_rate - result.device_rate,
        "hit_rate": result.total_rate,
    }
