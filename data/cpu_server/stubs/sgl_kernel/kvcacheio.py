"""The host↔device KV copies of HiCache, on a machine where both sides are the same memory.

Byte-exact for every layout and I/O backend SGLang offers on CUDA: a pool is seen as rows of bytes at a base
address, and a copy is one numpy gather and scatter. Names, argument names and layouts are those of
sgl_kernel's kvcacheio (lf layer first, pf page first, ph page head; "mla" for pools with one buffer instead
of K and V).
"""

# ruff: noqa: ARG001 - the signatures are those of the real functions

import ctypes
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from . import missing

# "1": copy nothing. The negative control: outputs of returning prompts must change.
NO_COPY = "HICACHE_LAB_NO_COPY"

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def _indices(tensor: torch.Tensor) -> Indices:
    return np.asarray(tensor.detach().cpu().numpy(), dtype=np.int64)


def _addresses(layers: torch.Tensor | Sequence[int]) -> list[int]:
    """Base addresses of the layers' buffers, from SGLang's table of pointers."""
    return [int(a) for a in (layers.view(torch.int64).tolist() if isinstance(layers, torch.Tensor) else layers)]


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
    """Bytes at an address as an array of the given shape, without a copy."""
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + 1
    memory = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), shape=(last,))
    return as_strided(memory, shape, strides, writeable=True)


def _rows(address: int, rows: Indices, stride: int, width: int) -> Bytes:
    """View ``[max row + 1, width]`` of rows that lie ``stride`` bytes apart."""
    return _view(address, (int(rows.max()) + 1, width), (stride, 1))


def _copy(
    source: int,
    source_rows: Indices,
    source_stride: int,
    target: int,
    target_rows: Indices,
    target_stride: int,
    width: int,
) -> None:
    if len(source_rows) == 0 or os.environ.get(NO_COPY) == "1":
        return
    taken = _rows(source, source_rows, source_stride, width)[source_rows]
    _rows(target, target_rows, target_stride, width)[target_rows] = taken


def _heads(address: int, rows: Indices, layer: int, layer_count: int, page_size: int, heads: int, width: int) -> Bytes:
    """View ``[page, head, token in page, bytes of a head]`` of one layer of a page_head pool.

    Its order in memory is page, head, token, layer, head_dim (0.5.10 memory_pool_host.py,
    MHATokenToKVPoolHost).
    """
    step = width // heads
    token = step * layer_count
    shape = (int(rows.max()) // page_size + 1, heads, page_size, step)
    return _view(address + layer * step, shape, (token * page_size * heads, token * page_size, token, 1))


# ---- "kernel" backend, K and V


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """One layer, layer first on both sides."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(source, target, src_indices, dst_indices, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer, from page first."""
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(source, target, src_indices, dst_indices, layer_id, item_size, src_layout_dim)


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """One layer, from page head."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    if len(rows) == 0 or os.environ.get(NO_COPY) == "1":
        return
    layers = src_layout_dim // item_size
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        pool = _heads(source.data_ptr(), rows, layer_id, layers, page_size, head_num, item_size)
        taken = pool[rows // page_size, :, rows % page_size, :]
        _rows(target.data_ptr(), targets, item_size, item_size)[targets] = taken.reshape(len(rows), item_size)


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, layer first on both sides."""
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(sources, targets, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, into page first."""
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            sources, target, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """All layers, into page head."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    if len(rows) == 0 or os.environ.get(NO_COPY) == "1":
        return
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, source in enumerate(_addresses(sources)[:num_layers]):
            taken = _rows(source, rows, item_size, item_size)[rows].reshape(len(rows), head_num, -1)
            pool = _heads(target.data_ptr(), targets, layer, num_layers, page_size, head_num, item_size)
            pool[targets // page_size, :, targets % page_size, :] = taken


# ---- "kernel" backend, one latent buffer


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """One layer, layer first on both sides."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    _copy(src.data_ptr(), rows, item_size, dst.data_ptr(), targets, item_size, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer, from page first."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    start = src.data_ptr() + layer_id * item_size
    _copy(start, rows, src_layout_dim, dst.data_ptr(), targets, item_size, item_size)


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, layer first on both sides."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    pairs = zip(_addresses(src_layers)[:num_layers], _addresses(dst_layers)[:num_layers], strict=True)
    for source, target in pairs:
        _copy(source, rows, item_size, target, targets, item_size, item_size)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """All layers, into page first."""
    rows, targets = _indices(src_indices), _indices(dst_indices)
    for layer, source in enumerate(_addresses(src_layers)[:num_layers]):
        _copy(source, rows, item_size, dst.data_ptr() + layer * item_size, targets, dst_layout_dim, item_size)


# ---- "direct" backend: torch's own indexing, as the real one uses torch's copies


def transfer_kv_direct(
    src_layers: Iterable[torch.Tensor],
    dst_layers: Iterable[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
    **_: Any,
) -> None:
    """Layer first on both sides."""
    if os.environ.get(NO_COPY) == "1":
        return
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
    **_: Any,
) -> None:
    """One layer, from ``[page, layer, token, …]``."""
    if os.environ.get(NO_COPY) == "1":
        return
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
    **_: Any,
) -> None:
    """All layers, into ``[page, layer, token, …]``; the sources are K's layers, then V's."""
    if os.environ.get(NO_COPY) == "1":
        return
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


TRANSFERS = tuple(name for name in list(globals()) if name.startswith("transfer_kv_"))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(f"sgl_kernel.kvcacheio.{name}")
