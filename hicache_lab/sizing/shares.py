"""How a rank's host memory is shared among its pools: one size, one ratio, or what auto-sizing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_lab.base.units import GIB
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.guard import HostView, LaunchFailure, LogLine, rank_budget
from hicache_lab.sizing.pools import DSV4_NEEDS_RATIO

AUTO_SIZE_SLACK = 0.05
"""Share of the budget that auto-sizing keeps for page rounding and staging buffers (hicache_auto_size.py)."""


def split_size(size_gb: float, device_pool_bytes: Sequence[int]) -> tuple[float, ...]:
    """One --hicache-size shared among sub-pools in proportion to their device bytes, in GB (1e9).

    Source: 0.5.17+ mem_cache/hybrid_cache/hybrid_pool_assembler.py _split_hicache_size.
    """
    total = sum(device_pool_bytes)
    return tuple(size_gb * device_bytes / total for device_bytes in device_pool_bytes)


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
    peer_ratios: Sequence[float] = (),
) -> AutoSize:
    """Lower the default ratio until the host pools fit.

    Args:
        rules: 0.5.21 or later.
        view: what this rank reads.
        ratio: the ratio asked for, 2.0 by default; auto-sizing only lowers it.
        fraction: --hicache-host-memory-fraction, in (0, 1].
        device_bytes: bytes of all device pools of this rank that are mirrored.
        peer_ratios: what the other ranks of the world computed; the smallest holds.

    Raises:
        LaunchFailure: nothing is left after the reserve, or the control group could not be read.

    Source: 0.5.21+ mem_cache/hicache_auto_size.py auto_size_hicache.
    """
    allowance = rank_budget(rules, view, may_fall_back=False)
    budget = int(allowance.budget_bytes * fraction)
    fitted = min(ratio, budget * (1 - AUTO_SIZE_SLACK) / device_bytes, *peer_ratios)
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


def dsv4_host_pages(
    rules: ReleaseRules,
    *,
    device_full_tokens: int,
    device_swa_tokens: int,
    page_size: int,
    swa_page_size: int,
    ratio: float,
    size_gb: float,
) -> tuple[int, ...]:
    """Host pages of the DeepSeek-V4 pools: full and swa, from 0.5.20 also c128.

    Raises:
        LaunchFailure: --hicache-size was given; these pools take a ratio only.

    Source: mem_cache/hybrid_cache/hybrid_pool_assembler.py _deepseek_v4_num_host_pages.
    """
    if size_gb > 0:
        raise LaunchFailure("ValueError", DSV4_NEEDS_RATIO)
    full = -(-device_full_tokens // page_size)
    swa = -(-device_swa_tokens // swa_page_size)
    pages = tuple(
        max(int(device * ratio), device + 1) if rules.dsv4_full_page_more_than_device else int(device * ratio)
        for device in (full, swa)
    )
    return (*pages, pages[0]) if rules.dsv4_c128_pages else pages
