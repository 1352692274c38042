"""Ends a race's control group: kill what is in it, remove it. A process of its own, standard library only.

The process waits for its standard input to close, which happens at any exit of the race, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path


def sweep(group: Path, patience_seconds: float = 10.0) -> bool:
    """Kill every process in ``group`` and remove it; True when it is gone."""
    deadline = time.monotonic() + patience_seconds
    while group.exists():
        try:
            group.rmdir()
            break
        except OSError:  # still populated
            pass
        try:
            members = [int(word) for word in (group / "cgroup.procs").read_text().split()]
        except OSError:
            members = []
        for pid in members:
            # 0 is a process of another pid namespace, and os.kill(0) would mean ourselves
            if pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return not group.exists()


def withdraw(parent: Path) -> None:
    """Take back the memory controller that a race handed to the groups below ``parent`` (cgroup v2).

    Not while another race's group is there: the kernel would take its limit away without a word.
    """
    if any(parent.glob("hicache-lab-*")):
        return
    with contextlib.suppress(OSError):  # a group below hands it on by now: leave it
        (parent / "cgroup.subtree_control").write_text("-memory")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group
    sys.stdin.read()
    gone = sweep(Path(sys.argv[1]))
    if len(sys.argv) > 2:
        withdraw(Path(sys.argv[2]))
    sys.exit(0 if gone else 1)
