"""Chunks on their way to the fast path: how many there are, read while others are summed up, and interrupts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, main_thread
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.fast_path import FastPath
    from hicache_lab.forensics.logs.rows import ChunkPart

# below this the line parser alone is faster than loading the fast path
_SMALL_BYTES = 6 << 20
# chunks given to the fast path before the oldest one's results are waited for
_AHEAD = 2
_TURN_S = 0.0005


def beginning(coming: Iterator[npt.NDArray[np.uint8]]) -> tuple[Iterator[npt.NDArray[np.uint8]], bool]:
    """The same chunks, and whether they are few; an interrupt is raised behind those that had come."""
    held: list[npt.NDArray[np.uint8]] = []
    size = 0

    def interrupted(stop: KeyboardInterrupt) -> Iterator[npt.NDArray[np.uint8]]:
        yield from held
        raise stop

    try:
        for chunk in coming:
            held.append(chunk)
            size += len(chunk)
            if size >= _SMALL_BYTES:
                return chain(held, coming), False
    except KeyboardInterrupt as stop:
        return interrupted(stop), True
    return iter(held), True


@contextmanager
def whole_chunk() -> Iterator[None]:
    """An interrupt (Ctrl-C) is raised at the end: a chunk is summed up whole or not at all. A second one is at once."""
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []

    def note(number: int, _frame: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class _ShortTurns:
    """Threads take turns more often while any log is being read, and as often as before after the last one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._reading = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._reading:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, _TURN_S))
            self._reading += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._reading -= 1
            if not self._reading:
                sys.setswitchinterval(self._usual_s)


_short_turns = _ShortTurns()


def parts_of(fast: FastPath, coming: Iterable[npt.NDArray[np.uint8]]) -> Generator[ChunkPart]:
    """What the fast path finds in each chunk; it reads the next ones while the last is being summed up here.

    The compiled loop does not hold the GIL, what stands around it does. Summing up one chunk takes less than the
    interpreter's usual switch interval (5 ms): left to it, neither thread would run beside the other. Reading the file
    stays in this thread, where it can be interrupted.
    """
    waiting: SimpleQueue[npt.NDArray[np.uint8] | None] = SimpleQueue()
    results: SimpleQueue[ChunkPart | BaseException | None] = SimpleQueue()

    def work() -> None:
        # here, because only the main thread can be interrupted between the two
        with _short_turns:
            while (chunk := waiting.get()) is not None:
                try:
                    position = 0
                    while position < len(chunk):
                        position, part = fast.read(chunk, position)
                        results.put(part)
                except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
                    results.put(error)
                results.put(None)

    def oldest() -> Iterator[ChunkPart]:
        while (part := results.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part

    def end() -> None:
        waiting.put(None)
        if worker.is_alive():
            worker.join()

    # a daemon: an interrupt that comes before it is told to stop must not hold the process's end
    worker = Thread(target=work, name="log reader", daemon=True)
    ahead = 0
    try:
        worker.start()
        for chunk in coming:
            waiting.put(chunk)
            ahead += 1
            if ahead > _AHEAD:
                yield from oldest()
                ahead -= 1
        for _ in range(ahead):
            yield from oldest()
    except KeyboardInterrupt:
        end()
        # what had been read is summed up
        while not results.empty():
            if (part := results.get()) is not None and not isinstance(part, BaseException):
                yield part
        raise
    finally:
        end()
