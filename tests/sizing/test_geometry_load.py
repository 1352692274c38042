"""Geometry: inline facts, overrides and files."""

import json
from pathlib import Path
from typing import Any

import pytest
from model_bytes import indexer_bytes, kv_bytes
from model_configs import LLAMA, config_of

from hicache_lab.base.errors import HicacheLabError, InputError, UnknownFact, UsageError
from hicache_lab.sizing.geometry import load_geometry


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
