"""What runs one point, here or in a worker process; and the default pool of worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hicache_lab.errors import HostError, UsageError
from hicache_lab.runs import Limits, RunResult, execute

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


class WorkerPool:
    """Worker processes that end with this one, and that close what they run when they are interrupted."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._context = multiprocessing.get_context("spawn")
        self._executor: ProcessPoolExecutor | None = None
        self._open_lines()

    def __enter__(self) -> Executor:
        return self._start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.interrupt()
        self._close()

    def renew(self) -> Executor:
        """A fresh set of workers in place of a broken one, whose last workers close what they run and leave."""
        # the executor only sends TERM, which nbclient catches while a notebook runs, and then waits for the process
        self.interrupt()
        self._presence.close()
        self._close()
        self._open_lines()
        return self._start()

    def interrupt(self) -> None:
        """Interrupt the runs under way; their results still come."""
        self._go_on.close()

    def _open_lines(self) -> None:
        # closing our end of a pipe tells every worker, and so does our death; an Event would keep its lock in the hands
        # of a worker that is killed
        self._stopped, self._go_on = self._context.Pipe(duplex=False)
        self._gone, self._presence = self._context.Pipe(duplex=False)

    def _start(self) -> Executor:
        self._executor = ProcessPoolExecutor(
            self._jobs, mp_context=self._context, initializer=_start_worker, initargs=(self._stopped, self._gone)
        )
        return self._executor

    def _close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        for line in (self._stopped, self._gone, self._presence):
            line.close()


def _start_worker(stopped: Connection, gone: Connection) -> None:
    # Ctrl-C in a terminal reaches every process of the group; the parent decides, through `stopped`. A handler, unlike
    # SIG_IGN, is not inherited by the notebook's kernel
    signal.signal(signal.SIGINT, _ignore)
    signal.signal(signal.SIGUSR1, _interrupt)
    threading.Thread(target=_watch, args=(stopped, gone), daemon=True).start()


def _ignore(_number: int, _frame: FrameType | None) -> None:
    pass


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    if _running.is_set():
        raise KeyboardInterrupt


def _watch(stopped: Connection, gone: Connection) -> None:
    """Interrupt the run when the parent says so; when nobody waits for its result any more the worker ends too."""
    wait([stopped, gone])
    if _running.is_set():
        os.kill(os.getpid(), signal.SIGUSR1)
    deadline = time.monotonic() + _CLOSING_SECONDS
    while _running.is_set() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not _running.is_set():
        gone.poll(None)
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
