"""One rank of a physical race: joins the group, checks, makes pages resident. Standard library only.

Commands on standard input, one a line: ``check``, ``pin [N ...]`` (wait at each of these sizes for ``go``), and
``take N`` (resident at once, for the host's other memory); its end means exit. Replies on standard output:
``ready``, ``saw BYTES BUDGET yes|no``, ``at N``, ``full``, or ``failed REASON``.
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


def reply(text: str) -> None:
    """One reply line, unbuffered: nothing is left to write when the reader has gone."""
    os.write(sys.stdout.fileno(), f"{text}\n".encode())


def next_command() -> list[str]:
    """The next command and its arguments; empty at the end of standard input."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            return []
        line += byte
    return line.decode().split()


def has_command(wait_seconds: float) -> bool:
    """Whether standard input has something to read (or is closed) within the time."""
    return bool(select.select([sys.stdin], [], [], max(wait_seconds, 0.0))[0])


def take(n_bytes: int, bytes_per_second: float, stops: list[int]) -> mmap.mmap | None:
    """Make ``n_bytes`` resident at a rate, waiting at each of ``stops``; None when asked to end meanwhile."""
    pool = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pool.madvise(mmap.MADV_NOHUGEPAGE)
    page, start, offset = b"\x01" * CHUNK, time.monotonic(), 0
    while offset < n_bytes:
        while stops and stops[0] <= offset:
            reply(f"at {stops.pop(0)}")
            if next_command() != ["go"]:
                return None
            start = time.monotonic() - offset / bytes_per_second
        size = min(CHUNK, n_bytes - offset, stops[0] - offset if stops else CHUNK)
        pool[offset : offset + size] = page[:size]
        offset += size
        if has_command(start + offset / bytes_per_second - time.monotonic()):
            return None
    return pool


def main() -> None:
    """Follow the commands until standard input ends.

    The plan in the first argument comes from the package: the reserve and the divisor of the release's check are in it.
    """
    plan = json.loads(sys.argv[1])
    group = Path(plan["group"])
    try:
        if not plan["other"]:
            # the kernel is to choose among the ranks, not the host's other memory
            Path("/proc/self/oom_score_adj").write_text("500")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        reply(f"failed {error.strerror} ({error.filename})")
        return
    reply("ready")
    pool = None
    while command := next_command():
        if command[0] == "check":
            used = int((group / plan["usage_file"]).read_text())
            available = max(plan["sees_bytes"] - used, 0)
            budget = (available - plan["reserve_bytes"]) // plan["divisor"]
            reply(f"saw {available} {budget} {'yes' if plan['requested_bytes'] <= budget else 'no'}")
            continue
        size, rate = (int(command[1]), 1e12) if command[0] == "take" else (plan["pool_bytes"], plan["bytes_per_second"])
        try:
            pool = take(size, rate, [int(stop) for stop in command[1:]] if command[0] == "pin" else [])
        except OSError as error:  # a limit of its own (ulimit), or no overcommit
            reply(f"failed {error.strerror}: no {size:,} bytes of address space")
            return
        if pool is None:
            return
        reply("full")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main()
