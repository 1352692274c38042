"""Sizes against hand arithmetic, printed sizes and properties; the recorded vectors are in test_vectors.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, GIB
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import RESERVE_BYTES, VERIFIED, rules_for
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.guard import HostView, divides_since, exact_since, rank_budget, read_free_amount
from hicache_lab.sizing.pools import PoolSpec, check_pool, resident_bytes, size_pool
from hicache_lab.sizing.rank import DeviceFacts, RankPlanner
from hicache_lab.sizing.rows import indexer_bytes_per_layer, store_bytes

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
    pool = size_pool(spec, rules)
    done = check_pool(pool, rules, view)
    budget = rank_budget(rules, view).budget_bytes
    assert budget <= max(available - RESERVE_BYTES, 0)
    if done.outcome == "ok":
        assert pool.requested_bytes <= budget
    elif done.outcome == "ValueError" and "Not enough" in (done.message or ""):
        assert pool.requested_bytes > budget


def launched(model: str, version: str, *options: tuple[str, str | None], **flags: object) -> RankPlanner:
    """A planner for a launch with options that have no field of their own."""
    env = flags.pop("env", ())
    config = LaunchConfig(enable_hierarchical_cache=True, other=options, env=env, **flags)  # type: ignore[arg-type]
    return RankPlanner(config, load_geometry(model), rules_for(version), DeviceFacts(tokens=100_000))


@pytest.mark.parametrize(
    ("version", "options", "row"),
    [
        ("0.5.8", (), 576),
        ("0.5.9", (), 656),
        ("0.5.10", (("--nsa-decode-backend", "trtllm"),), 576),
        ("0.5.11", (("--nsa-decode-backend", "flashmla_kv"),), 576),
        ("0.5.12", (("--nsa-decode-backend", "flashmla_kv"), ("--nsa-prefill-backend", "flashmla_kv")), 656),
        ("0.5.17", (("--dsa-prefill-backend", "trtllm"),), 576),
        ("0.5.23", (), 656),
    ],
)
def test_fp8_rows_of_dsa_models(version: str, options: tuple[tuple[str, str], ...], row: int) -> None:
    plan = launched("glm-5", version, *options, tp_size=8, kv_cache_dtype="fp8_e4m3")
    inside = plan.rules.indexer == "inside_the_flag"
    assert plan.groups[0].bytes_per_token == 78 * (row + (132 if inside else 0))
    # Hopper and Blackwell differ only where the backend was left to the server
    chosen_by_server = not options and version == "0.5.23"
    assert any("Blackwell" in text for text in plan.pools(ratio=2.0, size_gb=0).assumed) is chosen_by_server


def test_only_the_backend_of_the_server_s_own_phase_counts_from_0_5_20() -> None:
    options = (("--dsa-prefill-backend", "trtllm"), ("--dsa-decode-backend", "flashmla_kv"))
    rows = {
        version: launched(
            "glm-5", version, *options, tp_size=8, kv_cache_dtype="fp8_e4m3", disaggregation_mode="decode"
        )
        .groups[0]
        .bytes_per_token
        for version in ("0.5.19", "0.5.20")
    }
    assert rows == {"0.5.19": 78 * 576, "0.5.20": 78 * 656}


def test_stages_follow_the_environment() -> None:
    env = (("SGLANG_PP_LAYER_PARTITION", "40,21"),)
    plan = launched("kimi-k2.5", "0.5.20", tp_size=8, pp_size=2, env=env)
    assert len(plan.layers) == 40
    with pytest.raises(UsageError, match=r"SGLANG_PP_LAYER_PARTITION.*61 layers"):
        launched("kimi-k2.5", "0.5.20", pp_size=2, env=(("SGLANG_PP_LAYER_PARTITION", "40,20"),))
    with pytest.raises(UsageError, match="SGLANG_PP_LAYER_PARTITION"):
        launched("kimi-k2.5", "0.5.20", pp_size=2, env=(("SGLANG_PP_LAYER_PARTITION", "half"),))


def test_a_split_dsa_cache_is_mirrored_in_parts() -> None:
    split = ("--enable-dsa-cache-layer-split", None)
    plan = launched("glm-5", "0.5.17", split, tp_size=8, attn_cp_size=4)
    kv, index = plan.pools(ratio=2.0, size_gb=0).pools
    assert (kv.spec.layers, index.spec.layers) == (20, 20)
    assert launched("glm-5", "0.5.15", split, tp_size=8, attn_cp_size=4).groups[0].target_layers == 78


def test_state_dtypes_of_the_launch_beat_the_config() -> None:
    plain = launched("qwen3.5-27b", "0.5.23", tp_size=2).groups[1].bytes_per_token
    half = launched("qwen3.5-27b", "0.5.23", ("--mamba-ssm-dtype", "bfloat16"), tp_size=2).groups[1].bytes_per_token
    from_env = launched("qwen3.5-27b", "0.5.23", tp_size=2, env=(("SGLANG_MAMBA_SSM_DTYPE", "bfloat16"),))
    conv, ssm = 2_949_120 // 2, 150_994_944 // 2
    assert (plain, half) == (conv + ssm, conv + ssm // 2)
    assert from_env.groups[1].bytes_per_token == half
    with pytest.raises(UsageError, match="--mamba-ssm-dtype"):
        launched("qwen3.5-27b", "0.5.23", ("--mamba-ssm-dtype", "int4"))


def test_state_slots_are_shared_by_attention_groups() -> None:
    plan = launched("qwen3.5-27b", "0.5.23", tp_size=8, dp_size=4, enable_dp_attention=True, max_mamba_cache_size=400)
    assert plan.groups[1].device_tokens == 100


def test_device_bytes_of_0_4_5_count_all_layers() -> None:
    config = LaunchConfig(enable_hierarchical_cache=True)
    plan = RankPlanner(config, load_geometry("kimi-k2.5"), rules_for("0.4.5"), DeviceFacts(kv_bytes=KIMI_ROW * 1000))
    assert plan.device_tokens == 1000


def test_a_cap_on_device_tokens_caps_them() -> None:
    capped = planner("kimi-k2.5", "0.5.8", tokens=500_000, max_total_tokens=200_000)
    alone = planner("kimi-k2.5", "0.5.8", max_total_tokens=200_001, attention_backend="flashmla")
    assert (capped.device_tokens, alone.device_tokens) == (200_000, 200_000)


@pytest.mark.parametrize(
    ("version", "algorithm", "place", "layers"),
    [
        ("0.5.10", "EAGLE", "none", 0),
        ("0.5.17", "EAGLE", "sidecar", 1),
        ("0.5.18", "NEXTN", "packed", 1),
        ("0.5.23", "NGRAM", "none", 0),
        ("0.5.23", None, "none", 0),
    ],
)
def test_where_the_mtp_layer_is_kept(version: str, algorithm: str | None, place: str, layers: int) -> None:
    plan = planner("deepseek-v3", version, tp_size=8, speculative_algorithm=algorithm).plan
    assert (plan.place, plan.layers, plan.missing) == (place, layers, None)


def test_one_runner_a_step_is_packed_where_there_are_several() -> None:
    several = ("--enable-multi-layer-eagle", None)
    flags: dict[str, object] = {"tp_size": 8, "speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
    assert launched("deepseek-v3", "0.5.23", several, **flags).plan.packed_layers == 3
    assert launched("deepseek-v3", "0.5.17", several, **flags).plan.layers == 1


def test_a_separate_draft_comes_on_top_and_a_dsa_one_brings_its_index() -> None:
    config = LaunchConfig(enable_hierarchical_cache=True, tp_size=8, speculative_algorithm="EAGLE3")
    draft = load_geometry(
        {"name": "d", "kind": "dsa", "num_hidden_layers": 1, "kv_row_bytes": 1152, "index_head_dim": 128}
    )
    rank = RankPlanner(config, load_geometry("kimi-k2.5"), rules_for("0.5.23"), DeviceFacts(tokens=1000), draft=draft)
    kv, pool, index = rank.pools(ratio=2.0, size_gb=0).pools
    assert (pool.tokens, index.tokens) == (kv.tokens, kv.tokens)
    assert (pool.spec.bytes_per_token, index.spec.bytes_per_token) == (1152, 132)
    # auto-sizing counts the draft's device bytes too
    assert rank.device_bytes == (1000 + 1) * (KIMI_ROW + 1152)


def test_a_budget_says_its_arithmetic() -> None:
    view = HostView(445 * GB, ranks_per_host=8)
    alone, shared = rank_budget(rules_for("0.5.8"), view), rank_budget(rules_for("0.5.19"), view)
    assert (alone.text, alone.divides, alone.divisor) == ("445.00 GB − 10 GiB", False, 1)
    assert (shared.text, shared.divides, shared.divisor) == ("(445.00 GB − 10 GiB) / 8", True, 8)
    assert alone.budget_bytes == 445 * GB - 10 * GIB
    assert shared.budget_bytes == (445 * GB - 10 * GIB) // 8
    assert alone.certain_start_bytes(8) == (445 * GB - 10 * GIB) // 8
    assert shared.certain_start_bytes(8) == (445 * GB - 10 * GIB) // 15
    assert rank_budget(rules_for("0.4.9"), view).shown_bytes == 445 * GB
    assert (divides_since(), exact_since()) == ("0.5.19", "0.5.4.post2")


@pytest.mark.parametrize(
    ("releases", "ranks", "asked", "free", "available", "together", "says"),
    [
        (("0.5.19", "0.5.23"), 8, 100, 54, 8 * 54 * GB + 10 * GIB, 8 * 54 * GB, "one rank's share"),
        (("0.5.19",), None, 100, 54, None, None, "(available − 10 GiB) / ranks on this host"),
        (("0.4.9",), 8, 100, 54, 54 * GB, 54 * GB - 10 * GIB, "kept back but not subtracted"),
        ((), 8, 50, 54, 54 * GB, 54 * GB - 10 * GIB, "kept back but not subtracted"),
        (("0.5.8", "0.5.18"), 8, 100, 54, 54 * GB + 10 * GIB, 54 * GB, "not divided by ranks"),
        (("0.5.8", "0.5.19"), 8, 100, 54, None, None, "depends on the release"),
        ((), 8, 100, 54, None, None, "one rank's share from 0.5.19 on"),
    ],
)
def test_what_the_free_amount_of_a_refusal_says(
    releases: tuple[str, ...],
    ranks: int | None,
    asked: int,
    free: int,
    available: int | None,
    together: int | None,
    says: str,
) -> None:
    rules = [rules_for(version) for version in releases]
    amount = read_free_amount(rules, ranks=ranks, requested_bytes=asked * GB, free_bytes=free * GB)
    assert (amount.available_bytes, amount.all_ranks_bytes) == (available, together)
    assert says in amount.meaning
