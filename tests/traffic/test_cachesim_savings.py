import numpy as np
import pytest

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB
from hicache_lab.traffic.cachesim import (
    Rates,
    TierHits,
    WritePolicy,
    concurrent_requests,
    hit_curve,
    knee_of,
    savings,
    tier_rates,
)
from hicache_lab.traffic.traces import generate


def test_saved_time_is_compute_minus_load() -> None:
    hits = TierHits(np.array([0, 0]), np.array([10_000, 0]), np.array([12_000, 5_000]))
    rates = Rates(prefill_tokens_per_s=10_000, load_back_per_rank_bytes_per_s=10 * GB, per_rank_bytes_per_token=100_000)
    found = savings(hits, rates, duration_s=1800)
    assert rates.load_back_tokens_per_s == 100_000
    assert found.saved_tokens == 10_000 and found.saved_tokens_per_hour == 20_000
    assert found.saved_prefill_s == 1.0
    assert found.ttft_saved_mean_s == pytest.approx((1.0 - 0.1) / 2)
    assert found.helped_requests == 0.5
    assert savings(hits, rates, None).saved_tokens_per_hour is None


def test_a_slow_link_costs_time() -> None:
    hits = TierHits(np.array([0]), np.array([10_000]), np.array([12_000]))
    slow = Rates(50_000, 1 * GB, 100_000)
    assert slow.saved_s_per_token < 0
    assert savings(hits, slow, None).ttft_saved_mean_s < 0


@pytest.mark.parametrize("bad", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (float("nan"), 1, 1)])
def test_rates_are_checked(bad: tuple[float, float, int]) -> None:
    with pytest.raises(UsageError, match="above 0"):
        Rates(*bad)


def test_the_knee_is_where_the_scan_fits() -> None:
    curve = hit_curve(generate("cyclic_scan", items=20, item_tokens=1024, rounds=5), count="tokens")
    sizes = [1024 * n for n in range(5, 60, 5)]
    rates = tier_rates(curve, 0, sizes, WritePolicy.WRITE_BACK).tolist()
    knee = knee_of(rates, [1000 * n for n in sizes])
    assert knee is not None and sizes[knee] == 20 * 1024
    assert rates[-1] == rates[-2]


def test_a_curve_that_bends_upwards_has_no_knee() -> None:
    curve = hit_curve(generate("cyclic_scan", items=20, item_tokens=1024, rounds=5), count="tokens")
    sizes = [1024 * n for n in range(5, 22, 3)]
    assert knee_of(tier_rates(curve, 0, sizes, WritePolicy.WRITE_BACK).tolist(), sizes) is None
    with pytest.raises(UsageError, match="ascending"):
        knee_of([0.1, 0.2], [5, 5])


def test_concurrency_is_a_matter_of_the_device_pool() -> None:
    """The incident: 116,000 tokens hold 29 requests of 4,000 tokens."""
    assert concurrent_requests(116_000, 4_000) == 29
    with pytest.raises(UsageError, match="resident"):
        concurrent_requests(1, 0)
