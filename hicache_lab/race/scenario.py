"""What is re-enacted (`Story`) and what came of it (`Replay`): the same records for both ways."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Literal

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, format_gb
from hicache_lab.sglang.releases import RESERVE_BYTES, first_release_with, rules_for

Fate = Literal["survived", "refused", "oom_killed", "stopped"]
Outcome = Literal["fits", "refused", "oom"]
Order = Literal["rank", "reversed", "random"]

MOST_RANKS = 1024  # far beyond any host; the model's time grows with the square
NS = 10**9  # the models count time in whole nanoseconds, so the same seed gives the same story on every machine


@dataclass(frozen=True)
class Guard:
    """What one rank compares with its request before it takes the pool.

    Attributes:
        release: the SGLang release it stands for.
        reserve_bytes: what the check leaves to others (10 GiB in every known release).
        divides_by_ranks: whether the rest is first divided by the ranks of this host (0.5.19 and later).
        source: file and function it was read from.
        warning: said when that release was not examined itself.
    """

    release: str
    reserve_bytes: int = RESERVE_BYTES
    divides_by_ranks: bool = False
    source: str = ""
    warning: str | None = None

    def budget_bytes(self, available_bytes: int, ranks_per_host: int) -> int:
        """The most that one rank may ask for; negative when less than the reserve is available."""
        rest = available_bytes - self.reserve_bytes
        return rest // ranks_per_host if self.divides_by_ranks else rest

    def allows(self, requested_bytes: int, available_bytes: int, ranks_per_host: int) -> bool:
        """Whether the request passes; a request equal to the budget passes."""
        return requested_bytes <= self.budget_bytes(available_bytes, ranks_per_host)


@dataclass(frozen=True)
class Story:
    """One launch: who asks for how much, when, on which host.

    Attributes:
        guard: the check that each rank makes.
        ranks: scheduler processes on this host.
        host_bytes: the host's RAM.
        other_bytes: RAM in use before the first rank checks.
        requested_bytes: what one rank's check compares.
        resident_bytes: what one rank's pool makes resident (more where an allocator rounds up).
        pin_bytes_per_second: how fast one rank makes pages resident; assumed, the incident gives none.
        skew_seconds: time between one rank's check and the next one's.
        jitter_seconds: each check comes up to this much later, drawn from ``seed``.
        order: who checks first.
        seed: seed of the jitter and of a random order.
        launcher: whether a refusal ends the launch, as SGLang's launcher does when a scheduler process fails.
        teardown_seconds: from the first refusal to the end of all ranks.
    """

    guard: Guard
    ranks: int = 8
    host_bytes: int = 449 * GB
    other_bytes: int = 4 * GB
    requested_bytes: int = 300 * GB
    resident_bytes: int | None = None
    pin_bytes_per_second: int = 2 * GB
    skew_seconds: float = 0.0
    jitter_seconds: float = 0.0
    order: Order = "rank"
    seed: int = 0
    launcher: bool = True
    teardown_seconds: float = 1.0

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
    def pool_bytes(self) -> int:
        """What one rank makes resident."""
        return self.requested_bytes if self.resident_bytes is None else self.resident_bytes

    @property
    def pin_seconds(self) -> float:
        """How long one rank takes to make its pool resident."""
        return self.pool_bytes / self.pin_bytes_per_second

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
class RankStory:
    """What happened to one rank.

    Attributes:
        rank: its number.
        arrival_seconds: when it was to check.
        saw_bytes: the available memory it read; None when it was ended before its check.
        budget_bytes: what its check allowed.
        passed: the check's answer.
        peak_bytes: the most it held.
        end_seconds: when it was killed, refused or stopped; None for a survivor.
        fate: survived, refused, oom_killed, or stopped (by the launcher after another rank's refusal).
    """

    rank: int
    arrival_seconds: float
    saw_bytes: int | None
    budget_bytes: int | None
    passed: bool | None
    peak_bytes: int
    end_seconds: float | None
    fate: Fate


@dataclass(frozen=True)
class Sample:
    """Memory at one moment: the host's use and each rank's resident bytes (index = rank)."""

    seconds: float
    used_bytes: int
    rank_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """The outcome of one story.

    Attributes:
        story: what was asked, at full size.
        provenance: "simulated" (the virtual model) or "replayed" (real processes and the kernel).
        ranks: one record a rank.
        samples: memory over time, oldest first; bytes are as they really were, i.e. divided by ``scale``.
        oom_kills: processes the kernel killed (its own count in a physical replay).
        peak_bytes: the most in use at once, the host's other memory included.
        scale: how many times smaller than the story the bytes are.
        speed: how many times faster than the story the clock ran.
        kernel_lines: what the kernel's log said meanwhile, when it may be read.
        group: the memory control group used, when there was one.
    """

    story: Story
    provenance: Literal["simulated", "replayed"]
    ranks: tuple[RankStory, ...]
    samples: tuple[Sample, ...]
    oom_kills: int
    peak_bytes: int
    scale: int = 1
    speed: float = 1.0
    kernel_lines: tuple[str, ...] = field(default=())
    group: str | None = None

    def _count(self, fate: Fate) -> int:
        return sum(rank.fate == fate for rank in self.ranks)

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


def story_of_release(version: str, *, size_gb: float, ranks: int = 8, **rest: Any) -> Story:
    """A story whose check and allocator are those of a release.

    Args:
        version: the SGLang release; its rules say what the check divides and whether torch's pinned allocator
            rounds each pool up to a power of two.
        size_gb: ``--hicache-size``, GB (1e9) per rank.
        ranks: scheduler processes on this host.
        rest: further fields of `Story`.

    Raises:
        UnknownFact: the release is not known.
        UsageError: the release has no ``--hicache-size``.
    """
    rules = rules_for(version)
    if not rules.has_size_flag:
        since = first_release_with("has_size_flag", True)
        raise UsageError(f"--sglang-version {version}: --hicache-size exists from {since} on")
    requested = round(size_gb * GB)
    guard = Guard(
        release=version,
        reserve_bytes=RESERVE_BYTES,
        divides_by_ranks=rules.guard_divides_by_ranks,
        source=rules.sources[-1],
        warning=rules.warning,
    )
    resident = 1 << (requested - 1).bit_length() if rules.pinned_power_of_two and requested > 0 else requested
    return Story(guard, ranks, requested_bytes=requested, resident_bytes=resident, **rest)
