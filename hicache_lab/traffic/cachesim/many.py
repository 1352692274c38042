"""Many traces or many configurations, on any ``concurrent.futures.Executor`` (threads, processes)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, as_completed
from typing import TypeVar

from hicache_lab.traffic.cachesim.curve import Count, HitCurve, hit_curve
from hicache_lab.traffic.cachesim.replay import ReplayResult, replay
from hicache_lab.traffic.cachesim.settings import ReplaySettings
from hicache_lab.traffic.traces import Trace
from hicache_lab.traffic.traces.workload import Workload

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


def curves(
    workloads: Iterable[Workload], *, executor: Executor | None = None, count: Count = "blocks"
) -> Iterator[tuple[Workload, HitCurve]]:
    """The curve of each workload, as soon as it is there; each worker loads its own trace."""
    return _each(_curve, [(workload, count) for workload in workloads], executor)


def replays(
    trace: Workload | Trace, settings: Iterable[ReplaySettings], *, executor: Executor | None = None
) -> Iterator[tuple[ReplaySettings, ReplayResult]]:
    """The replay of each configuration, as soon as it is there."""
    return _each(_replay, [(one, trace) for one in settings], executor)


def _curve(task: tuple[Workload, Count]) -> HitCurve:
    workload, count = task
    return hit_curve(workload.load(), count=count)


def _replay(task: tuple[ReplaySettings, Workload | Trace]) -> ReplayResult:
    settings, trace = task
    return replay(trace.load() if isinstance(trace, Workload) else trace, settings)


def _each(
    function: Callable[[tuple[A, C]], B], tasks: list[tuple[A, C]], executor: Executor | None
) -> Iterator[tuple[A, B]]:
    """Yield (first part of the task, result): in order without an executor, in order of completion with one."""
    if executor is None:
        for task in tasks:
            yield task[0], function(task)
        return
    waiting: dict[Future[B], A] = {executor.submit(function, task): task[0] for task in tasks}
    for future in as_completed(waiting):
        yield waiting[future], future.result()
