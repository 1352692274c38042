"""What is raced (`Scenario`) and what came of it (`RaceResult`): the same records for both ways."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, format_gb
from hicache_lab.preflight import Answer
from hicache_lab.sglang.releases import ReleaseRules, first_release_where, rules_for
from hicache_lab.sizing.guard import Budget, HostView, rank_budget

RankOutcome = Literal["survived", "refused", "oom_killed", "stopped"]
Outcome = Literal["fits", "refused", "oom"]
CheckOrder = Literal["rank", "reversed", "random"]

MOST_RANKS = 1024  # far beyond any host; the model's time grows with the square
NS = 10**9  # the models count time in whole nanoseconds, so a seed gives the same arrivals on every machine


@dataclass(frozen=True)
class Scenario:
    """One launch: who asks for how much, when, on which host.

    Attributes:
        rules: the SGLang release: its check, and whether its allocator rounds up.
        ranks: scheduler processes on this host.
        host_bytes: the host's RAM.
        other_bytes: RAM in use before the first rank checks.
        requested_bytes: what one rank's check compares.
        resident_bytes: what one rank's pool makes resident; None: what the release's allocator takes.
        pin_bytes_per_second: how fast one rank makes pages resident; assumed, the incident gives none.
        skew_seconds: time between one rank's check and the next one's.
        jitter_seconds: each check comes up to this much later, drawn from ``seed``.
        order: who checks first.
        seed: seed of the jitter and of a random order.
        launcher: whether a refusal ends the launch, as SGLang's launcher does when a scheduler process fails.
        teardown_seconds: from the first refusal to the end of all ranks.
        limit_bytes: what all pools may take before the kernel kills (a container's limit); None: what is available.
        cgroup_headroom_bytes: what a check that reads the container's limit finds below it; None: no container.
        ranks_per_engine: the ranks of this host that the release counts; None: all of them.
    """

    rules: ReleaseRules
    ranks: int = 8
    host_bytes: int = 449 * GB
    other_bytes: int = 4 * GB
    requested_bytes: int = 300 * GB
    resident_bytes: int | None = None
    pin_bytes_per_second: int = 2 * GB
    skew_seconds: float = 0.0
    jitter_seconds: float = 0.0
    order: CheckOrder = "rank"
    seed: int = 0
    launcher: bool = True
    teardown_seconds: float = 1.0
    limit_bytes: int | None = None
    cgroup_headroom_bytes: int | None = None
    ranks_per_engine: int | None = None

    def __post_init__(self) -> None:
        for flag, value in [
            ("--ranks", self.ranks),
            ("--host-ram", self.host_bytes),
            ("--hicache-size", self.requested_bytes),
            ("--pin-rate", self.pin_bytes_per_second),
        ]:
            if value <= 0:
                raise UsageError(f"{flag}: expected more than 0, got {value}")
        if self.ranks > MOST_RANKS:
            raise UsageError(f"--ranks: expected the ranks of one host, at most {MOST_RANKS}, got {self.ranks}")
        for flag, seconds in [
            ("--skew", self.skew_seconds),
            ("--jitter", self.jitter_seconds),
            ("--teardown", self.teardown_seconds),
        ]:
            if not 0 <= seconds < 10**6:  # also refuses nan
                raise UsageError(f"{flag}: expected seconds from 0 to 1,000,000, got {seconds}")
        if not 0 <= self.other_bytes < self.host_bytes:
            raise UsageError(
                f"--available: expected more than 0 and at most the host's RAM "
                f"({format_gb(self.host_bytes)}), got {format_gb(self.host_bytes - self.other_bytes)}"
            )
        if self.order not in ("rank", "reversed", "random"):
            raise UsageError(f"--order: expected rank, reversed or random, got {self.order!r}")

    @property
    def available_bytes(self) -> int:
        """What the first check sees."""
        return self.host_bytes - self.other_bytes

    @property
    def room_bytes(self) -> int:
        """What all pools can take together before the kernel kills."""
        return self.available_bytes if self.limit_bytes is None else min(self.limit_bytes, self.available_bytes)

    @property
    def full_bytes(self) -> int:
        """Bytes in use at which the kernel kills: the host's RAM, or less where a container is full earlier."""
        return self.other_bytes + self.room_bytes

    @property
    def pool_bytes(self) -> int:
        """What one rank makes resident."""
        if self.resident_bytes is not None:
            return self.resident_bytes
        return self.rules.resident_bytes(self.requested_bytes)

    @property
    def pin_seconds(self) -> float:
        """How long one rank takes to make its pool resident."""
        return self.pool_bytes / self.pin_bytes_per_second

    def budget(self, taken_bytes: int = 0) -> Budget:
        """What the check of one rank allows once the pools hold ``taken_bytes``."""
        headroom = self.cgroup_headroom_bytes
        return rank_budget(
            self.rules,
            HostView(
                available_bytes=max(self.available_bytes - taken_bytes, 0),
                cgroup_headroom_bytes=None if headroom is None else max(headroom - taken_bytes, 0),
                ranks_per_host=self.ranks_per_engine or self.ranks,
            ),
        )

    def arrivals_ns(self) -> tuple[int, ...]:
        """When each rank checks, in nanoseconds from the start; index = rank."""
        draw = random.Random(self.seed)
        turn = list(range(self.ranks))
        if self.order == "reversed":
            turn.reverse()
        elif self.order == "random":
            draw.shuffle(turn)
        times = [0] * self.ranks
        for place, rank in enumerate(turn):
            times[rank] = round((place * self.skew_seconds + draw.uniform(0, self.jitter_seconds)) * NS)
        return tuple(times)


@dataclass(frozen=True)
class RankResult:
    """What happened to one rank.

    Attributes:
        rank: its number.
        arrival_seconds: when it was to check.
        saw_bytes: the available memory it read; None when it was ended before its check.
        budget_bytes: what its check allowed.
        passed: the check's answer.
        peak_bytes: the most it held.
        end_seconds: when it was killed, refused or stopped; None for a survivor.
        outcome: survived, refused, oom_killed, or stopped (by the launcher after another rank's refusal).
    """

    rank: int
    arrival_seconds: float
    saw_bytes: int | None
    budget_bytes: int | None
    passed: bool | None
    peak_bytes: int
    end_seconds: float | None
    outcome: RankOutcome


@dataclass(frozen=True)
class RaceSample:
    """Memory at one moment: the host's use and each rank's resident bytes (index = rank)."""

    seconds: float
    used_bytes: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True)
class RaceResult:
    """How one race ended.

    Attributes:
        scenario: what was raced, at full size.
        provenance: "simulated" (the virtual model) or "replayed" (real processes and the kernel).
        ranks: one record a rank.
        samples: memory over time, oldest first; bytes are as they really were, i.e. divided by ``scale``.
        oom_kills: processes the kernel killed (its own count in a physical race).
        peak_bytes: the most in use at once, the host's other memory included.
        scale: how many times smaller than the scenario the bytes are.
        speed: how many times faster than the scenario the clock ran.
        kernel_lines: what the kernel's log said meanwhile, when it may be read.
        group: the memory control group used, when there was one.
    """

    scenario: Scenario
    provenance: Literal["simulated", "replayed"]
    ranks: tuple[RankResult, ...]
    samples: tuple[RaceSample, ...]
    oom_kills: int
    peak_bytes: int
    scale: int = 1
    speed: float = 1.0
    kernel_lines: tuple[str, ...] = ()
    group: str | None = None

    def _count(self, outcome: RankOutcome) -> int:
        return sum(rank.outcome == outcome for rank in self.ranks)

    @property
    def survivors(self) -> int:
        """Ranks that hold their whole pool at the end."""
        return self._count("survived")

    @property
    def refused(self) -> int:
        """Ranks whose own check said no."""
        return self._count("refused")

    @property
    def passed(self) -> int:
        """Ranks whose own check said yes."""
        return sum(rank.passed is True for rank in self.ranks)

    @property
    def outcome(self) -> Outcome:
        """``oom`` when the kernel killed, else ``refused`` when a check said no, else ``fits``."""
        if self.oom_kills:
            return "oom"
        return "refused" if self.refused else "fits"


def scenario_of_release(version: str, *, size_gb: float, **rest: Any) -> Scenario:
    """A scenario without a model: each rank asks for ``--hicache-size`` itself.

    Args:
        version: the SGLang release; its rules give the check and the allocator.
        size_gb: ``--hicache-size``, GB (1e9) per rank.
        **rest: further fields of `Scenario`.

    Raises:
        UnknownFact: the release is not known.
        UsageError: the release has no ``--hicache-size``.
    """
    rules = rules_for(version)
    if not rules.has_size_flag:
        since = first_release_where(lambda rules: rules.has_size_flag)
        raise UsageError(f"--sglang-version {version}: --hicache-size exists from {since} on")
    return Scenario(rules, requested_bytes=round(size_gb * GB), **rest)


def scenario_of_answer(answer: Answer, **rest: Any) -> Scenario:
    """The race that a verdict speaks of: its ranks, bytes, release, host and container.

    Every rank takes what the largest one takes, all its pools as one.

    Args:
        answer: a verdict whose question states a host and whose bytes are known.
        **rest: further fields of `Scenario`, such as ``skew_seconds``.

    Raises:
        UsageError: no host, or no bytes to ask for.
    """
    question = answer.question
    if question.host is None or answer.rank is None:
        raise UsageError("a race needs the host's memory (--host-ram, --available) and pools whose bytes are known")
    view = question.view()
    return Scenario(
        question.rules,
        ranks=answer.ranks_on_host,
        host_bytes=question.host.total_bytes,
        other_bytes=question.host.total_bytes - view.available_bytes,
        requested_bytes=answer.per_rank_bytes,
        resident_bytes=answer.rank.resident_bytes(question.rules),
        limit_bytes=question.limit_bytes,
        cgroup_headroom_bytes=view.cgroup_headroom_bytes,
        ranks_per_engine=view.ranks_per_host,
        **rest,
    )
