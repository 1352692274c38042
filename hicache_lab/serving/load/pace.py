"""How fast to send and when to stop, and whether this machine was fit to measure."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from hicache_lab.base.errors import UsageError

LAG_PERIOD_SECONDS = 0.01
# the client's own lateness goes straight into TTFT and inter-token times
BUSY_LAG_P50_SECONDS = 0.005
BUSY_LAG_P99_SECONDS = 0.100


@dataclass(frozen=True)
class Pace:
    """Closed loop, open loop, or the trace's own clock.

    ``Pace(concurrency=8)`` keeps eight sessions running; ``Pace(rate_per_s=5.0)`` starts five a second
    whatever the answers do.

    Attributes:
        concurrency: sessions that run at once (closed loop); with a rate, the most that may.
        rate_per_s: sessions started per second, Poisson (open loop).
        by_trace: start each session at its own time.
        seed: of the arrivals.
    """

    concurrency: int | None = None
    rate_per_s: float | None = None
    by_trace: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency: expected 1 or more, got {self.concurrency}")
        if self.rate_per_s is not None and not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise UsageError(f"rate_per_s: expected a number above 0, got {self.rate_per_s}")
        if self.rate_per_s is not None and self.by_trace:
            raise UsageError("rate_per_s: the trace has its own arrival times; leave one out")
        if self.concurrency is None and self.rate_per_s is None and not self.by_trace:
            raise UsageError("concurrency: give it, or rate_per_s, or replay a trace's own times")

    def arrivals(self) -> Callable[[float | None], float | None]:
        """From a session's own time to its start after the phase began; None: at once."""
        if self.by_trace:
            return lambda at_s: at_s or 0.0
        if self.rate_per_s is None:
            return lambda _at_s: None
        draw, rate, clock = random.Random(self.seed), self.rate_per_s, 0.0

        def poisson(_at_s: float | None) -> float:
            nonlocal clock
            clock += draw.expovariate(rate)
            return clock

        return poisson


@dataclass(frozen=True)
class Limits:
    """When to stop, whatever the plan says.

    Attributes:
        duration_s: start no request after this long.
        max_requests: hard cap on requests sent, warm-up included.
        max_tokens: hard cap on prompt and answer tokens asked for, warm-up included.
        lost_after: give the server up after so many failures in a row.
    """

    duration_s: float | None = None
    max_requests: int = 100_000
    max_tokens: int = 500_000_000
    lost_after: int = 20

    def __post_init__(self) -> None:
        if self.duration_s is not None and not self.duration_s > 0:
            raise UsageError(f"duration_s: expected a number above 0, got {self.duration_s}")
        for name in ("max_requests", "max_tokens", "lost_after"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True)
class Lag:
    """How late this process ran its own timers while it measured, in seconds; and the load average before."""

    p50_s: float
    p99_s: float
    max_s: float
    load_before: float

    @property
    def too_busy(self) -> str | None:
        """Why the latencies cannot be trusted, or None."""
        if self.p50_s <= BUSY_LAG_P50_SECONDS and self.p99_s <= BUSY_LAG_P99_SECONDS:
            return None
        return (
            f"this machine was too busy to measure: the client itself ran {1000 * self.p50_s:.1f} ms late at "
            f"the median and {1000 * self.p99_s:.0f} ms at p99 (load average before: {self.load_before:.1f} "
            f"on {os.cpu_count()} cores); TTFT and inter-token times are too long by about that much"
        )


class LagMeter:
    """Sleeps in small steps beside the load and notes by how much each was overslept."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._load_before = os.getloadavg()[0]

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = time.perf_counter() + LAG_PERIOD_SECONDS
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            self._late.append(max(time.perf_counter() - due, 0.0))

    @property
    def lag(self) -> Lag:
        """What was seen so far."""
        late = sorted(self._late) or [0.0]

        def at(share: float) -> float:
            return late[min(int(share * len(late)), len(late) - 1)]

        return Lag(at(0.5), at(0.99), late[-1], self._load_before)
