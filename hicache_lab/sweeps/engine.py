"""Running a plan: serially against one server, or in parallel for notebooks that need none.

Every end is recorded at once, so that whatever stops a sweep (Ctrl-C, TERM, kill -9, a full disk) loses at most the
runs under way, and ``resume`` goes on from there.
"""

from __future__ import annotations

import platform
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hicache_lab
from hicache_lab.base.errors import HicacheLabError, HostError, UsageError
from hicache_lab.runs import Limits, RunResult
from hicache_lab.sweeps.ledger import (
    GRID_COPY,
    POINTS,
    PointRecord,
    SweepRecord,
    check_free,
    complete_result,
    locked,
)
from hicache_lab.sweeps.plan import BASE_URL, Plan, Point
from hicache_lab.sweeps.serving import ServerHost
from hicache_lab.sweeps.workers import Task, WorkerPool, run_task


@dataclass(frozen=True)
class Options:
    """How a sweep runs.

    Attributes:
        resume: go on with the sweep in the folder; complete points are not run again.
        jobs: runs side by side (offline notebooks only).
        limits: seconds a cell and a run may take; None takes the grid's.
        html: also render each run's one-file HTML.
        progress: show a bar over the grid on standard error.
    """

    resume: bool = False
    jobs: int = 1
    limits: Limits | None = None
    html: bool = True
    progress: bool = True


Told = Callable[[PointRecord], None]


def run_sweep(
    plan: Plan,
    folder: Path,
    options: Options | None = None,
    *,
    executor: Executor | None = None,
    told: Told = lambda _record: None,
) -> SweepRecord:
    """Run every point of a plan that may run and is not complete yet.

    Args:
        plan: checked points.
        folder: the sweep's folder; its name is part of no result.
        options: how.
        executor: runs the points instead of this process (any ``concurrent.futures.Executor`` whose workers see the
            same folders, e.g. Dask's); ``options.jobs`` then says how many are handed out at a time.
        told: called with every point as it ends.

    Returns:
        How every point ended; ``sweep.json`` in the folder says the same. After an interrupt it raises instead.

    Raises:
        UsageError: the folder is in use or holds something else; parallel runs against a server.
        HostError: the disk is full, or the folder cannot be written.
        ServerError: an existing server that does not answer before the first point.
        KeyboardInterrupt: after everything that ran was recorded.
    """
    options = options or Options()
    if options.jobs < 1:
        raise UsageError(f"--jobs: expected 1 or more, got {options.jobs}")
    if plan.grid.server is not None and (executor is not None or options.jobs > 1):
        raise UsageError(
            "--jobs, --dask: runs against a server are made one after the other; they would disturb each other"
        )
    with locked(folder):
        check_free(folder, resume=options.resume)
        sweep = _Sweep(plan, folder, options, told)
        sweep.begin()
        with sweep.showing():
            if executor is not None:
                sweep.in_parallel(nullcontext(executor))
            elif options.jobs > 1:
                sweep.in_parallel(WorkerPool(options.jobs))
            else:
                sweep.one_by_one()
        return sweep.record


class _Sweep:
    """The state of a running sweep; every change of it is written."""

    def __init__(self, plan: Plan, folder: Path, options: Options, told: Told) -> None:
        self._plan, self._folder, self._options, self._told = plan, folder, options, told
        self._limits = options.limits or plan.grid.limits
        compare = plan.grid.compare
        self.record = SweepRecord(
            label=plan.grid.label,
            notebook=plan.notebook.stem,
            notebook_sha256=plan.notebook_sha256,
            hicache_lab=hicache_lab.__version__,
            python=platform.python_version(),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            points=tuple(_record(point) for point in plan.points),
            baseline=compare.baseline,
            metrics=compare.metrics,
            objective=compare.objective,
            grid=str(plan.grid.path),
        )
        self._bar: Any = None
        self._todo: deque[int] = deque()

    def begin(self) -> None:
        """Find what is complete, mark what is skipped, and write the folder's first state."""
        points = []
        for number, point in enumerate(self.record.points):
            earlier = complete_result(self._folder / point.folder)
            if earlier is not None:
                points.append(replace(point.ended(earlier), reused=True))
            elif not self._plan.points[number].decision.run:
                points.append(replace(point, status="skipped"))
            else:
                points.append(point)
                self._todo.append(number)
        self.record = replace(self.record, points=tuple(points))
        try:
            (self._folder / GRID_COPY).write_text(self._plan.grid.text, encoding="utf-8")
        except OSError as error:
            raise HostError(f"{self._folder}: cannot be written ({error.strerror})") from error
        self.record.write(self._folder)

    def showing(self) -> AbstractContextManager[object]:
        """A bar over the points, with the time that is left."""
        from tqdm import tqdm

        skipped, reused = self.record.count("skipped"), self.record.count("complete")
        self._bar = tqdm(
            total=len(self.record.points) - skipped,
            initial=reused,
            desc=self.record.label,
            unit="point",
            disable=not self._options.progress,
        )
        bar: AbstractContextManager[object] = self._bar
        return bar

    def one_by_one(self) -> None:
        """Serially, in this process."""
        with ExitStack() as stack:
            side = self._plan.grid.server
            host = None
            if side is not None and self._todo:
                host = stack.enter_context(ServerHost(side, self._folder, self._say))
            while self._todo:
                number = self._todo.popleft()
                self._say(self.record.points[number].label)
                ended = self._run_here(number, host)
                self._end(number, ended)
                if ended.status == "interrupted":
                    raise KeyboardInterrupt

    def _run_here(self, number: int, host: ServerHost | None) -> PointRecord:
        point, record = self._plan.points[number], self.record.points[number]
        try:
            base_url = host.ready(point) if host else None
            return self._checked(record, run_task(self._task(number, base_url)))
        except KeyboardInterrupt:
            return replace(record, status="interrupted")
        except HostError:
            raise
        except HicacheLabError as error:
            return record.failed(type(error).__name__, str(error), traceback.format_exc())

    def in_parallel(self, pool: AbstractContextManager[Executor]) -> None:
        """Through an executor, so many at a time."""
        running: dict[Future[RunResult], int] = {}
        with pool as executor:
            try:
                while self._todo or running:
                    while self._todo and len(running) < self._options.jobs:
                        task = self._task(self._todo[0], None)
                        running[self._submitted(executor, task)] = self._todo.popleft()
                    self._collect(running)
            except KeyboardInterrupt:
                self._interrupt(pool, running)
                raise

    @staticmethod
    def _submitted(executor: Executor, task: Task) -> Future[RunResult]:
        try:
            return executor.submit(run_task, task)
        except BrokenExecutor:
            raise HostError("the executor is broken: it takes no more runs; start it anew and --resume") from None

    def _interrupt(self, pool: AbstractContextManager[Executor], running: dict[Future[RunResult], int]) -> None:
        """Runs that have not begun stay pending; our own workers close theirs, others finish unseen."""
        for future in [future for future in running if future.cancel()]:
            del running[future]
        if isinstance(pool, WorkerPool):
            pool.interrupt()
        while running:
            self._collect(running)

    def _collect(self, running: dict[Future[RunResult], int]) -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            number = running.pop(future)
            self._end(number, self._outcome(self.record.points[number], future))

    def _outcome(self, record: PointRecord, future: Future[RunResult]) -> PointRecord:
        if future.cancelled():
            return record
        error = future.exception()
        if isinstance(error, KeyboardInterrupt):
            return replace(record, status="interrupted")
        if isinstance(error, BrokenExecutor):
            return record.failed(
                "WorkerDied",
                "the worker process died while this point ran (killed, or out of memory); --resume runs it again",
            )
        if isinstance(error, HostError):
            raise error
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            return record.failed(type(error).__name__, str(error), trace)
        result = future.result()
        if complete_result(self._folder / record.folder) is None and result.complete:
            return record.failed(
                "FolderNotShared",
                f"the worker finished, but its run folder is not here: {record.folder}; workers need this folder too",
            )
        return self._checked(record, result)

    def _checked(self, record: PointRecord, result: RunResult) -> PointRecord:
        """A run is the point's only if it was made from what the point was planned with."""
        if result.hicache_lab != self.record.hicache_lab:
            return record.failed(
                "OtherVersion", f"the worker runs hicache-lab {result.hicache_lab}, this is {self.record.hicache_lab}"
            )
        if result.notebook_sha256 != self.record.notebook_sha256:
            return record.failed("NotebookChanged", "the notebook was changed while the sweep ran; --resume plans anew")
        return record.ended(result)

    def _task(self, number: int, base_url: str | None) -> Task:
        point = self._plan.points[number]
        given = dict(point.parameters) | ({BASE_URL: base_url} if base_url else {})
        folder = self._folder / self.record.points[number].folder
        return Task(str(self._plan.notebook), str(folder), given, self._limits, self._options.html)

    def _end(self, number: int, ended: PointRecord) -> None:
        points = list(self.record.points)
        points[number] = ended
        self.record = replace(self.record, points=tuple(points))
        self.record.write(self._folder)
        if ended.status != "pending":
            self._bar.update(1)
            self._told(ended)

    def _say(self, text: str) -> None:
        self._bar.set_postfix_str(text[:60])


def _record(point: Point) -> PointRecord:
    return PointRecord(
        label=point.label,
        settings=dict(point.settings),
        repeat=point.repeat,
        server=point.server,
        digest=point.digest,
        folder=f"{POINTS}/{point.folder_name}",
        verdict=point.decision.verdict,
        reason=point.decision.reason,
        host_bytes=point.decision.host_bytes,
        limit_bytes=point.decision.limit_bytes,
    )
