"""Hit rates that others measured and published, found again by simulation.

Sources are public threads and documents of sgl-project/sglang and kvcache-ai/Mooncake, named at each test. The figures
of sglang#29049 (Mooncake tool-agent trace) cannot be checked: that trace is not to be had here; its finding is.
"""

import numpy as np
import pytest

from hicache_lab.base.resources import data_dir
from hicache_lab.preflight import ask
from hicache_lab.preflight.host_tiers import host_tier
from hicache_lab.traffic.cachesim import ReplaySettings, WritePolicy, hit_curve, replay, tier_rates
from hicache_lab.traffic.traces import Trace, generate, read_trace


def rate_by_round(trace: Trace, cached: np.ndarray, clients: int) -> list[float]:
    """Hit rate of each round of a workload with a barrier between rounds."""
    tokens, inputs = cached.reshape(-1, clients), trace.input_tokens.reshape(-1, clients)
    return (tokens.sum(axis=1) / inputs.sum(axis=1)).tolist()


def test_bench_multiturn_while_everything_fits() -> None:
    """sglang#27010: 128 clients, request to output 8 to 1, L1 + L2; (8 + 9(r - 1)) / (8 + 9r) to six digits."""
    published = [0, 0.470588, 0.653846, 0.742857, 0.795455]
    trace = generate(
        "bench_multiturn", clients=128, rounds=5, request_tokens=512, output_tokens=64, barrier=True, block_tokens=64
    )
    # the first tier holds two rounds, both hold all: L2 gives what L1 alone loses in the fourth round and later
    found = replay(trace, ReplaySettings(200_000, 900_000, page_size=64))
    assert rate_by_round(trace, found.cached_tokens, 128) == pytest.approx(published, abs=1e-6)
    alone = replay(trace, ReplaySettings(200_000, 0, page_size=64))
    lost = rate_by_round(trace, alone.cached_tokens, 128)
    assert lost[1] == pytest.approx(published[1], abs=1e-6)
    assert lost[2:] == sorted(lost[2:], reverse=True) and lost[4] < 0.3


def test_bench_multiturn_of_twenty_clients() -> None:
    """sglang#33984: nine rounds of 20 clients, ideal r / (r + 1), met to 2e-4 with page rounding."""
    published = [0, 0.499939, 0.666558, 0.749863, 0.799844, 0.833164, 0.856964, 0.874813, 0.888696]
    trace = generate("bench_multiturn", clients=20, rounds=9, request_tokens=2048, output_tokens=1, barrier=True)
    found = replay(trace, ReplaySettings(1_000_000, 0, page_size=64))
    assert rate_by_round(trace, found.cached_tokens, 20) == pytest.approx(published, abs=2.5e-3)


def test_eighty_clients_outgrow_thirty_gb_a_rank_after_three_rounds() -> None:
    """Mooncake's HiCache benchmark (Qwen3-235B-A22B, 8 × H800, --hicache-size 30): L2 equals L3 for three rounds."""
    tier = host_tier(ask("qwen3-235b-a22b", "0.5.8", tp_size=8, device_tokens=100_000, page_size=64), size_gb=30)
    trace = generate("bench_multiturn", clients=80, rounds=6, request_tokens=2048, output_tokens=1, barrier=True)
    found = replay(trace, ReplaySettings(100_000, tier.tokens, page_size=64, release="0.5.8"))
    unlimited = replay(trace, ReplaySettings(100_000, 10_000_000, page_size=64, release="0.5.8"))
    limited_rate = rate_by_round(trace, found.cached_tokens, 80)
    ideal = rate_by_round(trace, unlimited.cached_tokens, 80)
    assert limited_rate[:3] == pytest.approx(ideal[:3], abs=1e-3)
    assert limited_rate[3] < ideal[3] - 0.02
    assert limited_rate[5] < ideal[5] - 0.3


def test_half_a_host_tier_buys_nothing_under_write_through() -> None:
    """sglang#29049: L2 = L1 / 2 added 0.03 points, L2 = 2 × L1 added 6.4; the same shape on the conversation trace."""
    trace = read_trace(data_dir() / "traces" / "mooncake_conversation.jsonl.zst")
    pages = 6_000
    device = pages * trace.block_tokens
    curve = hit_curve(trace)
    both = tier_rates(curve, device, [device // 2, 2 * device], WritePolicy.WRITE_THROUGH)
    added = both - curve.rate_at_tokens(device)
    assert added[0] == 0
    assert added[1] > 0.05
    half = replay(trace.head(4000), ReplaySettings(device // 8, device // 16, page_size=64))
    alone = replay(trace.head(4000), ReplaySettings(device // 8, 0, page_size=64))
    assert half.total_rate - alone.total_rate < 0.003


def test_a_scan_larger_than_the_host_tier_hits_nothing() -> None:
    """sglang#12809: about 50 GB of KV scanned twice over 16 GB of host memory: the second round is no faster."""
    per_token = 131_072  # bf16, 32 layers, 8 KV heads of 128
    items = int(50e9 / per_token / 4096)
    trace = generate("cyclic_scan", items=items, item_tokens=4096, rounds=2)
    small = replay(trace, ReplaySettings(60_000, int(16e9 / per_token), page_size=64))
    large = replay(trace, ReplaySettings(60_000, int(60e9 / per_token), page_size=64))
    assert small.total_rate == 0
    assert large.total_rate == pytest.approx(0.5, abs=0.02)
