"""The facts of one config: typed reads by key, class defaults on record, everything missing told at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hicache_lab.base.errors import InputError, UnknownFact
from hicache_lab.base.resources import data_dir

# A language model may sit below one of these keys, even two deep (Qwen3-Omni).
NESTED = ("thinker_config", "text_config", "llm_config", "language_config")
# Larger than any real value; keeps a hostile file from turning into a hostile amount of work.
MAX_NUMBER = 2**40
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

# What the keys mean, for the error that asks for them.
MEANING = {
    "num_hidden_layers": "number of layers",
    "num_key_value_heads": "KV heads of a layer",
    "head_dim": "elements of one key; not always hidden_size / num_attention_heads",
    "kv_lora_rank": "width of the MLA latent",
    "qk_rope_head_dim": "width of the rope part",
    "index_head_dim": "elements of one indexer key",
    "sliding_window": "tokens of the sliding window",
    "layer_kinds": 'one of "full", "swa", "linear", "none" for each layer, or one word for all',
    "kind": '"gqa", "mla" or "dsa"',
}


@dataclass(frozen=True)
class Architecture:
    """How one family of model classes stores its caches; a row of ``data/architectures.json``.

    Attributes:
        kind: as ``ModelGeometry.kind``.
        layers: layout keys in the order of preference; ``full``, ``window`` and ``window_flag`` are rules.
        head_dim: "derive" when the class falls back to hidden_size / num_attention_heads, else "".
        window: key of the window.
        state: recurrent state of the linear layers, "" when there are none.
        defaults: class defaults of keys that real files leave out.
        full_heads: keys of the full layers' heads when they differ; ``kv_heads_if`` switches ``kv_heads``.
        swa_heads: keys of the sliding layers' heads when they differ.
        indexer_if: key whose presence turns ``mla`` into ``dsa``.
        requires: keys without which other numbers would silently stand in.
        source: where this was read.
    """

    kind: str
    layers: tuple[str, ...]
    head_dim: str = ""
    window: str = "sliding_window"
    state: str = ""
    defaults: Mapping[str, int] = field(default_factory=dict)
    full_heads: Mapping[str, str] = field(default_factory=dict)
    swa_heads: Mapping[str, str] = field(default_factory=dict)
    indexer_if: str = ""
    requires: tuple[str, ...] = ()
    source: str = ""


@cache
def architectures() -> dict[str, Architecture]:
    """Every known model class."""
    rows = json.loads((data_dir() / "architectures.json").read_text(encoding="utf-8"))
    return {
        name: Architecture(
            **{k: v for k, v in row.items() if k != "architectures"}
            | {"layers": tuple(row["layers"]), "requires": tuple(row.get("requires", ()))}
        )
        for row in rows
        for name in row["architectures"]
    }


class Facts:
    """Reads keys of the text config (overrides first) and keeps a record of what was missing or assumed.

    Args:
        outer: the whole config.
        overrides: explicit facts; they beat the file.
        origin: how messages call the config.
    """

    def __init__(self, outer: Mapping[str, Any], overrides: Mapping[str, Any], origin: str) -> None:
        self.outer = outer
        self.inner = outer
        for _ in NESTED:
            nested = (self.inner[key] for key in NESTED if isinstance(self.inner.get(key), Mapping))
            self.inner = next(nested, self.inner)
        self.overrides = overrides
        self.origin = origin
        self.defaults: Mapping[str, int] = {}
        self.missing: dict[str, str] = {}
        self.asked: set[str] = set()
        self.assumed: list[str] = []

    def get(self, *keys: str) -> Any:
        """The first of the keys that is there and not null: in the overrides, then in the text config."""
        self.asked.update(keys)
        for place in (self.overrides, self.inner):
            for key in keys:
                if place.get(key) is not None:
                    return place[key]
        return None

    def either(self, key: str) -> Any:
        """A key that may stand at either level (dtype, quantization)."""
        value = self.get(key)
        return self.outer.get(key) if value is None else value

    def error(self, key: str, problem: str) -> InputError:
        """An input error that names the config and the key."""
        return InputError(f"{self.origin}: {key}: {problem}")

    def number(self, *keys: str, low: int = 1) -> int | None:
        """A whole number of at least ``low``, or None when no key is there."""
        value = self.get(*keys)
        if value is None:
            default = self.defaults.get(keys[0])
            if default is not None:
                self.assume(f"{keys[0]} = {default} (class default; the file does not say)")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_NUMBER:
            raise self.error(keys[0], f"expected a whole number from {low}, got {str(value)[:40]!r}")
        return value

    def need(self, *keys: str, low: int = 1) -> int:
        """A number that must be there; if it is not, it is put on record and 1 stands in until ``settle``."""
        value = self.number(*keys, low=low)
        if value is None:
            self.lack(keys[0])
            return 1
        return value

    def lack(self, key: str, meaning: str = "") -> None:
        """Put a missing fact on record."""
        self.missing.setdefault(key, meaning or MEANING.get(key, ""))

    def assume(self, what: str) -> None:
        """Put on record what the class says and the file does not."""
        if what not in self.assumed:
            self.assumed.append(what)

    def settle(self, architecture: str) -> None:
        """Refuse when anything was missing, with the list of it and how to give it."""
        if not self.missing:
            return
        wanted = ", ".join(f"{key} ({meaning})" if meaning else key for key, meaning in self.missing.items())
        example = ", ".join(f'"{key}": …' for key in self.missing)
        raise UnknownFact(
            f"{self.origin}: what {architecture or 'this model'} keeps per token cannot be told; "
            f"missing: {wanted}. Add it to the config or give it explicitly, overrides={{{example}}}"
        )


def first_architecture(config: Mapping[str, Any]) -> str:
    """``architectures[0]`` of a config, "" when there is none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def checkpoint_kv_dtype(quantization: Any) -> str | None:
    """The KV dtype that a checkpoint asks for and that SGLang's ``--kv-cache-dtype auto`` follows.

    Only ModelOpt's forms count (0.5.8 ``layers/quantization/modelopt_quant.py`` and
    ``model_executor/model_runner.py:configure_kv_cache_dtype``): a ``kv_cache_quant_algo``, or a
    ``kv_cache_scheme`` of 8-bit floats. What compressed-tensors writes under that name changes no pool.

    Args:
        quantization: a ``quantization_config``, or the ``quantization`` part of a hf_quant_config.json.

    Returns:
        ``fp8_e4m3``, or None: then the weights' dtype is used.
    """
    if not isinstance(quantization, Mapping):
        return None
    algorithm = quantization.get("kv_cache_quant_algo")
    scheme = quantization.get("kv_cache_scheme")
    if str(quantization.get("quant_method")).startswith("modelopt"):
        floats = isinstance(scheme, Mapping) and scheme.get("type") == "float" and scheme.get("num_bits") == 8
        algorithm = "FP8" if floats else algorithm
    return "fp8_e4m3" if isinstance(algorithm, str) and algorithm.upper() == "FP8" else None
