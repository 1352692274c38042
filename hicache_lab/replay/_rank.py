"""One rank of a physical replay: joins the group, checks, makes pages resident. Standard library only.

Commands on standard input, one a line: ``check``, ``pin``, and ``take N`` (resident at once, for the host's
other memory); its end means exit. Replies on standard output: ``ready``, ``saw BYTES BUDGET yes|no``,
``full``, or ``failed REASON``.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import sys
import time
from pathlib import Path

CHUNK = 1 << 16


def say(words: str) -> None:
    """One reply line."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def commanded(wait_seconds: float) -> bool:
    """Whether standard input has something to read (or is closed) within the time."""
    return bool(select.select([sys.stdin], [], [], max(wait_seconds, 0.0))[0])


def take(n_bytes: int, bytes_per_second: float) -> mmap.mmap | None:
    """Make ``n_bytes`` resident at a rate; None when told to stop meanwhile."""
    pool = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pool.madvise(mmap.MADV_NOHUGEPAGE)
    page, start = b"\x01" * CHUNK, time.monotonic()
    for offset in range(0, n_bytes, CHUNK):
        size = min(CHUNK, n_bytes - offset)
        pool[offset : offset + size] = page[:size]
        if commanded(start + (offset + size) / bytes_per_second - time.monotonic()):
            return None
    return pool


def main() -> None:
    """Follow the commands until standard input ends."""
    plan = json.loads(sys.argv[1])
    group = Path(plan["group"])
    try:
        if not plan["other"]:
            # the kernel is to choose among the ranks, not the host's other memory
            Path("/proc/self/oom_score_adj").write_text("500")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        say(f"failed {error.strerror} ({error.filename})")
        return
    say("ready")
    pool = None
    while line := os.read(sys.stdin.fileno(), 64):
        words = line.decode().split()
        if words[0] == "check":
            used = int((group / plan["usage_file"]).read_text())
            seen = max(plan["limit_bytes"] - used, 0)
            budget = (seen - plan["reserve_bytes"]) // plan["divisor"]
            say(f"saw {seen} {budget} {'yes' if plan['requested_bytes'] <= budget else 'no'}")
        elif words[0] == "pin":
            pool = take(plan["pool_bytes"], plan["bytes_per_second"])
            if pool is None:
                return
            say("full")
        elif words[0] == "take":
            pool = take(int(words[1]), 1e12)
            say("full")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
