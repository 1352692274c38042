"""Bytes that one token (or one state slot) takes in a host pool, by kind of pool."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.releases import ReleaseRules

STORE_BYTES = {
    "bf16": 2,
    "bfloat16": 2,
    "fp16": 2,
    "float16": 2,
    "fp32": 4,
    "float32": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of one stored element; fp8 lies in the device pool as uint8."""

INDEX_QUANT_BLOCK = 128


def store_bytes(dtype: str) -> int:
    """Bytes of one stored element of a KV dtype.

    Raises:
        UsageError: a dtype whose host pool is not a plain array of one element size (fp4, mxfp8, nvfp4, …).
    """
    try:
        return STORE_BYTES[dtype]
    except KeyError:
        raise UsageError(
            f"--kv-cache-dtype: expected one of {', '.join(STORE_BYTES)} (or auto), got {dtype!r}; packed formats "
            "with their own scales (fp4, mxfp8, nvfp4) are not sized here; of an MLA model the bytes of one row can be "
            "given instead: --geometry kv_row_bytes=N"
        ) from None


def mha_bytes_per_token(
    rules: ReleaseRules,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    asymmetric: bool | None = None,
) -> int:
    """Keys and values of one token in all ``layers`` of one rank.

    Args:
        rules: until 0.5.13 the value width was taken for the key's; 0.5.14–0.5.21 count it in a separate class
            only, 0.5.22 on always.
        layers: layers of this stage, packed draft layers included.
        kv_heads: KV heads on this rank.
        head_dim: elements of a key head.
        v_head_dim: elements of a value head.
        itemsize: bytes an element.
        asymmetric: whether the pool is of the separate class; by default wherever the widths differ.

    Returns:
        Bytes. Source: mem_cache/pool_host/mha.py get_size_per_token (0.4.4: memory_pool.py).
    """
    separate = (head_dim != v_head_dim) if asymmetric is None else asymmetric
    counted = rules.v_head_dim == "counted" or (rules.v_head_dim == "separate_class" and separate)
    width = head_dim + (v_head_dim if counted else head_dim)
    return width * kv_heads * layers * itemsize


def mla_bytes_per_token(rules: ReleaseRules, *, layers: int, row_elements: int, itemsize: int) -> int:
    """The latent row of one token in all ``layers``, as the guard counts it (0.4.5 forgot the layers).

    Source: mem_cache/pool_host/mla.py get_size_per_token; 0.4.5: memory_pool.py MLATokenToKVPoolHost.
    """
    return row_elements * itemsize * (layers if rules.mla_bytes_count_layers else 1)


def indexer_bytes_per_layer(index_head_dim: int, quant_block: int = INDEX_QUANT_BLOCK) -> int:
    """Index key of one token in one layer: fp8 elements plus one fp32 scale a quantisation block.

    Source: mem_cache/pool_host/dsa.py dsa_indexer_bytes_per_token_per_layer (132 bytes for 128 elements).
    """
    return index_head_dim + index_head_dim // quant_block * 4


def state_bytes_per_slot(
    *,
    layers: int,
    conv_shapes: Sequence[Sequence[int]],
    conv_itemsize: int,
    temporal_shape: Sequence[int],
    temporal_itemsize: int,
) -> int:
    """Recurrent state of one slot in all ``layers`` (a slot holds one request or one cached prefix).

    Source: mem_cache/pool_host/mamba.py MambaPoolHost.get_size_per_token.
    """
    conv = sum(prod(shape) for shape in conv_shapes) * conv_itemsize
    return (conv + prod(temporal_shape) * temporal_itemsize) * layers
