"""Geometry: each trap of a config reader, one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_bytes import conv_bytes, kv_bytes, ssm_bytes
from model_configs import LLAMA, config_of, text_of

from hicache_lab.base.errors import InputError, UnknownFact, UsageError
from hicache_lab.sizing.geometry import HeadShape, LatentShape, load_geometry


def test_nested_text_config_and_both_architectures() -> None:
    kimi = load_geometry("kimi-k2.5")
    assert (kimi.architecture, kimi.inner_architecture) == (
        "KimiK25ForConditionalGeneration",
        "DeepseekV3ForCausalLM",
    )
    assert (kimi.dtype, kimi.max_position_embeddings) == ("bfloat16", 262144)


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
