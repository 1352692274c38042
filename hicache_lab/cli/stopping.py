"""How a command ends when a scheduler stops it: cron, systemd, Slurm and Kubernetes send TERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def term_interrupts() -> Iterator[None]:
    """Within the block TERM closes runs and stops servers as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
