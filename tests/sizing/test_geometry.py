"""Geometry: every catalogue model, the hand derivations and properties."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_bytes import head_bytes, kv_bytes, slot_bytes
from model_configs import BASELINE, MODELS, config_of, text_of, totals

from hicache_lab.base.errors import HicacheLabError, UsageError
from hicache_lab.sizing.geometry import HeadShape, ModelGeometry, StateShape, load_geometry
from hicache_lab.sizing.geometry.config import architectures
from hicache_lab.sizing.geometry.layers import DECODERS
from hicache_lab.sizing.models import find

# -- every model -----------------------------------------------------------------------------------


def test_the_baseline_covers_the_catalogue() -> None:
    assert set(BASELINE) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_every_model(name: str) -> None:
    geometry, expected = load_geometry(name), BASELINE[name]
    assert totals(geometry, 1) == expected["tp1"]
    assert totals(geometry, 8) == expected["tp8_per_rank"]
    layers = dict(expected["layers"])
    assert geometry.num_layers == layers.pop("total")
    assert sum(geometry.indexer_owner) == layers.pop("indexer", geometry.count("c4"))
    for kind, count in layers.items():
        named = {"mamba": "linear"}.get(kind, kind)
        assert geometry.count(named) == count
    if "window" in expected:
        assert geometry.window == expected["window"]


# -- by hand ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "itemsize", "tp", "expected"),
    [
        ("kimi-k2.5", 2, 8, 61 * (512 + 64) * 2),
        ("deepseek-v3", 1, 8, 61 * 576),
        ("deepseek-v3.2", 2, 1, 70_272),
        ("glm-5", 2, 1, 78 * 1_152),
        ("llama-3.1-8b", 2, 1, 32 * 8 * 128 * 2 * 2),
        ("llama-3.1-8b", 2, 8, 16_384),
        ("llama-3.3-70b", 2, 8, 40_960),
        ("qwen3-235b-a22b", 2, 1, 94 * 4 * 128 * 2 * 2),
        ("qwen3-235b-a22b", 2, 8, 48_128),
        ("qwen3.5-397b-a17b", 2, 1, 15 * 2 * 256 * 2 * 2),
        ("qwen3.5-397b-a17b", 2, 8, 15_360),
        ("gpt-oss-120b", 2, 1, 36 * 8 * 64 * 2 * 2),
        ("glm-4.6", 2, 1, 92 * 8 * 128 * 2 * 2),
        ("glm-4.5-air", 2, 1, 188_416),
        ("nemotron-3-nano-30b-a3b", 2, 1, 6 * 2 * 128 * 2 * 2),
        ("qwen2.5-7b", 2, 1, 57_344),
        ("minimax-m2", 2, 1, 253_952),
        ("gemma-3-27b", 2, 1, 81_920 + 425_984),
    ],
)
def test_derivations_by_hand(name: str, itemsize: int, tp: int, expected: int) -> None:
    assert kv_bytes(load_geometry(name), itemsize, tp) == expected


def test_the_incident_in_tokens() -> None:
    per_token = kv_bytes(load_geometry("kimi-k2.5"), 2, 8)
    assert [size * 10**9 // per_token for size in (48, 300)] == [683_060, 4_269_125]
    assert round(116_000 * per_token / 1e9, 2) == 8.15


def test_state_slots_by_hand() -> None:
    qwen = load_geometry("qwen3.5-397b-a17b")
    assert qwen.state is not None
    assert qwen.state.temporal_shape(1) == (64, 128, 128)
    assert qwen.state.conv_shape(1) == (64 * 128 + 2 * 16 * 128, 3)
    assert slot_bytes(qwen, 1) == 188_743_680 + 3_317_760
    assert slot_bytes(qwen, 1) // kv_bytes(qwen, 2, 1) == 6_252
    assert round(slot_bytes(qwen, 8) / 1e6, 1) == 24.0
    nano = load_geometry("nemotron-3-nano-30b-a3b")
    assert slot_bytes(nano, 1) == 23 * 64 * 64 * 128 * 4 + 23 * 6_144 * 3 * 2


# -- properties ------------------------------------------------------------------------------------


def fingerprint(geometry: ModelGeometry) -> object:
    sizes = [totals(geometry, tp) for tp in (1, 2)] if geometry.kind != "dsv4" else [totals(geometry, 1)]
    return sizes, geometry.draft_layers, geometry.window if geometry.swa != geometry.full else None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_removing_facts_never_gives_a_silent_guess(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(MODELS))
    whole, config = load_geometry(name), config_of(name)
    paths = [("", key) for key in config] + [("text_config", key) for key in config.get("text_config", {})]
    for level, key in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4, unique=True)):
        (config.get(level, {}) if level else config).pop(key, None)
    try:
        less = load_geometry(config)
    except HicacheLabError:
        return
    assert fingerprint(less) == fingerprint(whole) or set(less.assumed) - set(whole.assumed)


@given(
    heads=st.integers(1, 256),
    dim=st.integers(1, 1024),
    v_dim=st.integers(1, 1024),
    tp=st.integers(1, 64),
    size=st.sampled_from([1, 2, 4]),
)
def test_heads_scale(heads: int, dim: int, v_dim: int, tp: int, size: int) -> None:
    shape = HeadShape(heads, dim, v_dim)
    per_rank = head_bytes(shape, size, tp)
    assert per_rank == size * head_bytes(shape, 1, tp)
    assert head_bytes(HeadShape(2 * heads, dim, v_dim), size, 2 * tp) == per_rank
    assert per_rank <= head_bytes(shape, size, 1)
    if shape.splits_evenly(tp):
        assert tp * per_rank == head_bytes(shape, size, 1) * max(1, tp // heads)


@given(st.sampled_from(MODELS), st.data())
def test_pipeline_stages_partition_the_layers(name: str, data: st.DataObject) -> None:
    geometry = load_geometry(name)
    pp = data.draw(st.integers(1, geometry.num_layers))
    stages = [geometry.layers_of_stage(pp, stage) for stage in range(pp)]
    covered = [kind for stage in stages for kind in geometry.layer_kinds[stage]]
    assert tuple(covered) == geometry.layer_kinds
    sizes = [stage.stop - stage.start for stage in stages]
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1


def test_pipeline_remainder_goes_last_and_bounds_are_checked() -> None:
    kimi = load_geometry("kimi-k2.5")
    assert [kimi.layers_of_stage(4, stage) for stage in range(4)] == [
        slice(0, 15),
        slice(15, 30),
        slice(30, 45),
        slice(45, 61),
    ]
    for pp, stage in ((0, 0), (62, 0), (4, 4), (4, -1)):
        with pytest.raises(UsageError, match=r"pp-size|pipeline stage"):
            kimi.layers_of_stage(pp, stage)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted(
    {key for name in MODELS for key in text_of(config_of(name))} | {"kind", "state", "layer_kinds", "kv_row_bytes"}
)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(architectures())),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=8),
    st.booleans(),
    st.data(),
)
def test_arbitrary_json_is_read_or_refused(
    architecture: str, facts: dict[str, Any], nested: bool, data: st.DataObject
) -> None:
    config: dict[str, Any] = {"architectures": [architecture]}
    base = next((config_of(name) for name in MODELS if find(name).config["architectures"] == [architecture]), {})
    text = text_of(base) | facts if data.draw(st.booleans()) else facts
    config |= {"text_config": text} if nested else text
    try:
        geometry = load_geometry(config)
    except HicacheLabError as error:
        assert str(error)
        return
    assert geometry.num_layers >= 1
    assert all(kv_bytes(geometry, 2, 1, (kind,)) > 0 for kind in ("full", "swa") if geometry.count(kind))


@given(JSON)
def test_any_mapping_is_read_or_refused(value: Any) -> None:
    with pytest.raises(HicacheLabError):
        load_geometry({"architectures": value, "text_config": value, "kind": value})


def test_geometry_is_frozen_and_hashable() -> None:
    geometry = load_geometry("qwen3.5-27b")
    assert hash(geometry) == hash(load_geometry("Qwen/Qwen3.5-27B"))
    assert isinstance(geometry.state, StateShape)
    with pytest.raises(AttributeError):
        geometry.window = 5  # type: ignore[misc]


LINEAR_KEYS = (
    *("full_attention_interval", "linear_attn_config", "attn_type_list"),
    *("hybrid_override_pattern", "layers_block_type"),
)


@pytest.mark.parametrize("name", sorted(architectures()))
def test_a_row_of_the_architecture_table_makes_sense(name: str) -> None:
    row = architectures()[name]
    rules = {"full", "window", "window_flag", "no_window"}
    assert row.source and row.kind in ("gqa", "mla", "dsa", "dsv4")
    assert set(row.layers) <= set(DECODERS) | rules
    assert not rules & set(row.layers[:-1]), "a rule comes last, keys of the file before it"
    assert bool(row.state) == (any(key in row.layers for key in LINEAR_KEYS) and "MiniMaxM2" not in name)


def test_until_0_5_5_the_last_stage_has_all_that_does_not_divide() -> None:
    kimi = load_geometry("kimi-k2.5")
    stages = [kimi.layers_of_stage(8, stage, remainder="last_stage") for stage in range(8)]
    assert [part.stop - part.start for part in stages] == [7] * 7 + [12]
    assert (stages[0].start, stages[-1].stop) == (0, 61)


@pytest.mark.parametrize("partition", [(30, 30), (61,), (62, -1), (0, 61)])
def test_a_partition_must_cover_the_layers(partition: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="SGLANG_PP_LAYER_PARTITION"):
        load_geometry("kimi-k2.5").layers_of_stage(2, 0, partition=partition)
    assert load_geometry("kimi-k2.5").layers_of_stage(2, 1, partition=(40, 21)) == slice(40, 61)
