"""The check that each rank makes on its own before it takes host memory, and the words it uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hicache_lab.base.units import GB, GIB, format_gb, format_gib
from hicache_lab.sglang.releases import RESERVE_BYTES, ReleaseRules, first_release_where

LogLine = tuple[str, str]
"""Level and text of one log line, as the server writes it."""

RESERVE_TEXT = format_gib(RESERVE_BYTES, 0)
"""The reserve in words."""

AUTO_SIZE_SLACK = 0.05
"""Share of the budget that auto-sizing keeps for page rounding and staging buffers (hicache_auto_size.py)."""


class LaunchFailure(Exception):
    """What the real constructor raises: the exception's type name and its message. Never leaves this layer."""

    def __init__(self, kind: str, message: str, logs: tuple[LogLine, ...] = ()) -> None:
        super().__init__(message)
        self.kind, self.message, self.logs = kind, message, logs


@dataclass(frozen=True)
class HostView:
    """What one rank reads at the moment of its check.

    ``available_bytes`` is psutil's ``available``; ``cgroup_headroom_bytes`` the smallest limit minus usage up the
    process's control groups (None: no limit); ``cgroup_error`` the reason why it could not be read.
    """

    available_bytes: int
    cgroup_headroom_bytes: int | None = None
    cgroup_error: str | None = None
    ranks_per_host: int = 1


@dataclass(frozen=True)
class Budget:
    """What one rank may take by the release's own check, with its arithmetic.

    Attributes:
        available_bytes: memory that the release takes for available.
        reserve_bytes: what it leaves to the rest of the machine.
        divides: whether the rest is divided by the ranks of the host.
        divisor: those ranks; 1 where every rank has the whole rest to itself.
        shows_available: a refusal prints the available memory and not the budget.
        logs: the lines that reading the memory leaves in the log.
    """

    available_bytes: int
    reserve_bytes: int = RESERVE_BYTES
    divides: bool = False
    divisor: int = 1
    shows_available: bool = False
    logs: tuple[LogLine, ...] = ()

    @property
    def budget_bytes(self) -> int:
        """The most that one rank may ask for; negative when less than the reserve is available."""
        return (self.available_bytes - self.reserve_bytes) // self.divisor

    @property
    def shown_bytes(self) -> int:
        """The free amount that a refusal prints."""
        return self.available_bytes if self.shows_available else self.budget_bytes

    @property
    def text(self) -> str:
        """The arithmetic in words: ``445.00 GB − 10 GiB``, divided where the release divides."""
        return _formula(format_gb(self.available_bytes), self.divisor if self.divides else None)

    def certain_start_bytes(self, ranks: int) -> int:
        """The largest equal share that ``ranks`` ranks may ask for and start in whatever order they check."""
        return max(0, (self.available_bytes - self.reserve_bytes) // (ranks - 1 + self.divisor))

    def meaning(self, available: str = "available memory") -> str:
        """What the free amount in a refusal is; ``available`` names the memory that the check looks at."""
        if self.divides:
            return f"one rank's share: {_formula(available, f'{self.divisor} ranks on this host')}"
        if self.shows_available:
            return f"{available}; {_KEPT_BACK} the message"
        return f"{available} minus the reserve of {RESERVE_TEXT}"


_KEPT_BACK = f"the {RESERVE_TEXT} reserve is kept back but not subtracted in"


def _formula(available: str, divisor: object = None) -> str:
    rest = f"{available} − {RESERVE_TEXT}"
    return rest if divisor is None else f"({rest}) / {divisor}"


CHECK_RULES: Mapping[str, tuple[str, Mapping[object, str]]] = {
    "guard_divides_by_ranks": (
        "one rank's check compares with",
        {
            True: _formula("available", "ranks on the host"),
            False: f"{_formula('available')}, all of it for each rank",
        },
    ),
    "shown": (
        'the "only have" of a refusal is',
        {"available": "available memory, reserve not subtracted", "allowance": "what the check compares with"},
    ),
}
"""The release rules of the check: the question that each answers, and its values in words."""


def rank_budget(rules: ReleaseRules, view: HostView, *, may_fall_back: bool = True) -> Budget:
    """The allowance of one rank: available minus the reserve, in later releases divided by the ranks on the host.

    Args:
        rules: up to 0.5.20 a container's limit is not read; 0.5.21 fails when it cannot be read.
        view: what the rank reads.
        may_fall_back: explicit sizes may fall back to the host's value (0.5.22+); auto-sizing may not.

    Raises:
        LaunchFailure: the control group could not be read and the release does not go on without it.

    Source: 0.4.4–0.5.18 HostKVCache.__init__; 0.5.19+ mem_cache/pool_host/base.py host_memory_budget_bytes,
    mem_cache/host_memory.py available_host_memory_bytes.
    """
    available = view.available_bytes
    logs: tuple[LogLine, ...] = ()
    if rules.guard_reads_cgroup and view.cgroup_error is not None:
        if not rules.cgroup_fallback:
            raise LaunchFailure("RuntimeError", view.cgroup_error)
        if not may_fall_back:
            text = (
                "Cannot automatically size HiCache host memory; set --hicache-size explicitly (GB per rank), "
                "leaving room for other memory use within the container limit."
            )
            raise LaunchFailure("RuntimeError", text)
        text = (
            f"Cannot determine cgroup memory headroom: {view.cgroup_error}. Checking explicitly sized HiCache pools "
            "against host available memory; ensure all local ranks' pools fit within the container memory limit."
        )
        logs = (("WARNING", text),)
    elif rules.guard_reads_cgroup and view.cgroup_headroom_bytes is not None:
        text = (
            f"HiCache memory headroom: host {available / GIB:.1f} GiB, "
            f"cgroup {view.cgroup_headroom_bytes / GIB:.1f} GiB"
        )
        available, logs = min(available, view.cgroup_headroom_bytes), (("INFO", text),)
    return Budget(
        available,
        divides=rules.guard_divides_by_ranks,
        divisor=view.ranks_per_host if rules.guard_divides_by_ranks else 1,
        shows_available=rules.shown == "available",
        logs=logs,
    )


@dataclass(frozen=True)
class AutoSize:
    """What auto-sizing settles on: the ratio, the budget of one rank and its log lines."""

    ratio: float
    budget_bytes: int
    logs: tuple[LogLine, ...]


def auto_size(
    rules: ReleaseRules,
    view: HostView,
    *,
    ratio: float,
    fraction: float,
    device_bytes: int,
) -> AutoSize:
    """Lower the default ratio until the host pools fit.

    Args:
        rules: 0.5.21 or later.
        view: what this rank reads.
        ratio: the ratio asked for, 2.0 by default; auto-sizing only lowers it.
        fraction: --hicache-host-memory-fraction, in (0, 1].
        device_bytes: bytes of all device pools of this rank that are mirrored.

    Raises:
        LaunchFailure: nothing is left after the reserve, or the control group could not be read.

    Source: 0.5.21+ mem_cache/hicache_auto_size.py auto_size_hicache.
    """
    allowance = rank_budget(rules, view, may_fall_back=False)
    budget = int(allowance.budget_bytes * fraction)
    fitted = min(ratio, budget * (1 - AUTO_SIZE_SLACK) / device_bytes)
    if fitted <= 0:
        raise LaunchFailure(
            "ValueError",
            "No host memory is left for HiCache after the 10 GiB reserve; "
            "set --hicache-ratio or --hicache-size explicitly.",
            allowance.logs,
        )
    text = (
        f"HiCache auto-sizing: ratio {ratio:.3f} -> {fitted:.3f}; {budget / GIB:.1f} GiB host memory per rank "
        f"(fraction {fraction:.2f}, {view.ranks_per_host} ranks on this host), "
        f"host pools {device_bytes * fitted / GIB:.1f} GiB."
    )
    return AutoSize(fitted, budget, (*allowance.logs, ("INFO", text)))


def beyond_reserve_bytes(available_bytes: int) -> int:
    """What host pools may take of this so that the releases' reserve stays; negative when there is less."""
    return available_bytes - RESERVE_BYTES


def divides_since() -> str:
    """The first release whose check divides what is available by the ranks of the host."""
    return _since(lambda rules: rules.guard_divides_by_ranks)


def pinned_since() -> str:
    """The first release whose host buffers come from torch's pinned allocator, which rounds them up."""
    return _since(lambda rules: rules.pinned_power_of_two)


def exact_since() -> str:
    """The first release that takes the bytes asked for and registers them: no pinned allocator rounds them up."""
    return _since(lambda rules: rules.allocation == "host_register")


def _since(applies: Callable[[ReleaseRules], bool]) -> str:
    release = first_release_where(applies)
    assert release is not None
    return release


@dataclass(frozen=True)
class FreeAmount:
    """What the free amount that a refusal printed says of the host.

    Attributes:
        meaning: a sentence without its full stop.
        available_bytes: what was available then; None where the releases in question differ on it.
        all_ranks_bytes: what all ranks of the host could have taken together by the check; None likewise.
    """

    meaning: str
    available_bytes: int | None = None
    all_ranks_bytes: int | None = None


def read_free_amount(
    releases: Sequence[ReleaseRules],
    *,
    ranks: int | None,
    requested_bytes: int | None,
    free_bytes: int | None,
    named: str | None = None,
) -> FreeAmount:
    """What a refusal's "only have … GB free" means in the releases that could have printed it.

    Args:
        releases: rules of the releases in question (the oldest and the newest of a range will do); () if unknown.
        ranks: ranks on the host; None if unknown.
        requested_bytes: what was refused.
        free_bytes: the free amount it printed; None if it printed none.
        named: the releases in words; by default the one version.
    """
    name = named or "–".join(dict.fromkeys(rules.version for rules in releases))
    divides = {rules.guard_divides_by_ranks for rules in releases}
    shown = {rules.shown for rules in releases}
    if divides == {True}:
        divisor = f"{ranks} ranks on this host" if ranks else "ranks on this host"
        text = f"In {name} the free amount is one rank's share: {_formula('available', divisor)}"
        if not ranks or free_bytes is None:
            return FreeAmount(text)
        together = free_bytes * ranks
        available = together + RESERVE_BYTES
        text += f", so all of them together may take {format_gb(together)} and about {format_gb(available)} were "
        return FreeAmount(text + "available", available, together)
    # a request that was refused although less than what is printed free shows that the reserve is not in the number
    kept = requested_bytes is not None and free_bytes is not None and requested_bytes <= free_bytes
    if shown == {"available"} or kept:
        text = f"The free amount is what was available; {_KEPT_BACK} it"
        if free_bytes is None:
            return FreeAmount(text)
        left = beyond_reserve_bytes(free_bytes)
        return FreeAmount(f"{text}: {format_gb(left)} could be taken", free_bytes, left)
    if divides == {False} and shown == {"allowance"}:
        text = f"In {name} the free amount is the host's {_formula('available memory')}, not divided by ranks"
        if free_bytes is None:
            return FreeAmount(text)
        available = free_bytes + RESERVE_BYTES
        return FreeAmount(f"{text} ({format_gb(available)} were available)", available, free_bytes)
    subtracted, divided = _since(lambda rules: rules.shown == "allowance"), divides_since()
    return FreeAmount(
        "What the free amount means depends on the release, which the log does not tell: "
        f"the host's available memory before {subtracted}, that − {RESERVE_TEXT} before {divided}, "
        f"one rank's share from {divided} on (--sglang-version states it)"
    )


def refusal_text(kind: str, label: str, requested_bytes: int, shown_bytes: int) -> str:
    """The exact words of a refusal; the numbers in it are GB = 1e9.

    Args:
        kind: ``kv`` (also mamba), ``indexer``, ``dsv4`` or ``dsv4_state``.
        label: NSA or DSA for an indexer, the pool's name for a DeepSeek-V4 pool.
        requested_bytes: what the rank asks for.
        shown_bytes: the number printed as free, see :class:`Budget`.
    """
    numbers = f"Requesting {requested_bytes / GB:.2f} GB but only have {shown_bytes / GB:.2f} GB free."
    if kind == "indexer":
        return f"Not enough host memory for {label} indexer hierarchical cache. {numbers}"
    if kind in ("dsv4", "dsv4_state"):
        pool = "paged" if kind == "dsv4" else "state"
        return f"Not enough host memory for V4 {pool} pool {label}. {numbers}"
    return f"Not enough host memory available. {numbers} Please reduce the size of the hierarchical cache."
