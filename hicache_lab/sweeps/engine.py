"""Running a plan: serially against one server, or in parallel for notebooks that need none.

Every end is recorded at once, so that whatever stops a sweep (Ctrl-C, TERM, kill -9, a full disk) loses at most the
runs under way, and ``resume`` goes on from there.
"""

from __future__ import annotations

import platform
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import hicache_lab
from hicache_lab.base.errors import HicacheLabError, HostError, UsageError
from hicache_lab.runs import Limits, RunResult, execute
from hicache_lab.sweeps.ledger import GRID_COPY, Point, SweepRecord, check_free, complete_result, locked
from hicache_lab.sweeps.plan import BASE_URL, Plan
from hicache_lab.sweeps.servers import ServerHost
from hicache_lab.sweeps.workers import Worker, WorkerDied


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


OnPoint = Callable[[Point], None]


def run_sweep(
    plan: Plan, folder: Path, options: Options | None = None, *, on_point: OnPoint = lambda _point: None
) -> SweepRecord:
    """Run every point of a plan that may run and is not complete yet.

    Args:
        plan: checked points.
        folder: the sweep's folder; its name is part of no result.
        options: how.
        on_point: called with every point as it ends.

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
    if plan.grid.server is not None and options.jobs > 1:
        raise UsageError("--jobs: runs against a server are made one after the other; they would disturb each other")
    with locked(folder):
        check_free(folder, resume=options.resume)
        sweep = _Sweep(plan, folder, options, on_point)
        sweep.begin()
        with sweep.showing():
            if options.jobs > 1:
                sweep.side_by_side()
            else:
                sweep.one_by_one()
        return sweep.record


class _Sweep:
    """The state of a running sweep; every change of it is written."""

    def __init__(self, plan: Plan, folder: Path, options: Options, on_point: OnPoint) -> None:
        self._plan, self._folder, self._options, self._on_point = plan, folder, options, on_point
        self.record = SweepRecord(
            label=plan.grid.label,
            notebook=plan.notebook.stem,
            notebook_sha256=plan.notebook_sha256,
            hicache_lab=hicache_lab.__version__,
            python=platform.python_version(),
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            points=plan.points,
            **vars(plan.grid.compare),
            grid=str(plan.grid.path),
        )
        self._bar: Any = None
        self._todo: deque[int] = deque()

    def begin(self) -> None:
        """Find what is complete already, and write the folder's first state."""
        points = []
        for number, point in enumerate(self.record.points):
            earlier = complete_result(self._folder / point.folder)
            if earlier is not None:
                point = replace(point.ended(earlier), reused=True)
            elif point.status == "pending":
                self._todo.append(number)
            points.append(point)
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
                point = self.record.points[number]
                self._say(point.label)
                ended = self._outcome(point, partial(self._run_here, point, host))
                self._end(number, ended)
                if ended.status == "interrupted":
                    raise KeyboardInterrupt

    def _run_here(self, point: Point, host: ServerHost | None) -> RunResult:
        base_url = host.ready(point.label, point.start) if host else None
        return self._run(point, base_url)()

    def side_by_side(self) -> None:
        """Several at a time, each in a process of its own."""
        running: dict[Worker, int] = {}
        try:
            while self._todo or running:
                while self._todo and len(running) < self._options.jobs:
                    number = self._todo.popleft()
                    running[Worker(self._run(self.record.points[number]))] = number
                self._collect(running)
        except BaseException:
            for worker in running:
                worker.interrupt()
            while running:
                self._collect(running, interrupted=True)
            raise

    def _collect(self, running: dict[Worker, int], *, interrupted: bool = False) -> None:
        """Record those that have ended; a run that was interrupted before it began stays pending."""
        for worker in Worker.ended(running):
            number = running.pop(worker)
            point = self.record.points[number]
            ended = self._outcome(point, worker.result)
            died = ended.error is not None and ended.error.kind == WorkerDied.__name__
            self._end(number, point if interrupted and died else ended)

    def _outcome(self, point: Point, run: Callable[[], RunResult]) -> Point:
        """The point with how its run ended; what would end any other run too is raised."""
        try:
            result = run()
        except KeyboardInterrupt:
            return replace(point, status="interrupted")
        except WorkerDied:
            return point.failed(
                WorkerDied.__name__,
                "the worker process died while this point ran (killed, or out of memory); --resume runs it again",
            )
        except HostError:
            raise
        except HicacheLabError as error:
            return point.failed(type(error).__name__, str(error), traceback.format_exc())
        if result.notebook_sha256 != self.record.notebook_sha256:
            return point.failed("NotebookChanged", "the notebook was changed while the sweep ran; --resume plans anew")
        return point.ended(result)

    def _run(self, point: Point, base_url: str | None = None) -> Callable[[], RunResult]:
        """The run of a point, to be made here or in another process; a notebook that fails is a result."""
        parameters = dict(point.parameters) | ({BASE_URL: base_url} if base_url else {})
        folder, options = self._folder / point.folder, self._options
        limits = options.limits or self._plan.grid.limits
        return partial(
            execute, self._plan.notebook, folder, parameters, limits=limits, html=options.html, progress=False
        )

    def _end(self, number: int, ended: Point) -> None:
        points = list(self.record.points)
        points[number] = ended
        self.record = replace(self.record, points=tuple(points))
        self.record.write(self._folder)
        if ended.status != "pending":
            self._bar.update(1)
            self._on_point(ended)

    def _say(self, text: str) -> None:
        self._bar.set_postfix_str(text[:60])
