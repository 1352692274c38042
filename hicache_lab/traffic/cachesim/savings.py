"""What a host tier saves: prefill saved, time to first token saved, and where its curve bends.

A host tier saves prefill work. It does not admit more running requests: they live in the device pool, whatever the
host holds (``concurrent_requests``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hicache_lab.base.errors import UsageError
from hicache_lab.traffic.cachesim.tiers import TierHits

_SECONDS_PER_HOUR = 3600.0
_NO_KNEE = 0.01  # below it a curve is a straight line or bends upwards


@dataclass(frozen=True)
class Rates:
    """How fast the server computes and loads.

    Attributes:
        prefill_tokens_per_s: tokens one engine prefills in a second (all ranks together compute the same tokens).
        load_back_per_rank_bytes_per_s: host → device bandwidth of one rank.
        per_rank_bytes_per_token: KV bytes of a token on one rank; ranks load their shares side by side. An MLA rank
            holds and loads the whole token, so more ranks neither share nor speed up a load.
        basis: "given" or "fitted from …".
    """

    prefill_tokens_per_s: float
    load_back_per_rank_bytes_per_s: float
    per_rank_bytes_per_token: int
    basis: str = "given"

    def __post_init__(self) -> None:
        for name, value in (
            ("prefill rate", self.prefill_tokens_per_s),
            ("load-back bandwidth", self.load_back_per_rank_bytes_per_s),
            ("bytes per token", self.per_rank_bytes_per_token),
        ):
            if not value > 0:
                raise UsageError(f"{name}: expected a number above 0, got {value}")

    @property
    def load_back_tokens_per_s(self) -> float:
        """Tokens a second that come back from the host."""
        return self.load_back_per_rank_bytes_per_s / self.per_rank_bytes_per_token

    @property
    def saved_s_per_token(self) -> float:
        """Time saved by loading a token instead of computing it; negative when loading is slower."""
        return 1 / self.prefill_tokens_per_s - 1 / self.load_back_tokens_per_s


@dataclass(frozen=True)
class Savings:
    """What the host tier brings over the device tier alone, on one trace.

    Attributes:
        saved_tokens: prompt tokens loaded instead of computed, over the trace.
        saved_tokens_per_hour: the same by the hour of the trace's own clock, or None without arrival times.
        saved_prefill_s: compute time saved, loads not subtracted.
        ttft_saved_mean_s: time to first token saved, mean over all requests (loads subtracted, no queueing counted).
        ttft_saved_p95_s: the 95th percentile of the same.
        helped_requests: share of requests with a host hit.
    """

    saved_tokens: int
    saved_tokens_per_hour: float | None
    saved_prefill_s: float
    ttft_saved_mean_s: float
    ttft_saved_p95_s: float
    helped_requests: float


def savings(hits: TierHits, rates: Rates, duration_s: float | None) -> Savings:
    """Turn host hits into saved work and time.

    Args:
        hits: cached tokens by tier (block replay or node replay).
        rates: the server's speed.
        duration_s: the trace's length in seconds, or None.
    """
    saved = hits.host_tokens * rates.saved_s_per_token
    total = int(hits.host_tokens.sum())
    return Savings(
        saved_tokens=total,
        saved_tokens_per_hour=total / duration_s * _SECONDS_PER_HOUR if duration_s else None,
        saved_prefill_s=total / rates.prefill_tokens_per_s,
        ttft_saved_mean_s=float(saved.mean()),
        ttft_saved_p95_s=float(np.percentile(saved, 95)),
        helped_requests=float((hits.host_tokens > 0).mean()),
    )


def knee_of(rate: Sequence[float], host_bytes: Sequence[int]) -> int | None:
    """Where a hit rate over growing host sizes bends; None: it does not (every further byte buys at least as much).

    The knee is the size whose normalised gain exceeds its normalised cost by most (Satopaa et al., ICDCSW'11): beyond
    it an extra byte buys less than the average byte up to the largest size looked at.

    Args:
        rate: hit rate of both tiers at each size.
        host_bytes: what each size takes on the whole host, ascending.
    """
    gained, cost = np.asarray(rate, np.float64), np.asarray(host_bytes, np.int64)
    if cost.size < 2 or (np.diff(cost) <= 0).any():
        raise UsageError("host sizes: expected at least two, ascending")
    gain = (gained - gained[0]) / max(gained[-1] - gained[0], 1e-12)
    lead = gain - (cost - cost[0]) / (cost[-1] - cost[0])
    return int(np.argmax(lead)) if lead.max() > _NO_KNEE else None


def concurrent_requests(device_tokens: int, mean_resident_tokens: float) -> int:
    """Requests that can run at once: a matter of the device pool alone, the host tier changes nothing about it."""
    if mean_resident_tokens <= 0:
        raise UsageError(f"mean resident tokens: expected a number above 0, got {mean_resident_tokens}")
    return int(device_tokens / mean_resident_tokens)
