"""Device and host tier together: both are cuts of one hit-rate curve.

* The device tier is an LRU of D blocks: device hits = curve(D).
* ``write_through`` keeps a host copy of everything it caches, and the host cannot evict a copy whose block is still on
  the device; so the tiers together hold the most recent max(D, H) blocks: total = curve(max(D, H)). A host tier no
  larger than the device tier adds nothing. (0.5.8–0.5.23: only host-only leaves are evictable, see ``replay``.)
* ``write_back`` copies a block when the device evicts it. Where the host gives up duplicates of what the device holds
  (0.5.21 and later), the tiers are exclusive: total = curve(D + H). Older releases keep the duplicate after a load
  back and lie between the two cuts.

So one pass gives every pair of a device and a host size (``tier_rates``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.cachesim.curve import HitCurve, hits_by_request
from hicache_lab.traffic.traces import Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class WritePolicy(StrEnum):
    """``--hicache-write-policy``."""

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"

    @classmethod
    def parse(cls, text: str) -> WritePolicy:
        """Read a flag's value, with an error that lists what is possible."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(f"--hicache-write-policy: expected one of {', '.join(cls)}, got {text!r}") from None

    def effective_capacity(self, device: npt.ArrayLike, host: npt.ArrayLike) -> Ints:
        """The one-tier capacity that both tiers together amount to; device and host broadcast."""
        device_size, host_size = np.asarray(device, np.int64), np.asarray(host, np.int64)
        if self is WritePolicy.WRITE_BACK:
            return device_size + host_size
        return np.maximum(device_size, host_size)


def tier_rates(
    curve: HitCurve, device_tokens: npt.ArrayLike, host_tokens: npt.ArrayLike, policy: WritePolicy
) -> Floats:
    """Hit rates of both tiers together, looked up in one curve; device and host sizes broadcast."""
    device, host = np.asarray(device_tokens, np.int64), np.asarray(host_tokens, np.int64)
    blocks = curve.block_tokens
    return curve.rate_at(policy.effective_capacity(device // blocks, host // blocks))


@dataclass(frozen=True)
class TierHits:
    """Cached prompt tokens of every request by tier.

    Attributes:
        device_tokens: found on the device, shape (requests,).
        host_tokens: loaded back from the host, shape (requests,).
        input_tokens: prompt tokens, shape (requests,).
    """

    device_tokens: Ints
    host_tokens: Ints
    input_tokens: Ints

    @property
    def cached_tokens(self) -> Ints:
        """Prompt tokens not computed, shape (requests,)."""
        return self.device_tokens + self.host_tokens

    @property
    def device_rate(self) -> float:
        """Share of all prompt tokens found on the device."""
        return float(self.device_tokens.sum()) / max(int(self.input_tokens.sum()), 1)

    @property
    def host_rate(self) -> float:
        """Share of all prompt tokens loaded back from the host."""
        return float(self.host_tokens.sum()) / max(int(self.input_tokens.sum()), 1)

    @property
    def total_rate(self) -> float:
        """Share of all prompt tokens not computed."""
        return self.device_rate + self.host_rate


def replay_blocks(trace: Trace, device_tokens: int, host_tokens: int, policy: WritePolicy) -> TierHits:
    """Replay request by request where blocks suffice: exact under the block model, tens of millions of blocks a second.

    Args:
        trace: a workload with prefix information.
        device_tokens: device tier.
        host_tokens: host tier.
        policy: the write policy.
    """
    size = trace.block_tokens
    capacity = int(policy.effective_capacity(device_tokens // size, host_tokens // size))
    hits = hits_by_request(trace, [device_tokens // size, capacity])
    # a hit on the last, partial block counts its tokens
    tokens = np.minimum(hits * size, trace.input_tokens[:, None])
    return TierHits(tokens[:, 0], tokens[:, 1] - tokens[:, 0], trace.input_tokens)
