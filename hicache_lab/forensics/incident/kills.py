"""Which kill belongs to which launch: by the process's name and by clocks that may be of two time zones."""

from __future__ import annotations

from datetime import timedelta

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.run import Run

# a container's clock is mostly UTC and its host's is local: time zones differ by whole half hours
ZONE_SHIFTS = sorted((timedelta(minutes=30 * n) for n in range(-28, 29) if n), key=abs)


def same_kill(reported: ev.KernelOom, own: ev.KernelOom) -> bool:
    """Whether a kill that others report is one of the kernel's own, by clocks that may be of two time zones."""
    if reported.at is None or own.at is None:
        return True
    apart = abs(reported.at - own.at)
    half_hour = timedelta(minutes=30)
    return apart <= 28 * half_hour and min(apart % half_hour, half_hour - apart % half_hour) <= timedelta(seconds=30)


def server_like(comm: str | None) -> bool:
    """Whether the kernel's name for a process may be one of SGLang's; None: the line does not say."""
    return comm is None or comm.startswith(("sglang", "python", "pt_main", "ray::"))


def is_during(kill: ev.KernelOom, run: Run, shift: timedelta = timedelta()) -> bool:
    """Whether a kill, its clock shifted, falls into a run or the ten minutes after it."""
    if kill.at is None:
        return False
    if run.first is None or run.last is None:
        return True
    return run.first - timedelta(minutes=1) <= kill.at + shift <= run.last + timedelta(minutes=10)


def is_at_the_end_of(kill: ev.KernelOom, run: Run, shift: timedelta) -> bool:
    """Whether a kill, its clock shifted, falls within five minutes of a run's last line."""
    near = timedelta(minutes=5)
    return kill.at is not None and run.last is not None and abs(kill.at + shift - run.last) <= near
