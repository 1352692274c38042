"""Bytes that a model keeps, by the functions that size host pools, under the newest release: it counts every byte."""

from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import HeadShape, ModelGeometry, StateShape
from hicache_lab.sizing.geometry.shapes import ITEMSIZES
from hicache_lab.sizing.kv import KvRows
from hicache_lab.sizing.rows import mha_bytes_per_token, state_bytes_per_slot

RULES = rules_for("0.5.23")
_DTYPES = {1: "fp8_e4m3", 2: "bfloat16", 4: "float32"}


def _rows(geometry: ModelGeometry, itemsize: int, tp: int) -> KvRows:
    # DSA rows without FlashMLA's scales
    plain = (("--dsa-decode-backend", "trtllm"),)
    return KvRows(LaunchConfig(tp_size=tp, kv_cache_dtype=_DTYPES[itemsize], other=plain), geometry, RULES)


def kv_bytes(geometry: ModelGeometry, itemsize: int, tp: int, kinds: tuple[str, ...] = ("full", "swa")) -> int:
    """One token in all layers of these kinds on one rank, the indexer not counted."""
    rows, layers = _rows(geometry, itemsize, tp), {kind: geometry.count(kind) for kind in kinds}
    if rows.latent_or_given(geometry):
        return rows.row(sum(layers.values()))
    return sum(rows.head_row(geometry, kind, count) for kind, count in layers.items() if count)


def head_bytes(shape: HeadShape, itemsize: int, tp: int) -> int:
    """Keys and values of one token in one layer."""
    return mha_bytes_per_token(
        RULES,
        layers=1,
        kv_heads=shape.heads_per_rank(tp),
        head_dim=shape.head_dim,
        v_head_dim=shape.v_head_dim,
        itemsize=itemsize,
    )


def indexer_bytes(geometry: ModelGeometry) -> int:
    """The indexer's key of one token in one layer that owns an indexer."""
    return _rows(geometry, 2, 1).index_row


def conv_bytes(shape: StateShape, tp: int) -> int:
    """One slot's convolution window in one layer."""
    return _state(shape, tp) - ssm_bytes(shape, tp)


def ssm_bytes(shape: StateShape, tp: int) -> int:
    """One slot's recurrent state in one layer."""
    return state_bytes_per_slot(
        layers=1,
        conv_shapes=(),
        conv_itemsize=1,
        temporal_shape=shape.temporal_shape(tp),
        temporal_itemsize=ITEMSIZES[shape.ssm_dtype],
    )


def _state(shape: StateShape, tp: int) -> int:
    return state_bytes_per_slot(
        layers=1,
        conv_shapes=(shape.conv_shape(tp),),
        conv_itemsize=ITEMSIZES[shape.conv_dtype],
        temporal_shape=shape.temporal_shape(tp),
        temporal_itemsize=ITEMSIZES[shape.ssm_dtype],
    )


def slot_bytes(geometry: ModelGeometry, tp: int) -> int:
    """One state slot in all linear layers on one rank."""
    return _rows(geometry, 2, tp).state_slot(geometry.count("linear"))
