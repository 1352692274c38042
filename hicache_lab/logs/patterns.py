"""The statements SGLang, PyTorch and the kernel make, as a table; ``match_message`` finds the one a message makes.

A named group or key ``name__unit`` becomes the field ``name``, converted by ``UNITS``. Lines that carry several values
name them by key, never by position, because releases add, drop and reorder fields.
Sources: the log calls of the 30 releases 0.4.4 … 0.5.23; PyTorch's allocator and process-group messages; mm/oom_kill.c.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hicache_lab.logs import events as ev
from hicache_lab.units import GB, GIB, KIB, MIB

N = r"-?\d+(?:\.\d+)?"
UNITS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(float(text)),
    "float": float,
    "str": str,
    "bool": lambda text: text == "True",
    "gb": lambda text: round(float(text) * GB),
    "gib": lambda text: round(float(text) * GIB),
    "kb": lambda text: int(text) * KIB,
    "mixed": lambda text: round(float(text.split()[0]) * (GIB if text.endswith("GiB") else MIB)),
    "ms": lambda text: float(text) / 1000,
    "ints": lambda text: tuple(int(number) for number in re.findall(r"\d+", text)),
}
_VALUES = {
    "int": r"-?\d+(?:\.0)?(?![\d.]*\d)",
    "float": rf"{N}|inf|nan",
    "str": r"[^\s,;)]+",
    "ms": N,
    "bool": "True|False",
    "gb": N,
    "gib": N,
    "kb": r"\d+",
    "ints": r"\[[\d, ]*\]",
}


@dataclass(frozen=True)
class Pattern:
    """One statement: how it begins, the class it becomes, and which values it may carry.

    Attributes:
        variant: the name of the row.
        event: the class of the event.
        begins: regular expression for the beginning of the message.
        keys: key as printed → field and unit; every key may be missing.
        const: fields that the statement itself implies.
        words: the first words (letters and underscores) a message of this kind can begin with; empty for any.
        lines: how many unprefixed lines that follow may belong to it.
    """

    variant: str
    event: type[ev.Event]
    begins: str
    keys: Mapping[str, str] = field(default_factory=dict)
    const: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    lines: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head", re.compile(self.begins))
        readers = []
        for key, name in self.keys.items():
            unit = name.rpartition("__")[2]
            readers.append(
                (name.rpartition("__")[0], re.compile(rf"(?:^|[\s,.({{]){key} ?[:=] ?({_VALUES[unit]})"), UNITS[unit])
            )
        object.__setattr__(self, "readers", tuple(readers))

    head: re.Pattern[str] = field(init=False)
    readers: tuple[tuple[str, re.Pattern[str], Callable[[str], Any]], ...] = field(init=False)

    def match(self, message: str) -> dict[str, Any] | None:
        """The fields the message carries, or None if it is another statement."""
        found = self.head.match(message)
        if found is None:
            return None
        fields = dict(self.const)
        for name, text in found.groupdict().items():
            base, _, unit = name.rpartition("__")
            if text is not None:
                fields[base or name] = UNITS[unit](text) if base else text
        for name, regex, convert in self.readers:
            value = regex.search(message)
            if value:
                fields[name] = convert(value[1])
        return fields


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
_RETRACT = {
    "#retracted_reqs": "retracted__int",
    "#aborted_retracted_reqs": "aborted__int",
    "#new_tokens_gained": "tokens_gained__int",
}
_RATIO = rf"(?:.*?#new_token_ratio: (?P<ratio_from__float>{N}) -> (?P<ratio_to__float>{N}))?"
_WANTS = (
    rf"(?:(?:.|\n)*?Requesting (?P<requested_bytes__gb>{N}) ?GB but only have (?P<free_bytes__gb>{N}) ?GB free)?"
)
_SMALL = (
    r"host (?:KV )?pool \((?P<host_tokens__int>\d+) tokens\) is smaller than the device pool "
    r"\((?P<device_tokens__int>\d+) tokens\)"
)
_SHORT = {"Try to allocate": "requested__int"}
_KILLED = {
    "total-vm": "total_vm_bytes__kb",
    "anon-rss": "anon_rss_bytes__kb",
    "file-rss": "file_rss_bytes__kb",
    "shmem-rss": "shmem_rss_bytes__kb",
}


def _step(name: str, begins: str, words: tuple[str, ...], keys: Mapping[str, str] = _STEP, **const: Any) -> Pattern:
    return Pattern(name, ev.Milestone, begins, keys, {"name": name, **const}, words)


def _host(variant: str, tail: str, pool: str, keys: Mapping[str, str] = _LAYOUT, lines: int = 0) -> Pattern:
    begins = rf"Allocating (?P<bytes__gb>{N}) ?GB host memory for {tail}"
    return Pattern(variant, ev.HostPool, begins, keys, {"pool": pool}, ("Allocating",), lines)


PATTERNS: tuple[Pattern, ...] = (
    # start-up
    _step("dist_begin", r"Init (?:torch distributed|parallel) begin", ("Init",)),
    _step("dist_end", r"Init (?:torch distributed|parallel) ends", ("Init",)),
    _step("memory_baseline", r"Memory baseline taken", ("Memory",)),
    _step("pool_end", r"Memory pool end\b", ("Memory",)),
    _step("weights_begin", r"Load weight begin", ("Load",), _WEIGHTS),
    Pattern(
        "weights_deferred",
        ev.Milestone,
        rf"Load weight end\. Committed real weights after .*? in (?P<commit_s__float>{N}) s"
        rf" \(capture overlap window (?P<window_s__float>{N}) s, startup overlap total (?P<total_s__float>{N}) s\)",
        const={"name": "weights_end"},
        words=("Load",),
    ),
    _step("weights_end", r"Load weight end", ("Load",), _WEIGHTS),
    Pattern("kv.va_upper", ev.DevicePool, r"(?:\S+ )?KV Cache VA upper bound", _DEVICE, {"final": False}, ("KV", "*KV")),
    Pattern("kv", ev.DevicePool, r"(?:(?P<pool>\S+) )?KV Cache is allocated", _DEVICE, words=("KV", "*KV"), lines=1),
    Pattern(
        "kv.post_capture",
        ev.DevicePool,
        r"Post-capture (?:draft )?KV sizing:",
        _DEVICE | {"max_total_num_tokens": "tokens__int", "free memory": "avail_bytes__gib"},
        words=("Post",),
    ),
    Pattern(
        "kv.swa",
        ev.DevicePool,
        rf"SWAKVPool mem usage: (?P<kv_bytes__gib>{N}) GB",
        {"swa size": "swa_tokens__int", "full size": "tokens__int"},
        {"pool": "swa+full"},
        ("SWAKVPool",),
    ),
    Pattern(
        "kv.swa.layers",
        ev.DevicePool,
        r"Use [Ss]liding window memory pool",
        {"full_layer_tokens": "tokens__int", "swa_layer_tokens": "swa_tokens__int"},
        {"pool": "swa+full"},
        ("Use",),
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
        ("Mamba",),
    ),
    Pattern("capacity", ev.Capacity, r"max_total_num_tokens=", _CAPS, words=("max_total_num_tokens",), lines=1),
    Pattern("graph_failed.oom", ev.GpuOom, r"Capture (?:.*? )?graph failed:?.*?out of memory", words=("Capture",)),
    Pattern("graph_failed", ev.Failure, r"Capture (?:.*? )?graph failed:? ?(?P<message>.*)", const={"process": "graph capture"}, words=("Capture",)),
    _step("graph_begin", r"Capture (?:(?P<label>.+?) )?(?:cuda|cpu|npu|xpu|CUDA|CPU|NPU|XPU|musa) graph begin", ("Capture",), _GRAPH),
    _step("graph_end", r"Capture (?:(?P<label>.+?) )?(?:cuda|cpu|npu|xpu|CUDA|CPU|NPU|XPU|musa) graph end", ("Capture",), _GRAPH),
    _step("graph_sizes", r"Capture (?:\S+ )?graph bs (?P<batch_sizes__ints>\[[\d, ]*\])", ("Capture",), {}),
    _step(
        "timings",
        r"Engine startup timings",
        ("Engine",),
        {
            "load_weight": "load_weight_s__float",
            "kv_cache_allocation": "kv_cache_allocation_s__float",
            "scheduler_e2e": "scheduler_e2e_s__float",
        },
    ),
    _step("tree_init", r"Tree cache initialized", ("Tree",), {"impl": "impl__str", "hicache_attached": "hicache_attached__bool"}),
    _step("ready", r"The server is fired up and ready to roll", ("The",), {}),
    _step("shutdown", r"(?:SIGTERM received|Gracefully exiting|INFO:     Shutting down)", ("SIGTERM", "Gracefully", "INFO"), {}),
    # host pools
    _host("host.kv", r"hierarchical KV cache\b", "kv", lines=1),
    Pattern(
        "host.pool",
        ev.HostPool,
        rf"Allocating (?P<pool>\S+) hierarchical KV host pool: (?P<tokens__int>\d+) tokens, (?P<bytes__gb>{N}) ?GB host memory",
        _MTP,
        words=("Allocating",),
        lines=2,
    ),
    _host("host.indexer", r"(?P<pool>NSA|DSA) indexer", "indexer", _MTP, lines=1),
    _host("host.minimax", r"MiniMax (?:sparse )?index-K", "index_k"),
    _host("host.mamba", r"hierarchical Mamba cache(?: \((?P<slots__int>\d+) state slots)?", "mamba"),
    _host("host.v4", r"(?P<pool>V4 (?:paged|state) pool '[^']*')", "v4"),
    _host("host.other", r"(?P<pool>[^.(\n]{3,60}?)(?=[.(]|$)", "other"),
    Pattern("host.refused", ev.HostRefusal, rf"Not enough host memory available\b{_WANTS}", words=("Not",), lines=1),
    Pattern("host.offload", ev.HostPressure, r"Not enough host memory for request (?P<rid>\S+)", {}, {"name": "offload"}, ("Not",)),
    Pattern("host.refused.side", ev.HostRefusal, rf"Not enough host memory for (?P<pool>[^.\n]+?)\.{_WANTS}", words=("Not",), lines=1),
    Pattern("host.none_left", ev.HostRefusal, r"No host memory is left for HiCache", const={"pool": "all"}, words=("No",)),
    Pattern("host.assert", ev.HostSmaller, r"The host memory should be larger than the device memory", const={"fatal": True}, words=("The",)),
    Pattern("host.small.label", ev.HostSmaller, rf"HiCache (?P<pool>(?!host )\S+) {_SMALL}", words=("HiCache",), lines=1),
    Pattern("host.small", ev.HostSmaller, rf"HiCache {_SMALL}", words=("HiCache",), lines=1),
    Pattern(
        "host.auto",
        ev.HostSizing,
        rf"HiCache auto-sizing: ratio (?P<ratio_from__float>{N}) -> (?P<ratio_to__float>{N}); "
        rf"(?P<budget_bytes__gib>{N}) GiB host memory per rank \(fraction (?P<fraction__float>{N}), "
        rf"(?P<ranks__int>\d+) ranks? on this host\)(?:, host pools (?P<pools_bytes__gib>{N}) GiB)?",
        const={"name": "auto"},
        words=("HiCache",),
    ),
    Pattern(
        "host.headroom",
        ev.HostSizing,
        rf"HiCache memory headroom: host (?P<host_bytes__gib>{N}) GiB(?:, cgroup (?P<cgroup_bytes__gib>{N}) GiB)?",
        const={"name": "headroom"},
        words=("HiCache",),
    ),
    Pattern(
        "host.sync",
        ev.HostSizing,
        r"Sync fixed-size HiCache host token capacity from (?P<tokens_from__int>\d+) to (?P<tokens_to__int>\d+)",
        const={"name": "sync"},
        words=("Sync",),
    ),
    Pattern(
        "host.register",
        ev.PinFailure,
        r"cudaHostRegister failed(?: \(rc=(?P<rc__int>-?\d+))?",
        {"offset": "offset__int", "size": "size_bytes__int", "total": "total_bytes__int"},
        words=("cudaHostRegister",),
    ),
    Pattern(
        "rewrite.layout",
        ev.Rewrite,
        r".{0,120}?switching to (?P<value>\w+) layout(?: for (?P<io_backend>\w+) io backend)?",
        const={"setting": "--hicache-mem-layout"},
        words=("Page", "HiCache", "Mooncake", "Layer", "Kernel", "Direct", "The"),
    ),
    Pattern(
        "rewrite.io",
        ev.Rewrite,
        r"(?=(?:Page first|Kernel io|.{0,40}layout)).{0,160}?(?:switching to (?P<value>\w+) io backend|only support (?:direct) io backend|does not support page first direct layout)",
        const={"setting": "--hicache-io-backend"},
        words=("Page", "Kernel", "HiCache", "Flash", "FlashAttention"),
    ),
    Pattern(
        "rewrite.page",
        ev.Rewrite,
        r"(?=.{0,120}page[_ ]size).{0,200}?(?:[Ss]et(?:ting)?|chang(?:e|ing|ed)|overrid\w+|forc\w+|switch\w*) .{0,60}?page[_ ]size.{0,30}?(?:to|=) ?(?P<value>\d+)",
        const={"setting": "--page-size"},
    ),
    # host tier at work
    Pattern("host.drop", ev.HostPressure, r"write_back: .{0,40}?dropped without backup(?:.*?node (?P<node__int>\d+))?", {}, {"name": "dropped"}, ("write_back",)),
    Pattern(
        "host.load_back",
        ev.HostPressure,
        r"load_back: FAILED to load (?P<tokens__int>\d+) tokens for node (?P<node__int>\d+)",
        {"evictable_size": "evictable__int"},
        {"name": "load_back_failed"},
        ("load_back",),
    ),
    Pattern("l3.discard", ev.Storage, r"HiCache hybrid prefetch discarded", _PREFETCH, {"name": "prefetch_discarded"}, ("HiCache",)),
    Pattern("l3.prefetch", ev.Storage, r"HiCache prefetch (?P<state>\w+) req=", _PREFETCH, {"name": "prefetch"}, ("HiCache",)),
    Pattern(
        "l3.prefetch_failed",
        ev.Storage,
        r"Prefetch operation (?P<rid>\S+) failed to retrieve page (?P<page>\w+)",
        const={"name": "prefetch_failed"},
        words=("Prefetch",),
    ),
    Pattern("l3.write_failed", ev.Storage, r"Write page to storage: (?P<pages__int>\d+) pages failed", const={"name": "write_failed"}, words=("Write",)),
    Pattern(
        "l3.backup",
        ev.Storage,
        rf"Finished backup request (?P<rid>[^,\s]+), free host memory, len:(?P<tokens__int>\d+), cost time:(?P<elapsed_s__float>{N})",
        const={"name": "backup"},
        words=("Finished",),
    ),
    # pressure on the device pool
    Pattern("retract.old", ev.Retraction, rf"Decode out of memory happened{_RATIO}", _RETRACT, words=("Decode",)),
    Pattern("retract", ev.Retraction, rf"(?:Testing retraction\. )?KV cache pool is full\. Retract requests{_RATIO}", _RETRACT, words=("KV", "Testing")),
    Pattern(
        "shortage",
        ev.TokenShortage,
        r"(?P<phase>Decode|Prefill) out of memory\. Try to lower your batch size"
        r"(?:(?:.|\n)*?Try to allocate (?P<requested__int>\d+) tokens)?(?:(?:.|\n)*?Ava[il]{2,3}able tokens: (?P<available__int>\d+))?",
        words=("Decode", "Prefill"),
        lines=4,
    ),
    Pattern("shortage.last", ev.TokenShortage, r"Out of memory even after retracting", const={"phase": "last"}, words=("Out",)),
    Pattern("shortage.start", ev.TokenShortage, r"(?:Not enough memory\. Please try to increase --mem-fraction-static|Loaded weights leave no GPU memory for the KV cache)", const={"phase": "start"}, words=("Not", "Loaded")),
    Pattern("queue_full", ev.Turned, r"The request queue is full", const={"name": "queue_full"}, words=("The",)),
    Pattern(
        "input_long",
        ev.Turned,
        r"Input length \((?P<input_tokens__int>\d+) tokens\) exceeds the maximum allowed length \((?P<max_tokens__int>\d+) tokens\)",
        const={"name": "input_long"},
        words=("Input",),
    ),
    Pattern(
        "flush_refused",
        ev.Turned,
        r"Cache not flushed because there are pending requests",
        {"#queue-req": "queue_req__int", "#running-req": "running_req__int"},
        {"name": "flush_refused"},
        ("Cache",),
    ),
    # failures
    Pattern("process_exception", ev.Failure, r"(?P<process>Scheduler|TokenizerManager|DetokenizerManager|DataParallelController) hit an exception", words=("Scheduler", "TokenizerManager", "DetokenizerManager", "DataParallelController")),
    Pattern(
        "watchdog",
        ev.Stall,
        rf"(?:(?P<process>\w+) )?[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<timeout_s__float>{N})(?:, self\.soft=(?P<soft__bool>\w+))?",
        const={"name": "watchdog"},
        words=("Watchdog", "*watchdog"),
    ),
    Pattern(
        "health",
        ev.Stall,
        r"Health check failed\. Server couldn't get a response from detokenizer for last (?P<timeout_s__float>\d+) seconds",
        const={"name": "health_check"},
        words=("Health",),
    ),
    Pattern("sigquit", ev.Stall, r"Received sigquit from a child proces+", const={"name": "sigquit"}, words=("Received",)),
    Pattern(
        "dead",
        ev.ProcessDeath,
        r"Rank (?P<index__int>\d+) scheduler is dead(?:(?:.|\n)*?Exit code: (?P<exit_code__int>-?\d+))?",
        words=("Rank",),
    ),
    Pattern("exit_code", ev.ProcessDeath, r"Exit code: (?P<exit_code__int>-?\d+)\s*$", words=("Exit",)),
    Pattern(
        "died_at_start",
        ev.ProcessDeath,
        r"Rank (?P<index__int>\d+) scheduler died during initialization \(exit code: (?P<exit_code__int>-?\d+)\)",
        words=("Rank",),
    ),
    Pattern(
        "crashed",
        ev.ProcessDeath,
        r"Subprocess (?P<name>\S+) \(pid=(?P<pid__int>\d+)\) crashed with exit code (?P<exit_code__int>-?\d+)",
        words=("Subprocess",),
    ),
    Pattern(
        "gpu_oom",
        ev.GpuOom,
        r"(?:CUDA|HIP|XPU) out of memory\.(?: Tried to allocate (?P<tried_bytes__mixed>[\d.]+ [MG]iB))?"
        r"(?:(?:.|\n)*?GPU (?P<gpu__int>\d+) has a total capacity of (?P<total_bytes__mixed>[\d.]+ [MG]iB))?"
        r"(?:(?:.|\n)*?of which (?P<free_bytes__mixed>[\d.]+ [MG]iB) is free)?",
        words=("CUDA", "HIP", "XPU"),
        lines=1,
    ),
    Pattern(
        "nccl",
        ev.Stall,
        r"\[rank(?P<index__int>\d+)\]:\[E.*?Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=\d+, OpType=(?P<op>\w+)",
        {r"Timeout\(ms\)": "timeout_s__ms"},
        {"name": "nccl"},
    ),
    # the kernel, and process listings
    Pattern(
        "kernel_oom",
        ev.KernelOom,
        r"Out of memory: Kill(?:ed)? process (?P<pid__int>\d+),? \((?P<comm>[^)]*)\)",
        _KILLED,
        words=("Out",),
    ),
    Pattern(
        "kernel_oom.cgroup",
        ev.KernelOom,
        r"Memory cgroup out of memory: Kill(?:ed)? process (?P<pid__int>\d+),? \((?P<comm>[^)]*)\)",
        _KILLED,
        {"cgroup": True},
        ("Memory",),
    ),
    Pattern("defunct", ev.Defunct, r"\S+ +(?P<pid__int>\d+) .*\[(?P<comm>[^\]]+)\] <defunct>"),
    # requests
    Pattern(
        "request_stats",
        ev.RequestStats,
        r"Req ?Time ?Stats\(rid=(?P<rid>[^,)]+)",
        {
            "input[_ ]len": "input_len__int",
            "cached_input_len": "cached_input_len__int",
            "output[_ ]len": "output_len__int",
            "queue_duration": "queue_ms__float",
            "forward_duration": "forward_ms__float",
        },
        words=("Req", "ReqTimeStats"),
    ),
    Pattern(
        "access",
        ev.Access,
        r'INFO: +(?P<client>\S+) - "(?P<method>[A-Z]+) (?P<path>\S+) HTTP/[\d.]+" (?P<status__int>\d+)',
        words=("INFO",),
    ),
)

_WORD = re.compile(r"[A-Za-z_]\w*")
_NESTED = re.compile(r"^(?:\[[^\]\n]{0,80}\] ?){1,6}(?:>>> )?")
_EXCEPTION = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Failure)|Exception)(?:: ?(.*))?$", re.S)
MARKS = " \t>`'\"*|"


def _tables() -> tuple[dict[str, tuple[Pattern, ...]], dict[str, tuple[Pattern, ...]], tuple[Pattern, ...]]:
    first: dict[str, list[Pattern]] = {}
    second: dict[str, list[Pattern]] = {}
    for pattern in PATTERNS:
        for word in pattern.words:
            (second if word[0] == "*" else first).setdefault(word.lstrip("*"), []).append(pattern)
    return (
        {word: tuple(found) for word, found in first.items()},
        {word: tuple(found) for word, found in second.items()},
        tuple(pattern for pattern in PATTERNS if not pattern.words),
    )


_FIRST, _SECOND, _ANY = _tables()
_RARE = re.compile(r"page[_ ]size|^\[rank\d|<defunct>")


def match_message(message: str) -> tuple[Pattern, dict[str, Any]] | None:
    """The statement that a message makes.

    Args:
        message: text after the record's prefix, or a whole line that has none.

    Returns:
        The row of the table and the converted fields, or None.
    """
    message = message.lstrip("('\"")
    word = _WORD.match(message)
    if word is not None:
        for pattern in _FIRST.get(word[0], ()):
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
        rest = message[word.end() : word.end() + 40].split(None, 1)
        for pattern in _SECOND.get(rest[0], ()) if rest else ():
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
    if _RARE.search(message[:400]) and not message.startswith("server_args="):
        for pattern in _ANY:
            if (fields := pattern.match(message)) is not None:
                return pattern, fields
    return None


def unwrap(message: str) -> str:
    """The message without a logger's own brackets (``[ERROR] [PID-42] >>> …``) and without quoting marks."""
    return _NESTED.sub("", message).strip(MARKS)


def exception_of(line: str) -> tuple[str, str] | None:
    """``"torch.OutOfMemoryError: CUDA out of memory."`` → its class and message; None for any other line."""
    match = _EXCEPTION.match(line)
    return (match[1], (match[2] or "").strip()) if match else None
