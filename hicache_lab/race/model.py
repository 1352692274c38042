"""The allocation race as arithmetic: ranks check, make pages resident, and the host runs out or does not.

Deterministic: integer bytes, integer nanoseconds, ties by rank. What it assumes: available memory is the
host's RAM minus what is resident (the kernel's own watermarks are in ``other_bytes``); a rank makes pages
resident at a constant rate; the kernel kills the process with the most resident pages, the last one among
equals (Linux ``mm/oom_kill.c:oom_evaluate_task``), and gets its pages back at once; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hicache_lab.base.units import GB
from hicache_lab.race.scenario import NS, Outcome, RaceResult, RaceSample, RankOutcome, RankResult, Scenario
from hicache_lab.sizing.guard import Budget


@dataclass
class _Rank:
    number: int
    arrival: int
    budget: Budget | None = None  # of its check, None before
    passed: bool | None = None
    started: int | None = None  # pinning since; None before and after
    held: int = 0  # resident while it is not pinning
    peak: int = 0
    end: int | None = None
    outcome: RankOutcome = "survived"

    @property
    def waiting(self) -> bool:
        return self.passed is None and self.end is None

    def result(self) -> RankResult:
        return RankResult(
            rank=self.number,
            arrival_seconds=self.arrival / NS,
            saw_bytes=None if self.budget is None else self.budget.available_bytes,
            budget_bytes=None if self.budget is None else self.budget.budget_bytes,
            passed=self.passed,
            peak_bytes=self.peak,
            end_seconds=None if self.end is None else self.end / NS,
            outcome=self.outcome,
        )


@dataclass
class _Host:
    """The race's state; time only moves forward."""

    scenario: Scenario
    ranks: list[_Rank]
    now: int = 0
    oom_kills: int = 0
    peak: int = 0
    stop_at: int | None = None
    samples: list[RaceSample] = field(default_factory=list)

    def resident(self, rank: _Rank) -> int:
        if rank.started is None:
            return rank.held
        return min(self.scenario.pool_bytes, self.scenario.pin_bytes_per_second * (self.now - rank.started) // NS)

    def done_at(self, rank: _Rank) -> int:
        assert rank.started is not None
        return rank.started - (-self.scenario.pool_bytes * NS // self.scenario.pin_bytes_per_second)

    def full_at(self) -> int | None:
        """When the host has nothing left at the present rate; None when nobody is pinning."""
        settled = sum(rank.held for rank in self.ranks if rank.started is None)
        if settled > self.scenario.room_bytes:
            return self.now  # pools that became full within the same nanosecond
        pinning = [rank.started for rank in self.ranks if rank.started is not None]
        if not pinning:
            return None
        missing = (self.scenario.room_bytes - settled) * NS + self.scenario.pin_bytes_per_second * sum(pinning)
        return max(self.now, -(-missing // (self.scenario.pin_bytes_per_second * len(pinning))))

    def record(self) -> None:
        held = tuple(self.resident(rank) for rank in self.ranks)
        for rank, bytes_now in zip(self.ranks, held, strict=True):
            rank.peak = max(rank.peak, bytes_now)
        # the last page that does not fit is the one the kernel kills for: never more than the limit is in use
        used = min(self.scenario.full_bytes, self.scenario.other_bytes + sum(held))
        self.peak = max(self.peak, used)
        self.samples.append(RaceSample(self.now / NS, used, held))

    def end(self, rank: _Rank, outcome: RankOutcome) -> None:
        rank.started, rank.held, rank.end, rank.outcome = None, 0, self.now, outcome

    def check(self, rank: _Rank) -> None:
        scenario = self.scenario
        rank.budget = scenario.budget(sum(self.resident(other) for other in self.ranks))
        rank.passed = scenario.requested_bytes <= rank.budget.budget_bytes
        if rank.passed:
            rank.started = self.now
            return
        self.end(rank, "refused")
        if scenario.launcher and self.stop_at is None:
            self.stop_at = self.now + round(scenario.teardown_seconds * NS)


def simulate(scenario: Scenario) -> RaceResult:
    """Race without a machine.

    Args:
        scenario: the launch; full-size bytes.

    Returns:
        A `RaceResult` with provenance ``simulated``; its samples are the corner points of the memory curve.
    """
    host = _Host(scenario, [_Rank(number, at) for number, at in enumerate(scenario.arrivals_ns())])
    host.record()
    while (step := _next_step(host)) is not None:
        host.now, kind = step
        host.record()
        if kind == "check":
            # everybody due now reads before anybody's pages count: that is what makes the race
            for rank in [r for r in host.ranks if r.waiting and r.arrival == host.now]:
                host.check(rank)
        elif kind == "kill":
            victim = max(host.ranks, key=lambda r: (host.resident(r), r.number))
            host.end(victim, "oom_killed")
            host.oom_kills += 1
        elif kind == "stop":
            for rank in [r for r in host.ranks if r.end is None]:
                host.end(rank, "stopped")
        else:
            for rank in [r for r in host.ranks if r.started is not None and host.done_at(r) <= host.now]:
                rank.started, rank.held = None, scenario.pool_bytes
        host.record()
    return RaceResult(
        scenario=scenario,
        provenance="simulated",
        ranks=tuple(rank.result() for rank in host.ranks),
        samples=tuple(host.samples),
        oom_kills=host.oom_kills,
        peak_bytes=host.peak,
    )


def _next_step(host: _Host) -> tuple[int, str] | None:
    steps = [(rank.arrival, 2, "check") for rank in host.ranks if rank.waiting]
    steps += [(host.done_at(rank), 0, "done") for rank in host.ranks if rank.started is not None]
    full = host.full_at()
    if full is not None:
        steps.append((full, 1, "kill"))
    if host.stop_at is not None and any(rank.end is None for rank in host.ranks):
        steps.append((host.stop_at, 3, "stop"))
    if not steps:
        return None
    at, _, kind = min(steps)
    return at, kind


@dataclass(frozen=True)
class RaceMap:
    """Outcome by arrival skew and size: ``outcomes[i][j]`` is for ``skews_seconds[i]``, ``sizes_gb[j]``."""

    scenario: Scenario
    skews_seconds: tuple[float, ...]
    sizes_gb: tuple[float, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]


def race_map(scenario: Scenario, skews_seconds: Iterable[float], sizes_gb: Iterable[float]) -> RaceMap:
    """Simulate every pair of arrival skew and ``--hicache-size``.

    Args:
        scenario: everything else; resident bytes that it states keep their ratio to the requested ones.
        skews_seconds: seconds between one rank's check and the next.
        sizes_gb: sizes per rank, GB (1e9).
    """
    skews, sizes = tuple(skews_seconds), tuple(sizes_gb)

    def outcome(skew: float, size_gb: float) -> Outcome:
        requested, stated = round(size_gb * GB), scenario.resident_bytes
        resident = None if stated is None else requested * stated // scenario.requested_bytes
        one = replace(scenario, skew_seconds=skew, requested_bytes=requested, resident_bytes=resident)
        return simulate(one).outcome

    return RaceMap(scenario, skews, sizes, tuple(tuple(outcome(skew, size) for size in sizes) for skew in skews))
