"""Two tiny models, made locally from a seed: grouped-query attention, and MLA with experts.

Small enough to serve on one core, shaped like the real ones: ``tiny-llama`` gets SGLang's MHA pools,
``tiny-mla`` (the DeepSeek-V3 architecture) its MLA pools, replicated on every tensor-parallel rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.serving.cpu_server.environment import Environment
from hicache_lab.serving.cpu_server.home import built_aside, home

TINY_MODELS = ("tiny-llama", "tiny-mla")
_SCRIPT = Path(__file__).with_name("tiny_weights.py")

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "mlp_bias": False,
}
_MLA: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
    "pretraining_tp": 1,
    "use_cache": True,
}
_CONFIGS = {"tiny-llama": {**_COMMON, **_LLAMA}, "tiny-mla": {**_COMMON, **_MLA}}


def model_config(name: str) -> dict[str, Any]:
    """The Hugging Face ``config.json`` of a tiny model.

    Raises:
        UsageError: no tiny model has this name.
    """
    if name not in _CONFIGS:
        raise UsageError(f"--model: expected one of {', '.join(TINY_MODELS)}, got {name!r}")
    return dict(_CONFIGS[name])


def make_models(environment: Environment, *, home_dir: Path | None = None) -> Path:
    """The folder that holds both tiny models, made on first use with the environment's own libraries.

    Raises:
        HostError: the environment's interpreter could not write them.
    """
    recipe = json.dumps(_CONFIGS, sort_keys=True) + _SCRIPT.read_text()
    target = home(home_dir) / "cpu_server" / "models" / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    if target.is_dir():
        return target
    with built_aside(target) as aside:
        for name in TINY_MODELS:
            folder = aside / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(model_config(name), indent=1))
            _run_script(environment, folder, tensor_shapes(model_config(name)))
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
