"""Geometry: every catalogue model, the hand derivations, each trap of a config reader, and properties."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_bytes import conv_bytes, head_bytes, indexer_bytes, kv_bytes, slot_bytes, ssm_bytes

from hicache_lab.base.errors import HicacheLabError, InputError, UnknownFact, UsageError
from hicache_lab.sizing.geometry import HeadShape, LatentShape, ModelGeometry, StateShape, load_geometry
from hicache_lab.sizing.geometry.config import architectures
from hicache_lab.sizing.geometry.layers import DECODERS
from hicache_lab.sizing.models import catalogue, find

BASELINE = json.loads((Path(__file__).parents[1] / "baselines" / "model_bytes.json").read_text())
MODELS = [entry.name for entry in catalogue()]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_attention_heads": 32,
    "hidden_size": 4096,
}


def config_of(name: str) -> dict[str, Any]:
    return copy.deepcopy(dict(find(name).config))


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def totals(geometry: ModelGeometry, tp: int) -> dict[str, Any]:
    """Everything the baseline states for one TP size, computed from the geometry."""
    if geometry.compressed is not None:
        compressed = geometry.compressed
        return {
            "bytes_per_token": {
                "c4 latent": geometry.count("c4") * compressed.page_item_bytes(64) / 64 / 4,
                "c4 indexer": geometry.count("c4") * compressed.indexer_page_item_bytes(64) / 64 / 4,
                "c128 latent": geometry.count("c128") * compressed.page_item_bytes(2) / 2 / 128,
            },
            "swa_bytes_per_swa_token": geometry.num_layers * compressed.page_item_bytes(256) / 256,
        }
    per_token = {"mla" if geometry.latent else "full": kv_bytes(geometry, 2, tp, ("full",))}
    if geometry.count("swa"):
        per_token["swa"] = kv_bytes(geometry, 2, tp, ("swa",))
    found: dict[str, Any] = {"bytes_per_token": per_token}
    if geometry.indexer_owner:
        per_token["indexer fp8"] = sum(geometry.indexer_owner) * indexer_bytes(geometry)
        found["indexer_all_layers"] = geometry.num_layers * indexer_bytes(geometry)
    if geometry.state is not None:
        linear = geometry.count("linear")
        found["state_slot"] = {
            "conv": linear * conv_bytes(geometry.state, tp),
            "ssm": linear * ssm_bytes(geometry.state, tp),
        }
    return found


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


# -- traps, one by one -----------------------------------------------------------------------------


def test_nested_text_config_and_both_architectures() -> None:
    kimi = load_geometry("kimi-k2.5")
    assert (kimi.architecture, kimi.inner_architecture) == (
        "KimiK25ForConditionalGeneration",
        "DeepseekV3ForCausalLM",
    )
    assert (kimi.model_type, kimi.dtype, kimi.max_position_embeddings) == ("kimi_k25", "bfloat16", 262144)


def test_text_config_two_levels_down() -> None:
    inner = {**text_of(config_of("qwen3-30b-a3b"))}
    omni = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "thinker_config": {"text_config": inner},
    }
    assert kv_bytes(load_geometry(omni), 2, 1) == 98_304


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8_e4m3"),
        ({"quant_method": "modelopt_fp4", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, None),
        ({"kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        ({"kv_cache_quant_algo": ["FP8"]}, None),
        ({"kv_cache_scheme": None}, None),
        ([], None),
    ],
)
def test_quantization_config_at_either_level(nested: bool, quantization: object, expected: str | None) -> None:
    config = config_of("kimi-k2.5")
    text_of(config).pop("quantization_config")
    (text_of(config) if nested else config)["quantization_config"] = quantization
    assert load_geometry(config).checkpoint_kv_dtype == expected


def test_quantization_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
    assert load_geometry(tmp_path).checkpoint_kv_dtype == "fp8_e4m3"
    beside.write_text("{")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: not JSON"):
        load_geometry(tmp_path)


def test_a_quantised_alias_asks_for_fp8_and_the_base_name_does_not() -> None:
    names = ("kimi-k2.5", "nvidia/Kimi-K2.5-NVFP4", "kimi-k2.5-nvfp4", "nemotron-3-super-120b-a12b")
    expected = [None, "fp8_e4m3", "fp8_e4m3", None]
    assert [load_geometry(name).checkpoint_kv_dtype for name in names] == expected


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [
        ("llama-3.1-8b", 128),  # not in the file
        ("qwen3-0.6b", 128),  # hidden / heads would be 64
        ("gpt-oss-120b", 64),  # would be 45
        ("mistral-small-24b", 128),  # would be 160
        ("minimax-m2", 128),  # would be 64
        ("glm-4.5", 128),  # not whole
        ("nemotron-h-56b", 128),  # attention_head_dim
        ("glm-4-9b", 128),  # kv_channels
    ],
)
def test_head_dim_is_what_the_class_uses(name: str, head_dim: int) -> None:
    full = load_geometry(name).full
    assert full is not None and full.head_dim == full.v_head_dim == head_dim


def test_a_derived_head_dim_is_on_record_and_must_be_whole() -> None:
    assert "head_dim = 128" in load_geometry(LLAMA).assumed[0]
    assert load_geometry({**LLAMA, "head_dim": 128}).assumed == ()
    with pytest.raises(InputError, match="4096 / num_attention_heads 33 is not whole"):
        load_geometry({**LLAMA, "num_attention_heads": 33})


@pytest.mark.parametrize("name", ["glm-4.5", "qwen3-0.6b", "minimax-m2", "gpt-oss-20b"])
def test_head_dim_is_not_derived_where_the_class_does_not(name: str) -> None:
    config = config_of(name)
    del config["head_dim"]
    with pytest.raises(UnknownFact, match=r"missing: head_dim.*overrides=\{\"head_dim\""):
        load_geometry(config)


@pytest.mark.parametrize("name", ["glm-5", "glm-5.2", "glm-4.7-flash"])
def test_a_misleading_head_dim_does_not_reach_an_mla_row(name: str) -> None:
    geometry = load_geometry(name)
    assert geometry.full is None and geometry.latent == LatentShape(512, 64)


@pytest.mark.parametrize("heads", [None, 1, 8, 128])
def test_mla_ignores_its_kv_heads(heads: int | None) -> None:
    config = config_of("deepseek-v3") | {"num_key_value_heads": heads, "q_lora_rank": None}
    assert kv_bytes(load_geometry(config), 2, 8) == 70_272


def test_chatglm_names() -> None:
    glm = load_geometry("glm-4-9b")
    assert (glm.full, glm.max_position_embeddings) == (HeadShape(2, 128, 128), 131072)


def test_jamba_context_key() -> None:
    assert load_geometry("jamba-v0.1").max_position_embeddings == 262144


def test_a_window_that_is_switched_off() -> None:
    qwen = load_geometry("qwen2.5-7b")
    assert (qwen.count("swa"), qwen.window, qwen.swa) == (0, None, None)
    on = load_geometry(config_of("qwen2.5-7b") | {"use_sliding_window": True, "max_window_layers": 20})
    assert (on.layer_kinds.index("swa"), on.count("swa"), on.window) == (20, 8, 131072)
    with pytest.raises(UnknownFact, match="layer_types"):
        load_geometry(config_of("qwen3-30b-a3b") | {"use_sliding_window": True, "sliding_window": 4096})


def test_a_mistral_window_covers_every_layer_with_the_same_heads() -> None:
    old = load_geometry(config_of("mistral-7b") | {"sliding_window": 4096})
    assert (old.count("swa"), old.window, old.full) == (32, 4096, old.swa)
    assert kv_bytes(old, 2, 1) == kv_bytes(load_geometry("mistral-7b"), 2, 1)


def test_infinity_and_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + json.dumps(config_of("nemotron-h-56b") | {"time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text()
    assert kv_bytes(load_geometry(path), 2, 8) == 5_120


def test_null_kv_heads_and_nemotron_nas_are_refused() -> None:
    with pytest.raises(UnknownFact, match="num_key_value_heads"):
        load_geometry({**LLAMA, "num_key_value_heads": None})
    nas = {
        **LLAMA,
        "architectures": ["DeciLMForCausalLM"],
        "num_key_value_heads": None,
        "block_configs": [{}],
    }
    with pytest.raises(UnknownFact, match="DeciLMForCausalLM"):
        load_geometry(nas)
    with pytest.raises(UnknownFact, match=r"num_key_value_heads.*layer_kinds|layer_kinds.*num_key_value_heads"):
        load_geometry(nas, overrides={"kind": "gqa"})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({}, None),
        ({"torch_dtype": "auto"}, None),
        ({"dtype": ["bfloat16"]}, None),
    ],
)
def test_dtype_keys(keys: dict[str, Any], expected: str | None) -> None:
    assert load_geometry({**LLAMA, **keys}).dtype == expected


def test_dtype_at_the_top_level_only() -> None:
    assert load_geometry("mistral-small-3.1/3.2-24b").dtype == "bfloat16"
    assert load_geometry("gpt-oss-20b").dtype is None


@pytest.mark.parametrize(
    ("name", "tp", "aggregate"),
    [("glm-4-9b", 8, 4), ("qwen3-235b-a22b", 8, 2), ("llama-3.1-8b", 8, 1), ("kimi-k2.5", 8, 8)],
)
def test_replication_across_ranks(name: str, tp: int, aggregate: int) -> None:
    geometry = load_geometry(name)
    assert tp * kv_bytes(geometry, 2, tp) == aggregate * kv_bytes(geometry, 2, 1)


def test_ten_heads_split_by_divisors_only() -> None:
    phi = load_geometry("phi-4").full
    assert phi is not None
    assert [tp for tp in (1, 2, 4, 5, 8, 10, 20) if phi.splits_evenly(tp)] == [1, 2, 5, 10, 20]


def test_indexer_owners() -> None:
    shared, every = load_geometry("glm-5.2"), load_geometry("glm-5")
    assert (sum(shared.indexer_owner), len(shared.indexer_owner), sum(every.indexer_owner)) == (21, 78, 78)
    config = config_of("glm-5.2")
    del config["indexer_types"]
    with pytest.raises(UnknownFact, match="indexer_types"):
        load_geometry(config)
    for wrong in (["full"], ["none"] * 78, "full", 3):
        with pytest.raises(InputError, match="indexer_types"):
            load_geometry(config | {"indexer_types": wrong})


def test_a_v3_class_with_an_indexer_is_dsa() -> None:
    config = config_of("deepseek-v3.2") | {"architectures": ["DeepseekV3ForCausalLM"]}
    assert load_geometry(config).kind == "dsa"


def test_gqa_class_with_an_mla_key_is_not_guessed() -> None:
    odd = config_of("mistral-small-3.1/3.2-24b")
    text_of(odd).update(kv_lora_rank=256, qk_rope_head_dim=64)
    with pytest.raises(UnknownFact, match="kv_lora_rank"):
        load_geometry(odd)
    assert kv_bytes(load_geometry(odd, overrides={"kind": "mla"}), 2, 8) == 40 * 320 * 2


def test_mimo_and_gemma_have_other_heads_on_their_sliding_layers() -> None:
    mimo, gemma = load_geometry("mimo-v2-flash"), load_geometry("gemma-4-26b-a4b")
    assert (mimo.full, mimo.swa) == (HeadShape(4, 192, 128), HeadShape(8, 192, 128))
    assert (gemma.full, gemma.swa) == (HeadShape(2, 512, 512), HeadShape(8, 256, 256))


def test_gemma_global_heads_count_only_with_their_switch() -> None:
    config = config_of("gemma-4-26b-a4b")
    text_of(config)["attention_k_eq_v"] = False
    geometry = load_geometry(config)
    assert geometry.full == HeadShape(8, 512, 512)
    assert any("attention_k_eq_v" in text for text in geometry.assumed)


def test_dsv4_pages() -> None:
    flash = load_geometry("deepseek-v4-flash")
    compressed = flash.compressed
    assert compressed is not None and compressed.row_bytes == 584
    assert [compressed.page_item_bytes(slots) for slots in (64, 2, 256)] == [37_440, 1_728, 149_760]
    assert flash.layer_kinds[:4] == ("none", "none", "c4", "c128")
    assert flash.window == 128 and flash.draft_layers == 1


def test_state_dtypes() -> None:
    config = config_of("qwen3.5-27b")
    text_of(config)["mamba_ssm_dtype"] = "bfloat16"
    half, whole = load_geometry(config), load_geometry("qwen3.5-27b")
    assert half.state is not None and whole.state is not None
    assert 2 * ssm_bytes(half.state, 1) == ssm_bytes(whole.state, 1)
    assert conv_bytes(half.state, 1) == conv_bytes(whole.state, 1)
    text_of(config)["mamba_ssm_dtype"] = "int8"
    with pytest.raises(InputError, match="mamba_ssm_dtype"):
        load_geometry(config)


def test_a_state_dtype_key_that_sglang_does_not_read_is_noted() -> None:
    nano = load_geometry(config_of("nemotron-3-nano-30b-a3b") | {"mamba_ssm_cache_dtype": "bfloat16"})
    assert nano.state is not None and nano.state.ssm_dtype == "float32"
    assert any("mamba_ssm_cache_dtype" in note for note in nano.notes)


def test_groups_that_do_not_divide_become_one_a_rank() -> None:
    qwen = load_geometry("qwen3-next-80b-a3b").state
    assert qwen is not None
    assert qwen.conv_shape(32) == ((32 * 128 + 2 * 32 * 128) // 32, 3)
    with pytest.raises(UsageError, match="--tp-size 5"):
        qwen.temporal_shape(5)
    with pytest.raises(UsageError, match="--tp-size"):
        qwen.conv_shape(0)


def test_draft_layers() -> None:
    expected = {
        "deepseek-v3": 1,
        "kimi-k2.5": 0,
        "qwen3.5-27b": 1,
        "minimax-m2": 3,
        "qwen3-next-80b-a3b": 1,
        "glm-5.2": 1,
    }
    assert {name: load_geometry(name).draft_layers for name in expected} == expected


# -- layer layouts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "start"),
    [
        ("gpt-oss-20b", "layer_types", "swa full swa full"),
        ("qwen3-next-80b-a3b", "full_attention_interval", "linear linear linear full"),
        ("gemma-3-27b", "sliding_window_pattern", "swa swa swa swa swa full"),
        ("gemma-2-9b", None, "swa full swa full"),
        ("llama-4-scout", None, "swa swa swa full swa"),
        ("nemotron-h-56b", "hybrid_override_pattern", "linear none linear none linear none linear full none"),
        ("nemotron-3-ultra-550b-a55b", "layers_block_type", "linear none linear none"),
        ("minimax-m1", "attn_type_list", "linear linear linear linear linear linear linear full linear"),
        ("jamba-v0.1", "attn_layer_period", "linear linear linear linear full linear"),
        ("kimi-k3", "linear_attn_config", "linear linear linear full linear"),
        ("deepseek-v4-pro", "compress_ratios", "c128 c128 c4 c128"),
        ("mimo-v2-flash", "hybrid_layer_pattern", "full swa swa swa swa full"),
    ],
)
def test_each_encoding_of_the_layers(name: str, key: str | None, start: str) -> None:
    config, words = text_of(config_of(name)), tuple(start.split())
    layout = set(config) & set(DECODERS)
    assert key in layout if key else not layout
    assert load_geometry(name).layer_kinds[: len(words)] == words


def test_layer_numbers_of_kimi_k3_count_from_one() -> None:
    kinds = load_geometry("kimi-k3").layer_kinds
    assert [i for i, kind in enumerate(kinds) if kind == "full"][:2] == [3, 7] and kinds[-2:] == (
        "full",
        "full",
    )


@pytest.mark.parametrize("name", ["gemma-2-9b", "gpt-oss-20b", "qwen3-next-80b-a3b", "gemma-3-12b", "command-a"])
def test_class_rules_are_on_record(name: str) -> None:
    config = config_of(name)
    removed = [
        text_of(config).pop(key, None) for key in ("layer_types", "sliding_window_pattern", "full_attention_interval")
    ]
    geometry = load_geometry(config)
    assert geometry.layer_kinds == load_geometry(name).layer_kinds
    assert any("class default" in text for text in geometry.assumed), removed


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23, "23 entries for 24 layers"),
        ("gpt-oss-20b", "layer_types", ["full_attention"] * 23 + ["strange"], "entry 23 is 'strange'"),
        ("gpt-oss-20b", "layer_types", "full", "expected a list"),
        ("gpt-oss-20b", "layer_types", [{}] * 24, "entry 0"),
        ("qwen3-next-80b-a3b", "full_attention_interval", 0, "full_attention_interval"),
        ("qwen3-next-80b-a3b", "full_attention_interval", True, "full_attention_interval"),
        ("nemotron-h-56b", "hybrid_override_pattern", "M*X", "entry 2 is 'X'"),
        ("nemotron-h-56b", "hybrid_override_pattern", "M*", "2 entries for 118"),
        ("minimax-m1", "attn_type_list", [0, 1, 2], "entry 2 is '2'"),
        ("jamba-v0.1", "attn_layer_offset", 8, "attn_layer_offset"),
        ("kimi-k3", "linear_attn_config", {"full_attn_layers": [0], "kda_layers": [1]}, "names layer '0'"),
        (
            "kimi-k3",
            "linear_attn_config",
            {"full_attn_layers": [1], "kda_layers": [2]},
            "layer 3 .* is in neither",
        ),
        ("deepseek-v4-pro", "compress_ratios", [4] * 60, "60 entries for 61"),
        ("deepseek-v4-pro", "compress_ratios", [5] * 61, "entry 0 is '5'"),
        ("mimo-v2-flash", "hybrid_layer_pattern", [True] * 48, "entry 0"),
    ],
)
def test_a_layout_that_does_not_decode_is_named(name: str, key: str, value: object, message: str) -> None:
    config = config_of(name)
    text_of(config)[key] = value
    with pytest.raises(InputError, match=message):
        load_geometry(config)


# -- inline, overrides, files ----------------------------------------------------------------------


def test_inline_geometries() -> None:
    dsa = load_geometry(
        {
            "name": "GLM-5.2",
            "kind": "dsa",
            "num_hidden_layers": 78,
            "kv_row_bytes": 576,
            "index_head_dim": 128,
            "draft_layers": 1,
        }
    )
    assert (dsa.name, dsa.confidence, dsa.draft_layers) == ("GLM-5.2", "inline", 1)
    assert kv_bytes(dsa, 2, 8) == kv_bytes(dsa, 1, 1) == 44_928
    assert sum(dsa.indexer_owner) * indexer_bytes(dsa) == 10_296
    gqa = load_geometry({"kind": "gqa", "num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128})
    assert kv_bytes(gqa, 2, 1) == 131_072
    mla = load_geometry({"kind": "mla", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64})
    assert kv_bytes(mla, 2, 8) == 70_272
    mixed = load_geometry(
        {
            "kind": "gqa",
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_kinds": ["swa", "full"] * 9,
        }
    )
    assert (mixed.count("swa"), mixed.window) == (9, 128)
    gdn = config_of("qwen3-next-80b-a3b")
    state = {key: value for key, value in gdn.items() if key.startswith("linear_")}
    hybrid = {
        "kind": "gqa",
        "state": "gdn",
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_kinds": ["linear", "full"],
        **state,
    }
    assert load_geometry(hybrid).state == load_geometry("qwen3-next-80b-a3b").state


@pytest.mark.parametrize(
    ("inline", "error", "message"),
    [
        ({"kind": "gqa"}, UnknownFact, "num_hidden_layers.*num_key_value_heads.*head_dim"),
        ({"kind": "mha", "num_hidden_layers": 2}, UsageError, "kind: expected one of gqa"),
        ({"kind": ["gqa"]}, UsageError, "kind"),
        ({"kind": "dsa", "num_hidden_layers": 2, "kv_row_bytes": 576}, UnknownFact, "index_head_dim"),
        ({"kind": "gqa", "num_hidden_layers": 2, "kv_row_bytes": 576}, InputError, "kv_row_bytes"),
        (
            {"kind": "mla", "num_hidden_layers": 2, "kv_row_bytes": 0},
            InputError,
            "kv_row_bytes.*from 1, got '0'",
        ),
        (
            {"kind": "mla", "num_hidden_layers": "61", "kv_row_bytes": 1},
            InputError,
            "num_hidden_layers.*'61'",
        ),
        ({"kind": "mla", "num_hidden_layers": 10**9, "kv_row_bytes": 1}, InputError, "at most 4096"),
        (
            {"kind": "mla", "num_hidden_layers": 2, "kv_row_bytes": 1, "draft_layer": 1},
            UsageError,
            "did you mean draft_layers",
        ),
        ({"kind": "mla", "layer_kinds": ["c4"], "kv_row_bytes": 1}, InputError, "layer_kinds"),
        ({"kind": "mla", "layer_kinds": ["linear"], "kv_row_bytes": 1}, UnknownFact, "state"),
        (
            {"kind": "mla", "layer_kinds": ["linear"], "kv_row_bytes": 1, "state": {"gdn": 1}},
            UsageError,
            "state: expected one of mamba1",
        ),
        ({}, UnknownFact, "names no architecture"),
    ],
)
def test_inline_slips(inline: dict[str, Any], error: type[HicacheLabError], message: str) -> None:
    with pytest.raises(error, match=message):
        load_geometry(inline)


def test_an_unknown_architecture_is_refused_until_told() -> None:
    config = {**LLAMA, "architectures": ["LlammaForCausalLM"]}
    with pytest.raises(UnknownFact, match=r"'LlammaForCausalLM' is not known.*close: LlamaForCausalLM.*\"kind\""):
        load_geometry(config)
    with pytest.raises(UnknownFact, match="head_dim"):
        load_geometry(config, overrides={"kind": "gqa"})
    told = load_geometry(config, overrides={"kind": "gqa", "head_dim": 128})
    assert kv_bytes(told, 2, 1) == 131_072
    assert told.notes == ("given explicitly: head_dim, kind",)
    with pytest.raises(UnknownFact, match=r"layer_kinds \(the config has sliding_window"):
        load_geometry({**config, "sliding_window": 4096}, overrides={"kind": "gqa", "head_dim": 128})


def test_an_unknown_wrapper_of_a_known_text_model() -> None:
    config = config_of("kimi-k2.5") | {"architectures": ["KimiK99ForConditionalGeneration"]}
    assert kv_bytes(load_geometry(config), 2, 8) == 70_272


def test_overrides_beat_the_file_and_slips_are_named() -> None:
    assert kv_bytes(load_geometry("llama-3.1-8b", overrides={"num_key_value_heads": 4}), 2, 1) == 65_536
    assert load_geometry("llama-3.1-8b", overrides={"num_key_value_heads": 4}).confidence == "inline"
    with pytest.raises(UsageError, match="did you mean num_key_value_heads"):
        load_geometry("llama-3.1-8b", overrides={"num_kv_heads": 4})
    with pytest.raises(UsageError, match="did you mean num_key_value_heads"):
        load_geometry({"kind": "gqa", "num_hidden_layers": 2, "num_kv_heads": 4, "head_dim": 8})


def test_a_config_by_path_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(InputError, match=r"my-model/config\.json: no such file"):
        load_geometry(folder)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    for model in (folder, str(folder), folder / "config.json"):
        geometry = load_geometry(model)
        assert (geometry.name, geometry.confidence) == ("my-model", "config file")
        assert geometry.source == (str(folder / "config.json"),)
    snapshot = tmp_path / "models--org--Some-Model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"}))
    assert load_geometry(snapshot).name == "org/Some-Model"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-k2.5").mkdir()
    assert load_geometry("kimi-k2.5").confidence == "confirmed"


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "",
        "{",
        '"x"',
        "[" * 100_000,
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": ' + "9" * 5000 + "}",
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        load_geometry(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00{}")
    with pytest.raises(InputError, match=r"config\.json: not JSON"):
        load_geometry(path)


@pytest.mark.parametrize(
    "name", ["", "  ", "../../etc/passwd", "/etc/passwd-", "a\x00b", "x" * 10_000, "~nobody-here/x", "/"]
)
def test_a_name_is_not_a_path(name: str) -> None:
    with pytest.raises((UnknownFact, InputError, UsageError)):
        load_geometry(name)


@pytest.mark.parametrize("model", ["", 5, None, ["kimi-k2.5"]])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(UsageError, match="--model: expected"):
        load_geometry(model)


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
