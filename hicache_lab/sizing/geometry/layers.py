"""Which layer is of which kind: one small decoder for each way a config can say it.

A decoder gets the value of its key and the number of layers (None when the file does not say) and answers one
kind a layer. Which keys an architecture uses, and its class defaults, are data (``data/architectures.json``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Kinds = tuple[str, ...]
Decoder = Callable[[Any, int | None], Kinds]
MAX_LAYERS = 4096

# The words of ``layer_types`` and ``layers_block_type`` and the letters of ``hybrid_override_pattern``.
WORDS = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "swa",
    "chunked_attention": "swa",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "moe": "none",
    "mlp": "none",
}
LETTERS = {"M": "linear", "*": "full", "-": "none", "E": "none"}
RATIOS = {0: "none", 4: "c4", 128: "c128"}


class LayoutError(ValueError):
    """A layout that does not decode; the builder turns it into an InputError with file and key."""


def _translate(table: Mapping[Any, str], items: Sequence[Any]) -> Kinds:
    kinds = []
    for index, item in enumerate(items):
        kind = None if isinstance(item, bool | list | dict | float) else table.get(item)
        if kind is None:
            raise LayoutError(f"entry {index} is {str(item)[:40]!r}; known are {', '.join(map(str, table))}")
        kinds.append(kind)
    return tuple(kinds)


def _sequence(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise LayoutError(f"expected a list with one entry a layer, got {str(value)[:40]!r}")
    return value


def _count(layers: int | None) -> int:
    if layers is None:
        raise LayoutError("the number of layers (num_hidden_layers) is needed with it")
    return layers


def _period(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_LAYERS:
        raise LayoutError(f"expected a whole number of layers from 1, got {str(value)[:40]!r}")
    return value


def _every(value: Any, layers: int | None, rest: str) -> Kinds:
    """Every n-th layer is full: (i + 1) % n == 0."""
    period = _period(value)
    return tuple("full" if (i + 1) % period == 0 else rest for i in range(_count(layers)))


def _letters(value: Any, _layers: int | None) -> Kinds:
    if not isinstance(value, str) or not value:
        raise LayoutError(f"expected a string with one letter a layer, got {str(value)[:40]!r}")
    return _translate(LETTERS, value)


def _items(meaning: Mapping[Any, str]) -> Decoder:
    return lambda value, _layers: _translate(meaning, _sequence(value))


def _compress_ratios(value: Any, layers: int | None) -> Kinds:
    """One ratio a layer; entries beyond the target layers belong to the MTP layers."""
    kinds = _translate(RATIOS, _sequence(value))
    if len(kinds) < _count(layers):
        raise LayoutError(f"{len(kinds)} entries for {layers} layers")
    return kinds[:layers]


def _one_based(value: Any, layers: int | None) -> Kinds:
    """``linear_attn_config``: ``full_attn_layers`` and ``kda_layers`` hold layer numbers that start at 1."""
    if not isinstance(value, Mapping):
        raise LayoutError(f"expected full_attn_layers and kda_layers, got {str(value)[:40]!r}")
    kinds = dict.fromkeys(range(1, _count(layers) + 1), "")
    for key, kind in (("full_attn_layers", "full"), ("kda_layers", "linear")):
        for number in _sequence(value.get(key)):
            if isinstance(number, bool) or not isinstance(number, int) or kinds.get(number) != "":
                raise LayoutError(f"{key} names layer {str(number)[:40]!r}; layers are 1 to {layers}, each once")
            kinds[number] = kind
    missing = [number for number, kind in kinds.items() if not kind]
    if missing:
        raise LayoutError(f"layer {missing[0]} (counted from 1) is in neither full_attn_layers nor kda_layers")
    return tuple(kinds.values())


def _offset_period(value: Any, layers: int | None) -> Kinds:
    """Jamba: ``attn_layer_period`` and ``attn_layer_offset``; the rest is Mamba."""
    period, offset = value
    if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset < _period(period):
        raise LayoutError(f"attn_layer_offset: expected 0 to {period} - 1, got {str(offset)[:40]!r}")
    return tuple("full" if i % period == offset else "linear" for i in range(_count(layers)))


DECODERS: dict[str, Decoder] = {
    "layer_types": _items(WORDS),
    "layers_block_type": _items(WORDS),
    "hybrid_override_pattern": _letters,
    "attn_type_list": _items({0: "linear", 1: "full"}),
    "hybrid_layer_pattern": _items({0: "full", 1: "swa"}),
    "no_rope_layers": _items({0: "full", 1: "swa"}),
    "compress_ratios": _compress_ratios,
    "linear_attn_config": _one_based,
    "attn_layer_period": _offset_period,
    "full_attention_interval": lambda value, layers: _every(value, layers, "linear"),
    "sliding_window_pattern": lambda value, layers: _every(value, layers, "swa"),
    "no_rope_layer_interval": lambda value, layers: _every(value, layers, "swa"),
}


def decode(key: str, value: Any, layers: int | None) -> Kinds:
    """Decode one layout key.

    Args:
        key: a key of ``DECODERS``.
        value: what the config holds there.
        layers: ``num_hidden_layers``, or None when the file leaves it to the layout.

    Returns:
        One kind a layer.

    Raises:
        LayoutError: the value is not of the key's form, or disagrees with the number of layers.
    """
    kinds = DECODERS[key](value, layers)
    if layers is not None and len(kinds) != layers:
        raise LayoutError(f"{len(kinds)} entries for {layers} layers (num_hidden_layers)")
    if len(kinds) > MAX_LAYERS:
        raise LayoutError(f"{len(kinds)} layers are more than any model has (at most {MAX_LAYERS})")
    return kinds
