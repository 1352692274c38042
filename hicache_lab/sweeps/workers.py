"""One run in a process of its own: what happens to it, a kill by the kernel included, happens to no other run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from hicache_lab.runs import RunResult

# a forked child would share this process's threads' locks
_SPAWN = multiprocessing.get_context("spawn")


class WorkerDied(Exception):
    """The process of a run ended without a result."""


class Worker:
    """A run that is under way in another process; it is interrupted when this process ends."""

    def __init__(self, run: Callable[[], RunResult]) -> None:
        self._outcome, theirs = _SPAWN.Pipe(duplex=False)
        self._process = _SPAWN.Process(target=_work, args=(theirs, run))
        self._process.start()
        theirs.close()

    def result(self) -> RunResult:
        """Its result, waited for.

        Raises:
            WorkerDied: there is none.
            HicacheLabError: it could not even be tried.
        """
        outcome: RunResult | BaseException = WorkerDied()
        with suppress(EOFError, OSError):
            wait([self._outcome, self._process.sentinel])
            if self._outcome.poll():
                outcome = self._outcome.recv()
        self._process.join()
        self._outcome.close()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def interrupt(self) -> None:
        """Have the run closed as an interrupted one."""
        self._process.terminate()

    @staticmethod
    def ended(workers: Iterable[Worker]) -> list[Worker]:
        """Those that have ended; waits for the first one."""
        workers = list(workers)
        ready = wait([place for one in workers for place in (one._outcome, one._process.sentinel)])
        return [one for one in workers if one._outcome in ready or one._process.sentinel in ready]


def _work(outcome: Connection, run: Callable[[], RunResult]) -> None:
    # Ctrl-C in a terminal reaches every process of the group; the parent decides, and says so by TERM, which closes a
    # run. A handler, unlike SIG_IGN, is not inherited by the notebook's kernel
    signal.signal(signal.SIGINT, lambda _number, _frame: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        outcome.send(run())
    except Exception as error:  # noqa: BLE001 - the parent says what it means for the sweep
        error.add_note(traceback.format_exc())
        outcome.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
