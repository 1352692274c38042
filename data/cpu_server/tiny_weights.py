"""Fill a model folder with seeded weights and a byte-level tokenizer; run by the server's own interpreter.

usage: tiny_weights.py FOLDER   (FOLDER holds config.json of tiny-llama, which gets SGLang's MHA pools, or of tiny-mla,
whose MLA pools are replicated on every tensor-parallel rank)

Weights are real random numbers, not SGLang's ``--load-format dummy``: those lie within ±1e-3, so the last
token alone decides the output and a broken KV cache would go unnoticed.
"""

import json
import sys
from pathlib import Path
from typing import Any

SEED = 3
SCALE = 0.25  # large enough that the KV contents decide which token comes next
VOCABULARY = 512
SPECIAL = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "a rank holds pages of the key value cache in device memory and a copy of them in host memory",
    "the scheduler evicts the least recently used prefix and loads it back when a prompt returns",
    "tokens layers heads bytes pages requests prompts answers conversations prefixes tiers hits misses",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


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


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """One safetensors file in bfloat16: matrices normal(0, SCALE), norms one, the router's bias small."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            tensor = torch.normal(0.0, SCALE, shape, generator=generator)
        elif name.endswith("bias"):
            tensor = torch.normal(0.0, 0.01, shape, generator=generator)
        else:
            tensor = torch.ones(shape)
        tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path) -> None:
    """Every byte is a token, a few merges shorten the corpus' words, and all ids up to VOCABULARY decode."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([f"<{number}>" for number in range(tokenizer.get_vocab_size(), VOCABULARY)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, **settings}, indent=1))
    (folder / "special_tokens_map.json").write_text(json.dumps(names, indent=1))
    generation = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_weights(target, tensor_shapes(json.loads((target / "config.json").read_text())))
    write_tokenizer(target)
