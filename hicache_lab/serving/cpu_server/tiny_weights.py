"""Fill a model folder with seeded weights and a byte-level tokenizer; run by the server's own interpreter.

usage: tiny_weights.py FOLDER   (FOLDER holds config.json; SHAPES arrives as JSON on standard input)

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


def write_weights(folder: Path, shapes: dict[str, list[int]]) -> None:
    """One safetensors file in bfloat16: matrices normal(0, SCALE), norms one, the router's bias small."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            tensor = torch.normal(0.0, SCALE, tuple(shape), generator=generator)
        elif name.endswith("bias"):
            tensor = torch.normal(0.0, 0.01, tuple(shape), generator=generator)
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
    write_weights(Path(sys.argv[1]), json.load(sys.stdin))
    write_tokenizer(Path(sys.argv[1]))
