"""Sizes against hand arithmetic, printed sizes and properties; the recorded vectors are in test_vectors.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.geometry import load_geometry
from hicache_lab.launch import LaunchConfig
from hicache_lab.releases import RESERVE_BYTES, VERIFIED, rules_for
from hicache_lab.sizing.guard import HostView, rank_budget
from hicache_lab.sizing.pools import PoolSpec, construct_pool, size_pool
from hicache_lab.sizing.rank import DeviceFacts, RankPlanner, resident_bytes
from hicache_lab.sizing.rows import indexer_bytes_per_layer, store_bytes
from hicache_lab.units import GB, GIB

KIMI_ROW = 61 * 576 * 2


def planner(model: str, version: str, tokens: int | None = None, **flags: object) -> RankPlanner:
    config = LaunchConfig(enable_hierarchical_cache=True, **flags)  # type: ignore[arg-type]
    return RankPlanner(config, load_geometry(model), rules_for(version), DeviceFacts(tokens=tokens))


@pytest.mark.parametrize(
    ("version", "size_gb", "tokens"),
    [("0.5.8", 300, 4_269_126), ("0.5.5", 300, 4_269_125), ("0.5.8", 48, 683_061), ("0.5.5", 48, 683_060)],
)
def test_the_incident_in_tokens(version: str, size_gb: int, tokens: int) -> None:
    rank = planner("kimi-k2.5", version, tp_size=8).pools(ratio=2.0, size_gb=size_gb)
    assert rank.tokens == tokens
    assert rank.requested_bytes == tokens * KIMI_ROW


def test_ratio_and_size_are_different_settings() -> None:
    kimi = planner("kimi-k2.5", "0.5.8", tokens=116_000, tp_size=8)
    by_size, by_ratio = kimi.pools(ratio=2.0, size_gb=48), kimi.pools(ratio=2.5, size_gb=0)
    assert 8 * by_size.requested_bytes == pytest.approx(384.0 * GB, rel=1e-4)
    assert 8 * by_ratio.requested_bytes == pytest.approx(163.03 * GB, rel=1e-4)
    assert by_ratio.tokens == 290_001


def test_the_first_mla_release_checks_one_layer_and_takes_all() -> None:
    pool = planner("deepseek-v3", "0.4.5", tokens=100_000, tp_size=8).pools(ratio=2.0, size_gb=0).pools[0]
    assert pool.allocated_bytes == 61 * pool.requested_bytes


@pytest.mark.parametrize(("version", "taken_gib"), [("0.5.3", 64), ("0.5.4", 64), ("0.5.5", 37.25), ("0.5.8", 37.25)])
def test_pinned_buffers_round_up_to_a_power_of_two(version: str, taken_gib: float) -> None:
    rank = planner("llama-3.1-8b", version, tp_size=4).pools(ratio=2.0, size_gb=40)
    assert rank.resident_bytes(rules_for(version)) == pytest.approx(taken_gib * GIB, rel=1e-3)


@pytest.mark.parametrize(
    ("version", "labels"),
    [
        ("0.5.8", ["kv"]),
        ("0.5.10", ["kv"]),
        ("0.5.11", ["kv", "indexer", "draft"]),
        ("0.5.17", ["kv", "indexer", "draft"]),
        ("0.5.18", ["kv", "indexer"]),
    ],
)
def test_side_pools_by_release(version: str, labels: list[str]) -> None:
    rank = planner("deepseek-v3.2", version, tp_size=8, speculative_algorithm="EAGLE").pools(ratio=2.0, size_gb=60)
    assert [pool.spec.label for pool in rank.pools] == labels
    inside = version == "0.5.10"
    assert rank.pools[0].requested_bytes == pytest.approx(60 * GB, rel=1e-3)
    assert rank.pools[0].spec.kind == ("nsa" if inside else "mla")


def test_indexer_owners_count_from_0_5_22() -> None:
    before = planner("glm-5.2", "0.5.21", tp_size=8).pools(ratio=2.0, size_gb=60).pools[1]
    after = planner("glm-5.2", "0.5.22", tp_size=8).pools(ratio=2.0, size_gb=60).pools[1]
    assert before.spec.bytes_per_token == 78 * 132
    assert after.spec.bytes_per_token == 21 * 132


@pytest.mark.parametrize(("version", "shared"), [("0.5.16", False), ("0.5.17", True)])
def test_sub_pools_share_the_size_from_0_5_17(version: str, shared: bool) -> None:
    pools = planner("gpt-oss-120b", version, tp_size=8).pools(ratio=2.0, size_gb=30).pools
    total = sum(pool.requested_bytes for pool in pools)
    assert total == pytest.approx((30 if shared else 60) * GB, rel=1e-3)


def test_sliding_window_pools_follow_architecture_and_release() -> None:
    gemma = planner("gemma-3-27b", "0.5.23", tokens=1000).pools(ratio=2.0, size_gb=0)
    assert [pool.spec.label for pool in gemma.pools] == ["kv"]
    assert gemma.pools[0].spec.bytes_per_token == 507_904
    assert [p.spec.label for p in planner("mimo-v2-flash", "0.5.13").pools(ratio=2.0, size_gb=9).pools] == ["kv"]
    assert [p.spec.label for p in planner("mimo-v2-flash", "0.5.14").pools(ratio=2.0, size_gb=9).pools] == [
        "full",
        "swa",
    ]


def test_kv_heads_are_replicated_and_mla_is_whole_on_every_rank() -> None:
    row = {
        tp: planner("qwen3-235b-a22b", "0.5.8", 100, tp_size=tp).pools(ratio=2.0, size_gb=0).pools[0] for tp in (4, 8)
    }
    assert row[4].spec.bytes_per_token == row[8].spec.bytes_per_token == 48_128
    assert planner("kimi-k2.5", "0.5.8", 100, tp_size=1).groups == planner("kimi-k2.5", "0.5.8", 100, tp_size=8).groups


def test_dp_attention_gives_a_rank_more_heads() -> None:
    plain = planner("llama-3.1-70b", "0.5.8", 100, tp_size=8)
    spread = planner("llama-3.1-70b", "0.5.8", 100, tp_size=8, dp_size=8, enable_dp_attention=True)
    assert spread.groups[0].bytes_per_token == 8 * plain.groups[0].bytes_per_token


def test_pipeline_stages_agree_on_tokens_from_0_5_15() -> None:
    for version, equal in (("0.5.14", False), ("0.5.15", True)):
        stages = [
            RankPlanner(
                LaunchConfig(enable_hierarchical_cache=True, tp_size=1, pp_size=2),
                load_geometry("kimi-k2.5"),
                rules_for(version),
                DeviceFacts(),
                stage=stage,
            )
            for stage in (0, 1)
        ]
        wanted = [stage.wanted_tokens(40) for stage in stages]
        tokens = [s.pools(ratio=2.0, size_gb=40, peers=[wanted[1 - i]]).tokens for i, s in enumerate(stages)]
        assert (tokens[0] == tokens[1]) is equal


def test_indexer_row() -> None:
    assert indexer_bytes_per_layer(128) == 132


def test_packed_formats_are_not_guessed() -> None:
    with pytest.raises(Exception, match="--kv-cache-dtype"):
        store_bytes("fp4_e2m1")


SPECS = st.builds(
    PoolSpec,
    kind=st.sampled_from(["mha", "mla"]),
    bytes_per_token=st.integers(1, 10**6),
    device_tokens=st.integers(1, 10**7),
    page_size=st.sampled_from([1, 16, 64, 128]),
    ratio=st.floats(0.1, 10),
    size_gb=st.integers(0, 500),
    layout_family=st.just("mha"),
)
RELEASES = st.sampled_from(VERIFIED)


@given(SPECS, RELEASES, st.integers(1, 100))
def test_more_gb_never_gives_fewer_tokens(spec: PoolSpec, version: str, more: int) -> None:
    from dataclasses import replace

    rules = rules_for(version)
    small = size_pool(replace(spec, size_gb=spec.size_gb or 1), rules)
    large = size_pool(replace(spec, size_gb=(spec.size_gb or 1) + more), rules)
    assert large.tokens >= small.tokens
    assert small.tokens % small.page_size == 0 or rules.rounding == "none"
    assert small.requested_bytes == small.tokens * spec.bytes_per_token
    assert resident_bytes(small, rules) >= small.allocated_bytes


@given(SPECS, RELEASES, st.integers(0, 10**13), st.integers(1, 16))
def test_a_pool_that_is_built_is_within_its_budget(spec: PoolSpec, version: str, available: int, ranks: int) -> None:
    rules, view = rules_for(version), HostView(available, ranks_per_host=ranks)
    done = construct_pool(spec, rules, view)
    budget = rank_budget(rules, view).budget_bytes
    assert budget <= max(available - RESERVE_BYTES, 0)
    if done.outcome == "ok":
        assert done.pool is not None
        assert done.pool.requested_bytes <= budget
    elif done.outcome == "ValueError" and "Not enough" in (done.message or ""):
        assert done.pool is not None
        assert done.pool.requested_bytes > budget
