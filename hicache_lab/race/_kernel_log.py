"""What the kernel's log says while a race runs, where it may be read."""

from __future__ import annotations

import os
from pathlib import Path


class KernelLog:
    """The kernel's messages from now on, where they may be read."""

    def __init__(self, device: Path = Path("/dev/kmsg")) -> None:
        self._fd: int | None = None
        try:
            self._fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:  # not allowed, or no such device: the scenario does without
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def lines(self, group_name: str) -> tuple[str, ...]:
        """What was said of this group since, oldest first; closes the log."""
        if self._fd is None:
            return ()
        found: list[str] = []
        try:
            while record := os.read(self._fd, 8192):
                text = record.decode(errors="replace").split(";", 1)[-1].splitlines()[0]
                if (text.startswith("oom-kill:") and group_name in text) or (
                    text.startswith("Memory cgroup out of memory") and found and f" {_pid(found[-1])} " in text
                ):
                    found.append(text)
        except BlockingIOError:  # the end
            pass
        except OSError:  # overrun: older messages were lost
            pass
        finally:
            os.close(self._fd)
            self._fd = None
        return tuple(found)


def _pid(line: str) -> str:
    """The killed process's id in the kernel's ``oom-kill:`` line."""
    return next((word[4:] for word in line.split(",") if word.startswith("pid=")), "")
