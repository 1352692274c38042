"""Geometry: which layer keeps what, in each encoding of a config."""

import pytest
from model_configs import config_of, text_of

from hicache_lab.base.errors import InputError
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.geometry.layers import DECODERS


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
