"""A series of memory samples while something runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from hicache_lab.base.errors import HicacheLabError, HostError, UsageError
from hicache_lab.host.cgroups import PROC, SYS, cgroup_usage_file


@dataclass(frozen=True)
class MemorySample:
    """One look at the host: seconds since the epoch, bytes."""

    time_s: float
    available_bytes: int
    used_bytes: int
    cgroup_usage_bytes: int | None = None


def _psutil_memory() -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.total, memory.available


class MemorySampler:
    """Samples the host's memory every ``interval_s`` seconds, in a thread, between ``with`` and its end.

    Args:
        interval_s: seconds between two samples.
        clock: the time of a sample, seconds since the epoch.
        memory: returns total and available bytes; the default asks psutil.
        proc_root: stands for ``/proc`` (where the own control group is looked up).
        sys_root: stands for ``/sys``.

    Raises:
        UsageError: an interval that is not above 0.
        HostError: at the end of the block, when a sample in between could not be taken.
    """

    def __init__(
        self,
        interval_s: float = 0.5,
        *,
        clock: Callable[[], float] = time.time,
        memory: Callable[[], tuple[int, int]] = _psutil_memory,
        proc_root: Path = PROC,
        sys_root: Path = SYS,
    ) -> None:
        if not interval_s > 0:
            raise UsageError(f"interval_s: expected seconds above 0, got {interval_s}")
        self.interval_s = interval_s
        self._clock, self._memory = clock, memory
        self._usage_file = cgroup_usage_file(proc_root, sys_root=sys_root)
        self._samples: list[MemorySample] = []
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    @property
    def samples(self) -> tuple[MemorySample, ...]:
        """What was sampled so far, oldest first."""
        return tuple(self._samples)

    def sample(self) -> MemorySample:
        """Take one sample now, keep it and return it."""
        total, available = self._memory()
        taken = MemorySample(self._clock(), available, total - available, self._cgroup_usage())
        self._samples.append(taken)
        return taken

    def _cgroup_usage(self) -> int | None:
        if self._usage_file is None:
            return None
        try:
            return int(self._usage_file.read_text())
        except (OSError, ValueError):
            return None  # the group has gone: the samples of the host go on

    @property
    def error(self) -> Exception | None:
        """What has stopped the sampling, or None."""
        return self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.interval_s):
                self.sample()
        except (OSError, psutil.Error, HicacheLabError) as error:
            self._error = error

    def __enter__(self) -> MemorySampler:
        self._stop.clear()
        self.sample()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise HostError(f"memory sampling stopped: {self._error}") from self._error
        self.sample()
