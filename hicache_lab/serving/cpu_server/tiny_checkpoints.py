"""The checkpoints of the tiny models, made locally from a seed.

``tiny-llama`` gets SGLang's MHA pools, ``tiny-mla`` its MLA pools, replicated on every tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import HostError
from hicache_lab.serving.cpu_server.environment import Environment
from hicache_lab.serving.cpu_server.home import built_aside, home
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config

_SCRIPT = Path(__file__).with_name("tiny_weights.py")


def make_models(environment: Environment, *, home_dir: Path | None = None) -> Path:
    """The folder that holds both tiny models, made on first use with the environment's own libraries.

    Raises:
        HostError: the environment's interpreter could not write them.
    """
    configs = {name: tiny_config(name) for name in TINY_MODELS}
    recipe = json.dumps(configs, sort_keys=True) + _SCRIPT.read_text()
    target = home(home_dir) / "cpu_server" / "models" / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    if target.is_dir():
        return target
    with built_aside(target) as aside:
        for name, config in configs.items():
            folder = aside / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config, indent=1))
            _run_script(environment, folder, tensor_shapes(config))
    return target


def _run_script(environment: Environment, folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    done = subprocess.run(
        [str(environment.python), "-I", str(_SCRIPT), str(folder)],
        input=json.dumps(shapes),
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    if done.returncode != 0:
        tail = "\n  ".join(done.stderr.splitlines()[-6:])
        raise HostError(f"server: could not make the tiny model {folder.name} (exit {done.returncode}):\n  {tail}")


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint of one of the two architectures, by its published name."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        attention = _mla_attention(config) if "kv_lora_rank" in config else _gqa_attention(config)
        shapes |= {f"{prefix}self_attn.{name}.weight": shape for name, shape in attention.items()}
        if layer >= config.get("first_k_dense_replace", config["num_hidden_layers"]):
            shapes |= {f"{prefix}mlp.{name}": shape for name, shape in _experts(config).items()}
        else:
            shapes |= {f"{prefix}mlp.{name}": s for name, s in _mlp(hidden, config["intermediate_size"]).items()}
    return shapes


def _gqa_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }


def _mla_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query_rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return {
        "q_a_proj": (query_rank, hidden),
        "q_a_layernorm": (query_rank,),
        "q_b_proj": (heads * (nope + rope), query_rank),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }


def _mlp(hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "gate_proj.weight": (inner, hidden),
        "up_proj.weight": (inner, hidden),
        "down_proj.weight": (hidden, inner),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, routed = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "gate.weight": (routed, hidden),
        "gate.e_score_correction_bias": (routed,),
    }
    shared = _mlp(hidden, inner * config["n_shared_experts"])
    shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    for expert in range(routed):
        shapes |= {f"experts.{expert}.{name}": shape for name, shape in _mlp(hidden, inner).items()}
    return shapes
