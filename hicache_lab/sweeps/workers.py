"""What runs one point, here or in a worker process; and the default pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.runs import Limits, RunResult, execute

P = ParamSpec("P")
T = TypeVar("T")

# a notebook's folder goes to its kernel through the environment of this process: one run at a time in each
_ONE_AT_A_TIME = threading.Lock()
_running = threading.Event()
_CLOSING_SECONDS = 30


@dataclass(frozen=True)
class Task:
    """One run, in plain values that travel to another process."""

    notebook: str
    folder: str
    parameters: Mapping[str, Any]
    limits: Limits
    html: bool


def run_task(task: Task) -> RunResult:
    """Run one point; a notebook that fails is a result.

    Raises:
        HicacheLabError: it could not even be tried, e.g. the disk is full.
    """
    with _ONE_AT_A_TIME:
        _running.set()
        try:
            return execute(
                Path(task.notebook),
                Path(task.folder),
                task.parameters,
                limits=task.limits,
                html=task.html,
                progress=False,
            )
        finally:
            _running.clear()


class WorkerPool(Executor):
    """Worker processes that end with this one, and that close what they run when they are interrupted.

    Every worker is an executor of its own: one that is killed takes only its own run with it, and its place is filled
    again. (In one ``ProcessPoolExecutor`` the first death breaks all; and Python 3.11's may not notice the death of a
    worker that was started while its manager was already waiting on the others.)
    """

    def __init__(self, jobs: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        # closing our end tells all workers; an Event would keep its lock in the hands of a worker that is killed
        self._stopped, self._go_on = self._context.Pipe(duplex=False)
        self._workers = [self._worker() for _ in range(jobs)]
        self._latest: list[Future[Any] | None] = [None] * jobs

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Hand a call to an idle worker, or to the first one's queue."""
        place = next((at for at, one in enumerate(self._latest) if one is None or one.done()), 0)
        latest = self._latest[place]
        if latest is not None and latest.done() and isinstance(latest.exception(), BrokenExecutor):
            self._workers[place].shutdown(wait=True)
            self._workers[place] = self._worker()
        future = self._workers[place].submit(fn, *args, **kwargs)
        self._latest[place] = future
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers; with ``wait``, when they have finished what they run."""
        for worker in self._workers:
            worker.shutdown(wait=wait, cancel_futures=cancel_futures)
        self.interrupt()

    def interrupt(self) -> None:
        """Interrupt the runs under way; their results still come."""
        self._go_on.close()

    def _worker(self) -> Executor:
        return ProcessPoolExecutor(1, mp_context=self._context, initializer=_start_worker, initargs=(self._stopped,))


def _start_worker(stopped: Connection) -> None:
    # Ctrl-C in a terminal reaches every process of the group; the parent decides, through `stopped`. A handler, unlike
    # SIG_IGN, is not inherited by the notebook's kernel
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGUSR1, _interrupt)
    threading.Thread(target=_watch, args=(stopped,), daemon=True).start()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if _running.is_set():
        raise KeyboardInterrupt


def _watch(stopped: Connection) -> None:
    """Interrupt the run when the parent says so or is gone; without a parent the worker ends too."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([stopped, parent.sentinel])
    if _running.is_set():
        os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + _CLOSING_SECONDS
    while _running.is_set() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not _running.is_set():
        parent.join()
    os._exit(1)


@contextmanager
def dask_executor(address: str, *, connect_seconds: float = 10) -> Iterator[tuple[Executor, int]]:
    """Dask's executor at a scheduler's address, and how many runs its workers take at a time (one a process).

    Raises:
        UsageError: the optional package is not installed, or the address is malformed.
        HostError: no scheduler answers, or it has no workers.
    """
    try:
        from distributed import Client
    except ImportError:
        raise UsageError('--dask: needs the optional package; pip install "hicache-lab[dask]"') from None
    try:
        client: Any = Client(address, timeout=connect_seconds)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UsageError(f"--dask {address}: expected tcp://HOST:PORT ({error})") from None
    except (OSError, TimeoutError) as error:
        raise HostError(f"--dask {address}: no Dask scheduler answers there ({error})") from error
    with client:
        workers = len(client.nthreads())
        if not workers:
            raise HostError(f"--dask {address}: the scheduler has no workers; start some with `dask worker {address}`")
        yield client.get_executor(), workers
