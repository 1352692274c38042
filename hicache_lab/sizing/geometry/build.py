"""From the facts of a config to the geometry: which architecture, which layers, which shapes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hicache_lab.base.errors import UnknownFact, UsageError
from hicache_lab.sizing.geometry.config import (
    DTYPES,
    Architecture,
    Facts,
    architectures,
    checkpoint_kv_dtype,
    first_architecture,
)
from hicache_lab.sizing.geometry.layers import DECODERS, MAX_LAYERS, LayoutError, decode
from hicache_lab.sizing.geometry.shapes import (
    LAYER_KINDS,
    CompressedShape,
    HeadShape,
    LatentShape,
    ModelGeometry,
)
from hicache_lab.sizing.geometry.states import STATES, state_shape

KINDS = ("gqa", "mla", "dsa", "dsv4")

# Keys that say that not all layers are alike; an unknown class that has one needs its layers given by hand.
LAYOUT_HINTS = (
    *DECODERS,
    *("sliding_window", "attention_chunk_size", "attn_layer_indices", "block_configs"),
    *("linear_num_value_heads", "mamba_num_heads", "mamba_d_state", "ssm_state_size"),
)

# Keys that may always be given by hand, used or not.
COMMON_KEYS = (
    *("name", "kind", "model_type", "notes", "num_hidden_layers", "layer_kinds", "hidden_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "q_lora_rank", "index_topk"),
)

_KINDS_HELP = f"one of {', '.join(LAYER_KINDS[:4])} for each layer, or one word for all"

DRAFT_KEYS = ("draft_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


def build(
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    name: str,
    origin: str,
    confidence: str,
    source: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> ModelGeometry:
    """Build the geometry of a config (see ``load_geometry``)."""
    facts = Facts(config, overrides, origin)
    inline = confidence == "inline"
    outer = first_architecture(config)
    inner = first_architecture(facts.inner) or outer
    row = _row(facts, outer, inner)
    facts.defaults = row.defaults
    for key in row.requires:
        facts.need(key)
    kinds = _layer_kinds(facts, row)
    latent = row.kind in ("mla", "dsa")
    row_bytes = facts.number("kv_row_bytes")
    full = swa = shape = None
    if row_bytes is not None and not latent:
        raise facts.error("kv_row_bytes", "is for MLA rows; for gqa give num_key_value_heads and head_dim")
    if row.kind == "gqa":
        full, swa = _heads(facts, row, kinds)
    elif latent and row_bytes is None:
        shape = LatentShape(facts.need("kv_lora_rank"), facts.need("qk_rope_head_dim"))
    dtype = facts.either("dtype") or facts.either("torch_dtype")
    geometry = ModelGeometry(
        name=name,
        architecture=outer,
        inner_architecture=inner,
        source=source,
        confidence="inline" if overrides else confidence,
        kind=row.kind,
        layer_kinds=kinds,
        full=full,
        swa=swa,
        latent=shape,
        compressed=_compressed(facts) if row.kind == "dsv4" else None,
        kv_row_bytes=row_bytes,
        index_head_dim=facts.need("index_head_dim") if row.kind in ("dsa", "dsv4") else None,
        indexer_owner=_indexer_owner(facts, row.kind, kinds),
        state=state_shape(facts, row.state) if "linear" in kinds else None,
        window=facts.need(row.window, "window") if "swa" in kinds or row.kind == "dsv4" else None,
        draft_layers=facts.number(*DRAFT_KEYS, low=0) or 0,
        num_attention_heads=facts.number("num_attention_heads"),
        checkpoint_kv_dtype=checkpoint_kv_dtype(facts.either("quantization_config")),
        max_position_embeddings=facts.number("max_position_embeddings", "seq_length", "n_ctx", "max_seq_len"),
        dtype=dtype if isinstance(dtype, str) and dtype in DTYPES else None,
        assumed=tuple(facts.assumed),
        notes=notes + _notes(facts),
    )
    # first: a misspelt key explains a missing one
    _refuse_unused(facts, {**(config if inline else {}), **overrides})
    facts.settle(outer or row.kind)
    return geometry


def _refuse_unused(facts: Facts, explicit: Mapping[str, Any]) -> None:
    """A key given by hand that nothing reads is a slip of the pen, not a fact."""
    known = {*facts.asked, *COMMON_KEYS}
    for key in explicit:
        if key not in known:
            close = difflib.get_close_matches(str(key)[:100], known, n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; read are {', '.join(sorted(facts.asked))}"
            raise UsageError(f"{facts.origin}: {str(key)[:100]!r} says nothing about this model's caches{hint}")


def _row(facts: Facts, outer: str, inner: str) -> Architecture:
    """The architecture's row; an unknown one must be told its kind."""
    table = architectures()
    known = table.get(outer) or table.get(inner)
    inline = facts.outer.get("kind") if not outer else None
    kind = facts.overrides.get("kind", inline)
    if kind is not None and kind not in KINDS:
        raise UsageError(f"{facts.origin}: kind: expected one of {', '.join(KINDS)}, got {str(kind)[:40]!r}")
    if known is not None and known.indexer_if and facts.get(known.indexer_if) is not None:
        known = replace(known, kind="dsa")
    if known is not None and kind is None and known.kind == "gqa" and facts.get("kv_lora_rank") is not None:
        raise UnknownFact(
            f"{facts.origin}: {outer or inner} stores keys and values of heads, yet the config has "
            'kv_lora_rank (MLA); say which it is, overrides={"kind": "mla"} or {"kind": "gqa"}'
        )
    if known is not None and kind in (None, known.kind):
        return known
    if kind is not None:
        state = facts.get("state") or ""
        if state and (not isinstance(state, str) or state not in STATES):
            raise UsageError(f"{facts.origin}: state: expected one of {', '.join(STATES)}, got {str(state)[:40]!r}")
        layers = ("compress_ratios",) if kind == "dsv4" else ("layer_kinds", "full")
        return Architecture(kind=str(kind), layers=layers, state=str(state))
    close = difflib.get_close_matches(outer[:200], table, n=3, cutoff=0.85)
    raise UnknownFact(
        f"{facts.origin}: "
        + (f"architecture {outer[:200]!r} is not known" if outer else "the config names no architecture")
        + ", so how it stores keys and values is not guessed"
        + (f" (close: {', '.join(close)})" if close else "")
        + '; give it explicitly, for example overrides={"kind": "gqa", "layer_kinds": "full"} when every '
        "layer keeps all tokens' keys and values"
    )


def _layer_kinds(facts: Facts, row: Architecture) -> tuple[str, ...]:
    count = facts.number("num_hidden_layers", "num_layers")
    if count is not None and count > MAX_LAYERS:
        raise facts.error("num_hidden_layers", f"expected at most {MAX_LAYERS}, got {count}")
    explicit = facts.get("layer_kinds")
    if explicit is not None:
        return _explicit_kinds(facts, explicit, count, LAYER_KINDS if row.kind == "dsv4" else LAYER_KINDS[:4])
    for key in row.layers:
        value = facts.get(key)
        if key == "attn_layer_period" and value is not None:
            offset = facts.get("attn_layer_offset")
            if offset is None:
                facts.lack("attn_layer_offset", "index of the attention layer within its period")
            value = None if offset is None else (value, offset)
        if key in DECODERS and value is not None:
            return _decoded(facts, key, value, count)
    for key in row.layers:
        if key in row.defaults:
            return _decoded(facts, key, facts.number(key), count)
    if count is None:
        facts.lack("num_hidden_layers")
    rule = row.layers[-1]
    if rule in DECODERS:
        facts.lack(rule, "which layers are of which kind")
        return ("full",) * (count or 1)
    if "layer_kinds" in row.layers and not facts.outer.get("kind"):
        hints = [key for key in LAYOUT_HINTS if facts.get(key) not in (None, False)]
        if hints:
            facts.lack("layer_kinds", f"the config has {', '.join(hints)}; {_KINDS_HELP}")
    return _window_rule(facts, rule, count or 1)


def _decoded(facts: Facts, key: str, value: Any, count: int | None) -> tuple[str, ...]:
    if count is None and key not in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        facts.lack("num_hidden_layers")
        return ("full",)
    try:
        return decode(key, value, count)
    except LayoutError as error:
        raise facts.error(key, str(error)) from error


def _explicit_kinds(facts: Facts, value: Any, count: int | None, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        if count is None:
            facts.lack("num_hidden_layers")
        value = [value] * (count or 1)
    wrong = not isinstance(value, list | tuple) or not value or len(value) > MAX_LAYERS
    if wrong or any(not isinstance(kind, str) or kind not in allowed for kind in value):
        raise facts.error("layer_kinds", f"expected {_KINDS_HELP}, got {str(value)[:60]!r}")
    if count is not None and len(value) != count:
        raise facts.error("layer_kinds", f"{len(value)} entries for {count} layers (num_hidden_layers)")
    return tuple(value)


def _window_rule(facts: Facts, rule: str, count: int) -> tuple[str, ...]:
    """``full``; ``window``: all slide when there is one; ``window_flag``, ``no_window``: Qwen's switch."""
    switch = facts.get("use_sliding_window") is True and facts.get("sliding_window") is not None
    if rule == "window" and facts.number("sliding_window") is not None:
        return ("swa",) * count
    if rule == "no_window" and switch:
        facts.lack("layer_types", "use_sliding_window is on; which layers slide")
    if rule == "window_flag" and switch:
        start = facts.need("max_window_layers", low=0)
        return tuple("swa" if i >= start else "full" for i in range(count))
    return ("full",) * count


def _heads(facts: Facts, row: Architecture, kinds: tuple[str, ...]) -> tuple[HeadShape | None, HeadShape | None]:
    kv_heads, dim = facts.need("num_key_value_heads", "multi_query_group_num"), _head_dim(facts, row)
    base = HeadShape(kv_heads, dim, facts.number("v_head_dim") or dim)
    swa = _own_heads(facts, row.swa_heads, base) if row.swa_heads else base
    full = _own_heads(facts, row.full_heads, base) if row.full_heads else base
    return full, swa if "swa" in kinds else None


def _own_heads(facts: Facts, keys: Mapping[str, str], base: HeadShape) -> HeadShape:
    """Heads that a kind of layer has for itself (Gemma-4's full layers, MiMo's sliding ones)."""
    dim = facts.need(keys["head_dim"])
    switch = keys.get("kv_heads_if")
    if switch is not None and (facts.get(switch) is not True or facts.get(keys["kv_heads"]) is None):
        facts.assume(f"{keys['kv_heads']} = {base.kv_heads} (as elsewhere; {switch} is off or no number given)")
        kv_heads = base.kv_heads
    else:
        kv_heads = facts.need(keys["kv_heads"])
    v_dim = facts.number(keys["v_head_dim"]) if "v_head_dim" in keys else None
    return HeadShape(kv_heads, dim, v_dim or dim)


def _head_dim(facts: Facts, row: Architecture) -> int:
    explicit = facts.number("head_dim", "attention_head_dim", "kv_channels")
    if explicit is not None:
        return explicit
    derived = row.head_dim == "derive"
    hidden, heads = (facts.number(key) if derived else None for key in ("hidden_size", "num_attention_heads"))
    if hidden is None or heads is None:
        facts.lack("head_dim")
        return 1
    if hidden % heads:
        raise facts.error("head_dim", f"missing, and hidden_size {hidden} / num_attention_heads {heads} is not whole")
    facts.assume(f"head_dim = {hidden // heads} (hidden_size / num_attention_heads; the file does not say)")
    return hidden // heads


def _compressed(facts: Facts) -> CompressedShape:
    dim, rope = facts.need("head_dim"), facts.need("qk_rope_head_dim")
    if not facts.missing and rope >= dim:
        raise facts.error("qk_rope_head_dim", f"{rope} must be smaller than head_dim {dim}")
    return CompressedShape(dim, rope, facts.need("index_head_dim"))


def _indexer_owner(facts: Facts, kind: str, kinds: tuple[str, ...]) -> tuple[bool, ...]:
    if kind == "dsv4":
        return tuple(layer == "c4" for layer in kinds)
    if kind != "dsa":
        return ()
    types = facts.get("indexer_types")
    if types is None:
        if facts.get("index_topk_freq") not in (None, 1):
            facts.lack("indexer_types", '"full" or "shared" for each layer: index_topk_freq says that layers share')
        else:
            facts.assume("an indexer on every layer (the file has no indexer_types)")
        return tuple(layer != "none" for layer in kinds)
    if not isinstance(types, list) or any(word not in ("full", "shared") for word in types):
        raise facts.error("indexer_types", f'expected "full" or "shared" for each layer, got {str(types)[:60]!r}')
    if len(types) != len(kinds):
        raise facts.error("indexer_types", f"{len(types)} entries for {len(kinds)} layers")
    return tuple(word == "full" for word in types)


def _notes(facts: Facts) -> tuple[str, ...]:
    notes = []
    cache_dtype = facts.either("mamba_ssm_cache_dtype")
    if isinstance(cache_dtype, str) and cache_dtype != (facts.either("mamba_ssm_dtype") or "float32"):
        notes.append(
            f"mamba_ssm_cache_dtype {cache_dtype[:40]} is not read by SGLang (0.5.23 configs/mamba_utils.py: "
            "only mamba_ssm_dtype and SGLANG_MAMBA_SSM_DTYPE)"
        )
    if facts.overrides:
        notes.append("given explicitly: " + ", ".join(sorted(map(str, facts.overrides))))
    return tuple(notes)
