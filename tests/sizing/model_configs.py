"""Configs of the catalogue and what the recorded baseline states for them."""

import copy
import json
from pathlib import Path
from typing import Any

from model_bytes import conv_bytes, indexer_bytes, kv_bytes, ssm_bytes

from hicache_lab.sizing.geometry import ModelGeometry
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
