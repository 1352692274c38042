"""One timeline out of server log, kernel log and memory samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from hicache_lab.base.units import format_both, format_gb
from hicache_lab.forensics.incident.facts import Evidence, Facts
from hicache_lab.forensics.incident.launches import RunFacts, run_facts
from hicache_lab.forensics.incident.memory import MemoryReading, lowest
from hicache_lab.forensics.logs import events as ev

Source = Literal["server", "kernel", "memory"]


@dataclass(frozen=True, slots=True)
class Moment:
    """One thing that happened. ``at`` is None where no line gives its time; ``evidence`` is the first line.

    ``what`` is in our words; ``quote`` is text of the log and untrusted.
    """

    at: datetime | None
    source: Source
    what: str
    evidence: Evidence
    important: bool = False
    quote: str = ""


def timeline(facts: Facts) -> list[Moment]:
    """The moments of all launches, in order of time; kernel lines without a time follow the last server line.

    Repetitions by many ranks become one moment that counts them.
    """
    moments = [moment for launch in run_facts(facts) for moment in _of_run(launch)]
    moments += _of_memory(facts)
    timed = sorted((m for m in moments if m.at is not None), key=lambda m: (m.at, m.source))
    untimed = [m for m in moments if m.at is None]
    return timed + untimed + [_kill(kill) for kill in facts.kills if kill.at is None]


def _of_run(launch: RunFacts) -> Iterator[Moment]:
    run = launch.run
    for args in run.of(ev.ServerArgs):
        size = f" --hicache-size {launch.size_gb:g}" if launch.size_gb else ""
        ranks = f", {run.ranks} rank(s)" if run.ranks else ""
        yield Moment(args.at, "server", f"launch{size}{ranks}", launch.size_evidence[0], True)
    shown: set[str] = set()
    for milestone in run.of(ev.Milestone):
        name = milestone.name
        if name in _STEPS and name not in shown:
            shown.add(name)
            yield Moment(milestone.at, "server", _STEPS[name], Evidence.of(milestone), name == "ready")
    pools = run.host_pools
    if pools:
        by_rank = run.host_bytes_by_rank()
        yield Moment(
            pools[0].at,
            "server",
            f"{len(by_rank)} rank(s) ask for host pools, {format_both(run.host_bytes)} in all",
            Evidence.of(pools[0]),
            True,
        )
    groups: dict[str, list[ev.Event]] = {}
    for event in run.events:
        if event.headline:
            groups.setdefault(event.kind, []).append(event)
    for kind, events in groups.items():
        total = run.counts[kind]
        times = f" ({total} times)" if total > 1 else ""
        first = min(events, key=lambda event: (event.at or datetime.max, event.where.line))
        yield Moment(first.at, "server", f"{first.headline}{times}", Evidence.of(first), True, first.text[:160])
    for kill in launch.kills:
        if kill.at is not None:
            yield _kill(kill, launch.kill_shift)


_STEPS = {
    "weights_begin": "weights begin to load",
    "weights_end": "weights loaded",
    "pool_end": "device pools allocated",
    "ready": "server ready",
    "shutdown": "shutdown asked for",
}


def _kill(kill: ev.KernelOom, shift: timedelta = timedelta()) -> Moment:
    held = f", {format_gb(kill.resident_bytes)} resident" if kill.resident_bytes else ""
    where = "in its control group" if kill.cgroup else "for the host's memory"
    what = f"the kernel kills pid {kill.pid} {where}{held}"
    if kill.reporter is not None:
        what = f"{kill.reporter} tells of a kill for memory"
    at = kill.at + shift if kill.at is not None else None
    moved = f" (its clock says {kill.at:%H:%M:%S})" if shift else ""
    return Moment(at, "kernel", f"{what}{moved}", Evidence.of(kill), True, kill.comm or "")


def _of_memory(facts: Facts) -> Iterator[Moment]:
    timed = [s for s in facts.memory if s.left_bytes is not None]
    if not timed:
        return
    yield _memory(timed[0], "memory at the first sample")
    low = lowest(timed, lambda sample: sample.left_bytes)
    if low is not None and low is not timed[0]:
        yield _memory(low, "least memory left", important=True)


def _memory(sample: MemoryReading, words: str, *, important: bool = False) -> Moment:
    left = format_gb(sample.left_bytes or 0)
    used = f", {format_gb(sample.in_use_bytes)} in use" if sample.in_use_bytes is not None else ""
    return Moment(sample.at, "memory", f"{words}: {left} left{used}", Evidence.of(sample), important)
