"""Device pools that hold no memory, and how each release wants its host pools constructed. Torch environment only."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from typing import Any

import torch

Case = Mapping[str, Any]
Modules = Mapping[str, Any]

# the device keeps fp8 as bytes
STORED = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}
CLASSES = {
    "mha": ("MHATokenToKVPoolHost",),
    "mha_asym": ("AsymmetricMHATokenToKVPoolHost",),
    "mla": ("MLATokenToKVPoolHost",),
    "nsa": ("NSATokenToKVPoolHost",),
    "dsa_indexer": ("NSAIndexerPoolHost", "DSAIndexerPoolHost"),
    "mamba": ("MambaPoolHost",),
}


class Lacking(Exception):
    """The release has no such class, function or input; a KeyError of the release's own code is something else."""


def pool_class(modules: Modules, kind: str) -> Any | None:
    """The release's host-pool class of a kind; None when it has none."""
    for module in modules.values():
        for name in CLASSES[kind]:
            if isinstance(module.__dict__.get(name), type):
                return module.__dict__[name]
    return None


class DevicePool(types.SimpleNamespace):
    """What a host pool reads of the device pool; optional attributes that are not given read as absent values."""

    def __getattr__(self, name: str) -> Any:
        if name == "layer_shard_enabled":
            return False
        if name in ("host_capacity_tokens", "index_k_scale_buffer", "num_indexer_layers", "index_head_dim"):
            return None
        raise AttributeError(name)


def _rows(count: int, *shape: int, dtype: Any) -> list[Any]:
    return [torch.empty((1, *shape), dtype=dtype, device="meta")] * count


def device_pool(case: Case, layers: int | None = None) -> DevicePool:
    """The device pool of a case; its tensors are on torch's meta device and hold nothing."""
    dtype, store = STORED[case["dtype"]]
    count = case["layers"] if layers is None else layers
    pool = DevicePool(
        size=case["device_tokens"],
        dtype=dtype,
        store_dtype=store,
        layer_num=count,
        start_layer=0,
        end_layer=max(count - 1, 0),
        device="meta",
        page_size=case["page_size"],
    )
    if "kv_heads" in case:
        pool.head_num, pool.head_dim = case["kv_heads"], case["head_dim"]
        pool.v_head_dim = case.get("v_head_dim", case["head_dim"])
        pool.row_dim = pool.head_num * pool.head_dim
        pool.k_buffer = _rows(count, pool.head_num, pool.head_dim, dtype=store)
        pool.v_buffer = _rows(count, pool.head_num, pool.v_head_dim, dtype=store)
        pool.k_data_ptrs = pool.v_data_ptrs = torch.zeros(count, dtype=torch.uint64)
    if "kv_lora_rank" in case:
        pool.kv_lora_rank, pool.qk_rope_head_dim = case["kv_lora_rank"], case["qk_rope_head_dim"]
        pool.kv_cache_dim = case.get("kv_cache_dim", pool.kv_lora_rank + pool.qk_rope_head_dim)
        pool.kv_buffer = _rows(count, 1, pool.kv_cache_dim, dtype=store)
        pool.data_ptrs = torch.zeros(count, dtype=torch.uint64)
    if "index_head_dim" in case:
        pool.index_head_dim, pool.quant_block_size = case["index_head_dim"], case["quant_block_size"]
        pool.index_k_with_scale_buffer = _rows(count, 1, dtype=torch.uint8)
        pool.index_page_size = case["page_size"]
        pool.skip_topk_layers = [False] * count
    return pool


def _info(modules: Modules, pool: DevicePool) -> Any:
    """The description of device buffers that 0.5.23 passes instead of the device pool."""
    info = modules["device_pool_info"]
    if hasattr(pool, "kv_lora_rank"):
        return info.MLABufferInfo(
            buffers=tuple(pool.kv_buffer),
            data_ptrs=pool.data_ptrs,
            layer_indices=tuple(range(pool.layer_num)),
            device_layer_num=pool.layer_num,
            page_size=pool.page_size,
            kv_lora_rank=pool.kv_lora_rank,
            qk_rope_head_dim=pool.qk_rope_head_dim,
            kv_cache_dim=pool.kv_cache_dim,
            dtype=pool.store_dtype,
            device=torch.device("meta"),
        )
    buffers = info.KVBuffers(
        k=tuple(pool.k_buffer),
        v=tuple(pool.v_buffer),
        k_data_ptrs=pool.k_data_ptrs,
        v_data_ptrs=pool.v_data_ptrs,
        layout=info.KVBufferLayout.NHD,
    )
    return info.MHABufferInfo(
        buffers=buffers,
        page_size=pool.page_size,
        head_num=pool.head_num,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype=pool.store_dtype,
        device=torch.device("meta"),
    )


def construct(modules: Modules, case: Case) -> Any:
    """Call the release's own constructor as the release itself would.

    Raises:
        Lacking: the release lacks the class or an input that the case needs.
    """
    cls = pool_class(modules, case["kind"])
    if cls is None:
        raise Lacking(f"no {case['kind']} host pool")
    if case["kind"] == "mamba":
        return _mamba(modules, cls, case)
    if case["kind"] == "dsa_indexer":
        return _indexer(modules, cls, case)
    return _key_value(modules, cls, case)


def _parameters(cls: Any) -> Mapping[str, Any]:
    return inspect.signature(cls.__init__).parameters


def _key_value(modules: Modules, cls: Any, case: Case) -> Any:
    known = _parameters(cls)
    pool = device_pool(case)
    common: dict[str, Any] = {"pin_memory": False, "device": "meta"}
    for name, value, default in (
        ("host_size", case["size_gb"], 0),
        ("page_size", case["page_size"], 1),
        ("layout", case["layout"], "layer_first"),
        ("dcp_size", case.get("dcp_size", 1), 1),
        ("pool_label", case.get("pool_label", "kv"), "kv"),
        ("override_kv_cache_dim", case.get("override_kv_cache_dim"), None),
        ("host_token_capacity", case.get("host_token_capacity"), None),
    ):
        if name in known:
            common[name] = value
        elif value != default:
            raise Lacking(f"{cls.__name__} takes no {name}")
    drafts = [device_pool(case, 1) for _ in range(case.get("draft_layers", 0))]
    if "buffer_info" in known:
        common |= {
            "device_capacity_tokens": pool.size,
            "start_layer": 0,
            "end_layer": pool.end_layer,
            "draft_buffer_infos": tuple(_info(modules, draft) for draft in drafts),
        }
        if "target_layer_num" in known:
            common["target_layer_num"] = pool.layer_num
        return cls(_info(modules, pool), host_to_device_ratio=case["ratio"], **common)
    if drafts and "mtp_draft_device_pools" not in known:
        raise Lacking(f"{cls.__name__} takes no draft layers")
    if drafts:
        common["mtp_draft_device_pools"] = tuple(drafts)
    return cls(pool, host_to_device_ratio=case["ratio"], **common)


def _mamba(modules: Modules, cls: Any, case: Case) -> Any:
    layers, conv_type = case["layers"], STORED[case["conv_dtype"]][0]
    conv = [torch.empty((layers, 1, *shape), dtype=conv_type, device="meta") for shape in case["conv_shapes"]]
    state_type = STORED[case["temporal_dtype"]][0]
    temporal = torch.empty((layers, 1, *case["temporal_shape"]), dtype=state_type, device="meta")
    options = {"pin_memory": False, "device": "meta", "layout": case["layout"]}
    if "buffer_info" in _parameters(cls):
        info = modules["device_pool_info"].MambaStateBufferInfo(temporal=temporal, conv=tuple(conv))
        return cls(info, case["ratio"], case["size_gb"], device_capacity=case["device_slots"], **options)
    pool = DevicePool(
        size=case["device_slots"],
        num_mamba_layers=layers,
        device="meta",
        mamba_cache=types.SimpleNamespace(conv=conv, temporal=temporal),
    )
    return cls(pool, case["ratio"], case["size_gb"], **options)


def _indexer(modules: Modules, cls: Any, case: Case) -> Any:
    pool = device_pool(case)
    anchor = types.SimpleNamespace(
        page_size=case["page_size"],
        size=case["anchor_size"],
        page_num=case["anchor_size"] // case["page_size"],
        layout=case["layout"],
        mtp_draft_device_pools=(),
    )
    if "decl" in _parameters(cls):
        declared = modules["pool_host.dsa"].make_dsa_indexer_pool_decl(pool)
        return cls(declared, anchor, pin_memory=False, device="meta", packed_draft_device_pools=())
    return cls(pool, anchor, case["layout"], pin_memory=False, device="meta")
