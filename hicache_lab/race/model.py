"""The allocation race as arithmetic: ranks check, make pages resident, and the host runs out or does not.

Deterministic: integer bytes, integer nanoseconds, ties by rank. What it assumes: available memory is the
host's RAM minus what is resident (the kernel's own watermarks are in ``other_bytes``); a rank makes pages
resident at a constant rate; the kernel kills the process with the most resident pages, the last one among
equals (Linux ``mm/oom_kill.c:oom_evaluate_task``), and gets its pages back at once; the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hicache_lab.base.units import GB
from hicache_lab.race.scenario import NS, Fate, Outcome, RankStory, Replay, Sample, Story


@dataclass
class _Rank:
    number: int
    arrival: int
    saw: int | None = None
    passed: bool | None = None
    started: int | None = None  # pinning since; None before and after
    held: int = 0  # resident while it is not pinning
    peak: int = 0
    end: int | None = None
    fate: Fate = "survived"

    @property
    def waiting(self) -> bool:
        return self.passed is None and self.end is None


@dataclass
class _Host:
    """The race's state; time only moves forward."""

    story: Story
    ranks: list[_Rank]
    now: int = 0
    oom_kills: int = 0
    peak: int = 0
    stop_at: int | None = None
    samples: list[Sample] = field(default_factory=list)

    def resident(self, rank: _Rank, at: int) -> int:
        if rank.started is None:
            return rank.held
        return min(self.story.pool_bytes, self.story.pin_bytes_per_second * (at - rank.started) // NS)

    def pinned(self, at: int) -> int:
        return sum(self.resident(rank, at) for rank in self.ranks)

    def done_at(self, rank: _Rank) -> int:
        assert rank.started is not None
        return rank.started - (-self.story.pool_bytes * NS // self.story.pin_bytes_per_second)

    def full_at(self) -> int | None:
        """When the host has nothing left at the present rate; None when nobody is pinning."""
        pinning = [rank.started for rank in self.ranks if rank.started is not None]
        if not pinning:
            return None
        settled = sum(rank.held for rank in self.ranks if rank.started is None)
        missing = (self.story.available_bytes - settled) * NS + self.story.pin_bytes_per_second * sum(pinning)
        return max(self.now, -(-missing // (self.story.pin_bytes_per_second * len(pinning))))

    def record(self) -> None:
        held = tuple(self.resident(rank, self.now) for rank in self.ranks)
        for rank, bytes_now in zip(self.ranks, held, strict=True):
            rank.peak = max(rank.peak, bytes_now)
        # the last page that does not fit is the one the kernel kills for: never more than the RAM is in use
        used = min(self.story.host_bytes, self.story.other_bytes + sum(held))
        self.peak = max(self.peak, used)
        self.samples.append(Sample(self.now / NS, used, held))

    def end(self, rank: _Rank, fate: Fate) -> None:
        rank.started, rank.held, rank.end, rank.fate = None, 0, self.now, fate

    def check(self, rank: _Rank) -> None:
        story = self.story
        rank.saw = max(story.available_bytes - self.pinned(self.now), 0)
        rank.passed = story.guard.allows(story.requested_bytes, rank.saw, story.ranks)
        if rank.passed:
            rank.started = self.now
            return
        self.end(rank, "refused")
        if story.launcher and self.stop_at is None:
            self.stop_at = self.now + round(story.teardown_seconds * NS)


def simulate(story: Story) -> Replay:
    """Tell the story without a machine.

    Args:
        story: the launch; full-size bytes.

    Returns:
        A `Replay` with provenance ``simulated``; its samples are the corner points of the memory curve.
    """
    host = _Host(story, [_Rank(number, at) for number, at in enumerate(story.arrivals_ns())])
    host.record()
    while (step := _next_step(host)) is not None:
        host.now, kind = step
        host.record()
        if kind == "check":
            # everybody due now reads before anybody's pages count: that is what makes the race
            for rank in [r for r in host.ranks if r.waiting and r.arrival == host.now]:
                host.check(rank)
        elif kind == "kill":
            victim = max((r for r in host.ranks), key=lambda r: (host.resident(r, host.now), r.number))
            host.end(victim, "oom_killed")
            host.oom_kills += 1
        elif kind == "stop":
            for rank in [r for r in host.ranks if r.end is None]:
                host.end(rank, "stopped")
        else:
            for rank in [r for r in host.ranks if r.started is not None and host.done_at(r) <= host.now]:
                rank.started, rank.held = None, story.pool_bytes
        host.record()
    return Replay(
        story=story,
        provenance="simulated",
        ranks=tuple(_told(rank, story) for rank in host.ranks),
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


def _told(rank: _Rank, story: Story) -> RankStory:
    return RankStory(
        rank=rank.number,
        arrival_seconds=rank.arrival / NS,
        saw_bytes=rank.saw,
        budget_bytes=None if rank.saw is None else story.guard.budget_bytes(rank.saw, story.ranks),
        passed=rank.passed,
        peak_bytes=rank.peak,
        end_seconds=None if rank.end is None else rank.end / NS,
        fate=rank.fate,
    )


@dataclass(frozen=True)
class RaceMap:
    """Outcome by arrival skew and size: ``outcomes[i][j]`` is for ``skews_seconds[i]``, ``sizes_gb[j]``."""

    story: Story
    skews_seconds: tuple[float, ...]
    sizes_gb: tuple[float, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]


def race_map(story: Story, skews_seconds: Iterable[float], sizes_gb: Iterable[float]) -> RaceMap:
    """Tell the story for every pair of arrival skew and ``--hicache-size``.

    Args:
        story: everything else; an allocator that rounds up keeps its ratio of resident to requested bytes.
        skews_seconds: seconds between one rank's check and the next.
        sizes_gb: sizes per rank, GB (1e9).
    """
    skews, sizes = tuple(skews_seconds), tuple(sizes_gb)
    rows = []
    for skew in skews:
        row: list[Outcome] = []
        for size in sizes:
            requested = round(size * GB)
            resident = requested * story.pool_bytes // story.requested_bytes
            row.append(
                simulate(replace(story, skew_seconds=skew, requested_bytes=requested, resident_bytes=resident)).outcome
            )
        rows.append(tuple(row))
    return RaceMap(story, skews, sizes, tuple(rows))


def memory_at(samples: Sequence[Sample], seconds: float) -> int:
    """The used bytes at a moment, between a curve's corner points (the last of several at one moment)."""
    before = samples[0]
    for sample in samples:
        if sample.seconds > seconds:
            span = sample.seconds - before.seconds
            return before.used_bytes + round(
                (sample.used_bytes - before.used_bytes) * (seconds - before.seconds) / span
            )
        before = sample
    return before.used_bytes
