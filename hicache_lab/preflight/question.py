"""Everything a verdict depends on, in one record."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_lab.base.display import one_line
from hicache_lab.base.units import format_gb
from hicache_lab.host import HostMemory
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry import ModelGeometry
from hicache_lab.sizing.guard import Budget, HostView, rank_budget
from hicache_lab.sizing.rank import DeviceFacts

DEFAULT_HEADROOM = 0.10
"""Share of RAM (or limit) that a comfortable plan leaves free beyond the releases' reserve (page cache, growth)."""


def pool_limit_bytes(host: HostMemory, overhead_bytes: int) -> int:
    """What all host pools of a host can take: available, lowered by the container, minus the overhead."""
    return host.effective_available_bytes - overhead_bytes


@dataclass(frozen=True)
class Question:
    """Everything a verdict depends on.

    Attributes:
        config: the launch flags.
        geometry: the model.
        rules: the SGLang release.
        host: memory facts, or None when nothing is known of the host.
        device: tokens (or bytes) that the device pools of one rank hold.
        overhead_bytes: host memory that the server's processes take besides the pools, before the check.
        headroom_bytes: what a comfortable plan leaves beyond the reserve; None takes a tenth (``comfortable_bytes``).
        draft: geometry of a separate draft model.
        ram_is_known: False when only the available memory was stated.
    """

    config: LaunchConfig
    geometry: ModelGeometry
    rules: ReleaseRules
    host: HostMemory | None = None
    device: DeviceFacts = field(default_factory=DeviceFacts)
    overhead_bytes: int = 0
    headroom_bytes: int | None = None
    draft: ModelGeometry | None = None
    ram_is_known: bool = True

    def __repr__(self) -> str:
        host = "no host" if self.host is None else f"{format_gb(self.host.effective_available_bytes)} available"
        return (
            f"Question({one_line(self.geometry.name)} on {self.rules.version}, {self.config.processes} ranks, {host})"
        )

    @property
    def limit_bytes(self) -> int | None:
        """What all ranks of this host can really take (``pool_limit_bytes``); None without a host."""
        if self.host is None:
            return None
        return pool_limit_bytes(self.host, self.overhead_bytes)

    @property
    def container_binds(self) -> bool:
        """Whether a container's limit leaves less than the host has available."""
        return self.host is not None and self.host.effective_available_bytes < self.host.available_bytes

    @property
    def comfortable_bytes(self) -> int:
        """Headroom beyond the reserve that separates FITS from TIGHT.

        A tenth of the RAM stays free on the host and a tenth of its limit in each container: a bound that comes on top,
        or RAM that is added, then never makes the other look roomier.
        """
        host = self.host
        if self.headroom_bytes is not None or host is None:
            return self.headroom_bytes or 0
        rooms = [host.available_bytes - int(host.total_bytes * DEFAULT_HEADROOM)]
        for level in host.cgroup.levels if host.cgroup else ():
            if not level.is_unlimited:
                rooms.append(level.headroom_bytes(credit_page_cache=True) - int(level.limit_bytes * DEFAULT_HEADROOM))
        return host.effective_available_bytes - min(rooms)

    def view(self, taken_bytes: int = 0) -> HostView:
        """What a rank reads once ``taken_bytes`` of the host are resident."""
        assert self.host is not None
        used = taken_bytes + self.overhead_bytes
        headroom = self.host.container_headroom_bytes(credit_page_cache=self.rules.cgroup_credits_page_cache)
        return HostView(
            available_bytes=self.host.available_bytes - used,
            cgroup_headroom_bytes=None if headroom is None else max(0, headroom - used),
            ranks_per_host=self.config.ranks_per_host,
        )

    @property
    def takes_size(self) -> bool:
        """Whether this model on this release takes --hicache-size at all."""
        return self.rules.has_size_flag and self.geometry.host_pool_takes_size

    def budget(self, taken_bytes: int = 0) -> Budget:
        """What the release's check allows one rank once ``taken_bytes`` of the host are resident."""
        return rank_budget(self.rules, self.view(taken_bytes))
