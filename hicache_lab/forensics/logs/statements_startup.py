"""What a server says while it starts: arguments, weights, device pools, host pools, refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.statement import N, Pattern

_DEVICE = {
    "dtype": "dtype__str",
    "#tokens": "tokens__int",
    "K(?: size)?": "k_bytes__gib",
    "V(?: size)?": "v_bytes__gib",
    "KV size": "kv_bytes__gib",
    "avail mem": "avail_bytes__gib",
}
_STEP = {"elapsed": "elapsed_s__float", "mem usage": "usage_bytes__gib", "avail mem": "avail_bytes__gib"}
_WEIGHTS = _STEP | {"type": "model_type__str", "dtype": "dtype__str", "quant": "quant__str"}
_GRAPH = _STEP | {"Time elapsed": "elapsed_s__float", "backend": "backend__str", "bs": "batch_sizes__ints"}
_MTP = {
    "target_layers": "target_layers__int",
    "draft_layers": "draft_layers__int",
    "total_layers": "total_layers__int",
    "layout": "layout__str",
}
_LAYOUT = {"layout": r"layout__str"}
_CAPS = {
    name: f"{name}__int"
    for name in (
        "max_total_num_tokens",
        "chunked_prefill_size",
        "max_prefill_tokens",
        "max_running_requests",
        "context_len",
    )
} | {"available_gpu_mem": "available_gpu_bytes__gib", "available_cpu_mem": "available_cpu_bytes__gib"}
_PREFETCH = {
    "req": "rid__str",
    "completed(?:_local)?": "completed__int",
    "matched": "matched__int",
    "loaded": "loaded__int",
    "occupied": "occupied__int",
    "requested": "requested__int",
}
_WANTS = rf"(?:(?:.|\n)*?Requesting (?P<requested_bytes__gb>{N}) ?GB but only have (?P<free_bytes__gb>{N}) ?GB free)?"
_SMALL = (
    r"host (?:KV )?pool \((?P<host_tokens__int>\d+) tokens\) is smaller than the device pool "
    r"\((?P<device_tokens__int>\d+) tokens\)"
)


def _step(
    name: str, begins: str, keys: Mapping[str, str] = _STEP, *, words: tuple[str, ...] = (), **const: Any
) -> Pattern:
    return Pattern(name, ev.Milestone, begins, keys, {"name": name, **const}, words)


def _host(variant: str, tail: str, pool: str, keys: Mapping[str, str] = _LAYOUT, lines: int = 0) -> Pattern:
    begins = rf"Allocating (?P<bytes__gb>{N}) ?GB host memory for {tail}"
    return Pattern(variant, ev.HostPool, begins, keys, {"pool": pool}, lines=lines)


STARTUP: tuple[Pattern, ...] = (
    # start-up
    _step("dist_begin", r"Init (?:torch distributed|parallel) begin"),
    _step("dist_end", r"Init (?:torch distributed|parallel) ends"),
    _step("memory_baseline", r"Memory baseline taken"),
    _step("pool_end", r"Memory pool end\b"),
    _step("weights_begin", r"Load weight begin", _WEIGHTS),
    Pattern(
        "weights_deferred",
        ev.Milestone,
        rf"Load weight end\. Committed real weights after .*? in (?P<commit_s__float>{N}) s"
        rf" \(capture overlap window (?P<window_s__float>{N}) s, startup overlap total (?P<total_s__float>{N}) s\)",
        const={"name": "weights_end"},
    ),
    _step("weights_end", r"Load weight end", _WEIGHTS),
    Pattern(
        "kv.va_upper", ev.DevicePool, r"(?:\S+ )?KV Cache VA upper bound", _DEVICE, {"final": False}, ("KV", "*KV")
    ),
    Pattern("kv", ev.DevicePool, r"(?:(?P<pool>\S+) )?KV Cache is allocated", _DEVICE, words=("KV", "*KV"), lines=1),
    Pattern(
        "kv.post_capture",
        ev.DevicePool,
        r"Post-capture (?:draft )?KV sizing:",
        _DEVICE | {"max_total_num_tokens": "tokens__int", "free memory": "avail_bytes__gib"},
    ),
    Pattern(
        "kv.swa",
        ev.DevicePool,
        rf"SWAKVPool mem usage: (?P<kv_bytes__gib>{N}) GB",
        {"swa size": "swa_tokens__int", "full size": "tokens__int"},
        {"pool": "swa+full"},
    ),
    Pattern(
        "kv.swa.layers",
        ev.DevicePool,
        r"Use [Ss]liding window memory pool",
        {"full_layer_tokens": "tokens__int", "swa_layer_tokens": "swa_tokens__int"},
        {"pool": "swa+full"},
    ),
    Pattern(
        "mamba",
        ev.DevicePool,
        r"Mamba Cache is allocated",
        {
            "max_mamba_cache_size": "states__int",
            "conv_state size": "conv_bytes__gib",
            "ssm_state size": "ssm_bytes__gib",
            "intermediate_ssm_state_cache size": "intermediate_ssm_bytes__gib",
            "intermediate_conv_window_cache size": "intermediate_conv_bytes__gib",
        },
        {"pool": "mamba"},
    ),
    Pattern("capacity", ev.Capacity, r"max_total_num_tokens=", _CAPS, lines=1),
    Pattern("graph_failed.oom", ev.GpuOom, r"Capture (?:.*? )?graph failed:?.*?out of memory"),
    Pattern(
        "graph_failed",
        ev.Failure,
        r"Capture (?:.*? )?graph failed:? ?(?P<message>.*)",
        const={"process": "graph capture"},
    ),
    _step("graph_begin", r"Capture (?:(?P<label>.+?) )?(?:cuda|cpu|npu|xpu|CUDA|CPU|NPU|XPU|musa) graph begin", _GRAPH),
    _step("graph_end", r"Capture (?:(?P<label>.+?) )?(?:cuda|cpu|npu|xpu|CUDA|CPU|NPU|XPU|musa) graph end", _GRAPH),
    _step("graph_sizes", r"Capture (?:\S+ )?graph bs (?P<batch_sizes__ints>\[[\d, ]*\])", {}),
    _step(
        "timings",
        r"Engine startup timings",
        {
            "load_weight": "load_weight_s__float",
            "kv_cache_allocation": "kv_cache_allocation_s__float",
            "scheduler_e2e": "scheduler_e2e_s__float",
        },
    ),
    _step("tree_init", r"Tree cache initialized", {"impl": "impl__str", "hicache_attached": "hicache_attached__bool"}),
    _step("ready", r"The server is fired up and ready to roll", {}),
    _step(
        "shutdown",
        r"(?:SIGTERM received|Gracefully exiting|INFO:     Shutting down)",
        {},
        words=("SIGTERM", "Gracefully", "INFO"),
    ),
    # host pools
    _host("host.kv", r"hierarchical KV cache\b", "kv", lines=1),
    Pattern(
        "host.pool",
        ev.HostPool,
        rf"Allocating (?P<pool>\S+) hierarchical KV host pool: (?P<tokens__int>\d+) tokens, (?P<bytes__gb>{N}) ?GB "
        rf"host memory",
        _MTP,
        lines=2,
    ),
    _host("host.indexer", r"(?P<pool>NSA|DSA) indexer", "indexer", _MTP, lines=1),
    _host("host.minimax", r"MiniMax (?:sparse )?index-K", "index_k"),
    _host("host.mamba", r"hierarchical Mamba cache(?: \((?P<slots__int>\d+) state slots)?", "mamba"),
    _host("host.v4", r"(?P<pool>V4 (?:paged|state) pool '[^']*')", "v4"),
    _host("host.other", r"(?P<pool>[^.(\n]{3,60}?)(?=[.(]|$)", "other"),
    Pattern("host.refused", ev.HostRefusal, rf"Not enough host memory available\b{_WANTS}", lines=1),
    Pattern(
        "host.offload", ev.HostPressure, r"Not enough host memory for request (?P<rid>\S+)", {}, {"name": "offload"}
    ),
    Pattern("host.refused.side", ev.HostRefusal, rf"Not enough host memory for (?P<pool>[^.\n]+?)\.{_WANTS}", lines=1),
    Pattern("host.none_left", ev.HostRefusal, r"No host memory is left for HiCache", const={"pool": "all"}),
    Pattern(
        "host.assert", ev.HostSmaller, r"The host memory should be larger than the device memory", const={"fatal": True}
    ),
    Pattern("host.small.label", ev.HostSmaller, rf"HiCache (?P<pool>(?!host )\S+) {_SMALL}", lines=1),
    Pattern("host.small", ev.HostSmaller, rf"HiCache {_SMALL}", lines=1),
    Pattern(
        "host.auto",
        ev.HostSizing,
        rf"HiCache auto-sizing: ratio (?P<ratio_from__float>{N}) -> (?P<ratio_to__float>{N}); "
        rf"(?P<budget_bytes__gib>{N}) GiB host memory per rank \(fraction (?P<fraction__float>{N}), "
        rf"(?P<ranks__int>\d+) ranks? on this host\)(?:, host pools (?P<pools_bytes__gib>{N}) GiB)?",
        const={"name": "auto"},
    ),
    Pattern(
        "host.headroom",
        ev.HostSizing,
        rf"HiCache memory headroom: host (?P<host_bytes__gib>{N}) GiB(?:, cgroup (?P<cgroup_bytes__gib>{N}) GiB)?",
        const={"name": "headroom"},
    ),
    Pattern(
        "host.sync",
        ev.HostSizing,
        r"Sync fixed-size HiCache host token capacity from (?P<tokens_from__int>\d+) to (?P<tokens_to__int>\d+)",
        const={"name": "sync"},
    ),
    Pattern(
        "host.register",
        ev.PinFailure,
        r"cudaHostRegister failed(?: \(rc=(?P<rc__int>-?\d+))?",
        {"offset": "offset__int", "size": "size_bytes__int", "total": "total_bytes__int"},
    ),
    Pattern(
        "rewrite.layout",
        ev.SettingChanged,
        r".{0,120}?switching to (?P<value>\w+) layout(?: for (?P<io_backend>\w+) io backend)?",
        const={"setting": "--hicache-mem-layout"},
        words=("Page", "HiCache", "Mooncake", "Layer", "Kernel", "Direct", "The"),
    ),
    Pattern(
        "rewrite.io",
        ev.SettingChanged,
        r"(?=(?:Page first|Kernel io|.{0,40}layout)).{0,160}?(?:switching to (?P<value>\w+) io backend|only "
        r"support (?:direct) io backend|does not support page first direct layout)",
        const={"setting": "--hicache-io-backend"},
        words=("Page", "Kernel", "HiCache", "Flash", "FlashAttention"),
    ),
    Pattern(
        "rewrite.page",
        ev.SettingChanged,
        r"(?=.{0,120}page[_ ]size).{0,200}?(?:[Ss]et(?:ting)?|chang(?:e|ing|ed)|overrid\w+|forc\w+|switch\w*) "
        r".{0,60}?page[_ ]size.{0,30}?(?:to|=) ?(?P<value>\d+)",
        const={"setting": "--page-size"},
    ),
    # host tier at work
    Pattern(
        "host.drop",
        ev.HostPressure,
        r"write_back: .{0,40}?dropped without backup(?:.*?node (?P<node__int>\d+))?",
        {},
        {"name": "dropped"},
    ),
    Pattern(
        "host.load_back",
        ev.HostPressure,
        r"load_back: FAILED to load (?P<tokens__int>\d+) tokens for node (?P<node__int>\d+)",
        {"evictable_size": "evictable__int"},
        {"name": "load_back_failed"},
    ),
    Pattern("l3.discard", ev.Storage, r"HiCache hybrid prefetch discarded", _PREFETCH, {"name": "prefetch_discarded"}),
    Pattern("l3.prefetch", ev.Storage, r"HiCache prefetch (?P<state>\w+) req=", _PREFETCH, {"name": "prefetch"}),
    Pattern(
        "l3.prefetch_failed",
        ev.Storage,
        r"Prefetch operation (?P<rid>\S+) failed to retrieve page (?P<page>\w+)",
        const={"name": "prefetch_failed"},
    ),
    Pattern(
        "l3.write_failed",
        ev.Storage,
        r"Write page to storage: (?P<pages__int>\d+) pages failed",
        const={"name": "write_failed"},
    ),
    Pattern(
        "l3.backup",
        ev.Storage,
        rf"Finished backup request (?P<rid>[^,\s]+), free host memory, len:(?P<tokens__int>\d+), cost "
        rf"time:(?P<elapsed_s__float>{N})",
        const={"name": "backup"},
    ),
)
