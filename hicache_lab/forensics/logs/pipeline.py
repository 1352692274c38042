"""Chunks on their way to the fast path: how many there are, read while others are summed up, and interrupts."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import Lock, current_thread, main_thread
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
    from concurrent.futures import Future, ThreadPoolExecutor

    def read(chunk: npt.NDArray[np.uint8]) -> list[ChunkPart]:
        parts, position = [], 0
        with _short_turns:
            while position < len(chunk):
                position, part = fast.read(chunk, position)
                parts.append(part)
        return parts

    waiting: deque[Future[list[ChunkPart]]] = deque()

    def oldest() -> list[ChunkPart]:
        parts = waiting[0].result()
        # only now: an interrupt may come while it is waited for
        waiting.popleft()
        return parts

    with ThreadPoolExecutor(1, "log reader") as worker:
        try:
            for chunk in coming:
                waiting.append(worker.submit(read, chunk))
                if len(waiting) > _AHEAD:
                    yield from oldest()
            while waiting:
                yield from oldest()
        except KeyboardInterrupt:
            # what had been read is summed up
            while waiting:
                yield from oldest()
            raise
