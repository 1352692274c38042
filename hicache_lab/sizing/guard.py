"""The check that each rank makes on its own before it takes host memory, and the words it uses."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_lab.base.units import GB, GIB
from hicache_lab.sglang.releases import RESERVE_BYTES, ReleaseRules

LogLine = tuple[str, str]
"""Level and text of one log line, as the server writes it."""

AUTO_SIZE_IMPOSSIBLE = (
    "Cannot automatically size HiCache host memory; set --hicache-size explicitly (GB per rank), "
    "leaving room for other memory use within the container limit."
)


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
class Sample:
    """Host memory as the release takes it for available, and the lines that reading it leaves in the log."""

    available_bytes: int
    logs: tuple[LogLine, ...] = ()


def sample_available(rules: ReleaseRules, view: HostView, *, may_fall_back: bool) -> Sample:
    """Memory that the release believes to be available, container limit included where it looks at one.

    Args:
        rules: up to 0.5.20 a container's limit is not read; 0.5.21 fails when it cannot be read.
        view: what the rank reads.
        may_fall_back: explicit sizes may fall back to the host's value (0.5.22+); auto-sizing may not.

    Raises:
        LaunchFailure: the control group could not be read and the release does not go on without it.

    Source: mem_cache/host_memory.py available_host_memory_bytes.
    """
    if not rules.guard_reads_cgroup:
        return Sample(view.available_bytes)
    if view.cgroup_error is not None:
        if not rules.cgroup_fallback:
            raise LaunchFailure("RuntimeError", view.cgroup_error)
        if not may_fall_back:
            raise LaunchFailure("RuntimeError", AUTO_SIZE_IMPOSSIBLE)
        text = (
            f"Cannot determine cgroup memory headroom: {view.cgroup_error}. Checking explicitly sized HiCache pools "
            "against host available memory; ensure all local ranks' pools fit within the container memory limit."
        )
        return Sample(view.available_bytes, (("WARNING", text),))
    if view.cgroup_headroom_bytes is None:
        return Sample(view.available_bytes)
    text = (
        f"HiCache memory headroom: host {view.available_bytes / GIB:.1f} GiB, "
        f"cgroup {view.cgroup_headroom_bytes / GIB:.1f} GiB"
    )
    return Sample(min(view.available_bytes, view.cgroup_headroom_bytes), (("INFO", text),))


@dataclass(frozen=True)
class Budget:
    """What one rank may take. ``shown_bytes`` is the number its refusal prints, which is not always the budget."""

    budget_bytes: int
    shown_bytes: int
    logs: tuple[LogLine, ...] = ()


def rank_budget(rules: ReleaseRules, view: HostView, *, may_fall_back: bool = True) -> Budget:
    """The allowance of one rank: available minus the 10 GiB reserve, from 0.5.19 divided by the ranks on the host.

    Source: 0.4.4–0.5.18 HostKVCache.__init__; 0.5.19+ mem_cache/pool_host/base.py host_memory_budget_bytes.
    """
    sample = sample_available(rules, view, may_fall_back=may_fall_back)
    allowance = sample.available_bytes - RESERVE_BYTES
    if rules.guard_divides_by_ranks:
        allowance //= view.ranks_per_host
    shown = sample.available_bytes if rules.shown == "available" else allowance
    return Budget(allowance, shown, sample.logs)


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
