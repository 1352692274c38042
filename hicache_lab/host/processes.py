"""A process as it can be found again later, and the end of a process group.

A number alone is not enough: after a process has ended, another one may get it (in a container soon, and often).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from hicache_lab.base.errors import HostError

TERM_SECONDS = 15.0
KILL_SECONDS = 10.0


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if there is no such living process.

    Source: field 22 of /proc/PID/stat; without /proc it is the second since 1970.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        with contextlib.suppress(psutil.Error):
            return None if Path("/proc/self/stat").exists() else int(psutil.Process(pid).create_time())
        return None
    return None if fields[0] == "Z" else int(fields[19])


def boot_id() -> str:
    """Names the time since the machine was started; empty where the kernel does not tell."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclass(frozen=True)
class ProcessId:
    """A process: its number, its start in clock ticks since boot, and that boot."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that has this number now."""
        return cls(pid, start_ticks(pid) or 0, boot_id())

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return start_ticks(self.pid) == self.start_ticks and boot_id() == self.boot_id


def end_group(
    leader: ProcessId, term_seconds: float = TERM_SECONDS, kill_seconds: float = KILL_SECONDS
) -> Literal["gone", "TERM", "KILL"]:
    """End the process group that ``leader`` leads: TERM, then KILL to what is left.

    Returns:
        What it took; ``gone``: nothing of it was left.

    Raises:
        HostError: something survived KILL.
    """
    members = _members(leader)
    if not members:
        return "gone"
    _signal(leader, members, signal.SIGTERM)
    if _all_gone(leader, members, term_seconds):
        return "TERM"
    left = _members(leader) or members
    _signal(leader, left, signal.SIGKILL)
    if not _all_gone(leader, left, kill_seconds):
        raise HostError(f"process group {leader.pid} survived KILL; see ps -o pid,stat,wchan")
    return "KILL"


def _members(leader: ProcessId) -> list[psutil.Process]:
    """Living processes of the group; empty if the group is not the leader's any more."""
    if boot_id() != leader.boot_id:
        return []
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == leader.pid and not _is_over(process):
                members.append(process)
    # a leader with another start time means that the number went to somebody else's group
    return members if start_ticks(leader.pid) in {None, leader.start_ticks} else []


def _is_over(process: psutil.Process) -> bool:
    """A zombie whose threads are gone too: until then its memory, perhaps gigabytes of host pool, is not free."""
    return process.status() == psutil.STATUS_ZOMBIE and len([*Path(f"/proc/{process.pid}/task").iterdir()]) <= 1


def _signal(leader: ProcessId, members: Sequence[psutil.Process], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if any(process.pid == leader.pid for process in members):
            os.killpg(leader.pid, number)
            return
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _all_gone(leader: ProcessId, members: Sequence[psutil.Process], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not _members(leader):
            return True
        psutil.wait_procs(members, timeout=0.2)
    return not _members(leader)
