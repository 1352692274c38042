"""How a release rewrites contradictory HiCache arguments before it builds anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules

DEFAULT_RATIO = 2.0
FRACTION_RANGE = "--hicache-host-memory-fraction must be in (0, 1]."
_FA3_IO = (
    "FlashAttention3 decode backend is not compatible with hierarchical cache. Setting hicache_io_backend to "
    "vanilla I/O, which may lead to suboptimal performance with small page sizes."
)
_UNIFIED_IO = (
    "--enable-unified-memory: the direct io backend cannot copy the unified pool's strided KV rows, switching to "
    "the page_first layout with the kernel io backend"
)


@dataclass(frozen=True)
class HicacheArguments:
    """The arguments that HiCache's resolution reads and rewrites, under SGLang's names.

    ``flashinfer_available``, ``mla`` and ``sm100`` are facts of the machine and the model that some releases ask for.
    """

    enable_hierarchical_cache: bool = True
    hicache_ratio: float | None = None
    hicache_size: float = 0
    hicache_host_memory_fraction: float | None = None
    hicache_host_memory_mode: str = "cache"
    hicache_write_policy: str = "write_through"
    hicache_io_backend: str = "kernel"
    hicache_mem_layout: str = "layer_first"
    hicache_storage_backend: str | None = None
    attention_backend: str | None = None
    decode_attention_backend: str | None = None
    disaggregation_mode: str = "null"
    disable_radix_cache: bool = False
    enable_unified_memory: bool = False
    dcp_size: int = 1
    mla: bool = False
    flashinfer_available: bool = False
    sm100: bool = False

    @classmethod
    def of(cls, config: LaunchConfig, rules: ReleaseRules, *, mla: bool) -> HicacheArguments:
        """What a launch gives, with the release's own defaults where it gives nothing."""
        defaults: dict[str, Any] = {
            "enable_hierarchical_cache": False,
            "hicache_ratio": None if rules.resolves_ratio else rules.default_ratio,
            "hicache_host_memory_fraction": rules.default_host_memory_fraction,
            "hicache_write_policy": rules.default_write_policy or cls.hicache_write_policy,
            "hicache_mem_layout": rules.default_layout,
        }
        given = {one.name: value for one in fields(cls) if (value := getattr(config, one.name, None)) is not None}
        return cls(**(defaults | given), mla=mla)


@dataclass(frozen=True)
class Resolution:
    """The arguments as the release runs with them; ``outcome`` is ``ok`` or the exception that stops the start."""

    arguments: HicacheArguments
    logs: tuple[tuple[str, str], ...] = ()
    outcome: str = "ok"
    message: str | None = None


class _Refused(Exception):
    pass


Step = Callable[[HicacheArguments, ReleaseRules], tuple[HicacheArguments, str | None]]


def _storage(args: HicacheArguments, rules: ReleaseRules) -> tuple[HicacheArguments, str | None]:
    """Stores that cannot keep a layer-first layout change it."""
    if args.hicache_storage_backend not in rules.layer_first_stores or args.hicache_mem_layout != "layer_first":
        return args, None
    if args.hicache_storage_backend == "mooncake" and args.dcp_size > 1 and "unified_memory" in rules.resolution_steps:
        return args, None
    wanted = {"direct": "page_first_direct", "kernel": "page_first"}
    layout = wanted.get(args.hicache_io_backend, args.hicache_mem_layout)
    text = (
        f"{rules.layer_first_stores_named} storage backend does not support layer_first layout, "
        f"switching to {layout} layout for {args.hicache_io_backend} io backend"
    )
    return replace(args, hicache_mem_layout=layout), text


def _layout(args: HicacheArguments, rules: ReleaseRules) -> tuple[HicacheArguments, str | None]:
    """A page_first_direct layout needs direct io, and (0.5.10+) direct io needs page_first_direct."""
    # until 0.5.7 every other backend was changed, from 0.5.8 on only the kernel one
    kernel_only = rules.resolution_steps[0] == "layout"
    conflicting = args.hicache_io_backend == "kernel" if kernel_only else args.hicache_io_backend != "direct"
    if args.hicache_mem_layout == "page_first_direct" and conflicting:
        return replace(args, hicache_io_backend="direct"), rules.layout_warning
    if (
        rules.moves_page_first_to_direct
        and args.hicache_mem_layout == "page_first"
        and args.hicache_io_backend == "direct"
    ):
        text = "Page first layout is not supported with direct IO backend, switching to page first direct layout"
        return replace(args, hicache_mem_layout="page_first_direct"), text
    return args, None


def _decode_backend(args: HicacheArguments, rules: ReleaseRules) -> tuple[HicacheArguments, str | None]:
    """Kernel io gives way to an explicit fa3, and chooses a decode backend when none is given.

    0.5.5–0.5.7 always choose one, 0.5.8–0.5.13 only where decoding would really run on fa3.
    """
    if not args.enable_hierarchical_cache or args.hicache_io_backend != "kernel":
        return args, None
    if args.decode_attention_backend == "fa3":
        return replace(args, hicache_io_backend="direct"), _FA3_IO
    chooses = "unset_decode_backend" in rules.resolution_steps or args.attention_backend == "fa3"
    if args.decode_attention_backend is not None or not chooses:
        return args, None
    usable = args.sm100 if args.mla else args.flashinfer_available
    return replace(args, decode_attention_backend="flashinfer" if usable else "triton"), None


def _unified_memory(args: HicacheArguments, _: ReleaseRules) -> tuple[HicacheArguments, str | None]:
    if not args.enable_unified_memory or args.hicache_mem_layout != "page_first_direct":
        return args, None
    return replace(args, hicache_mem_layout="page_first", hicache_io_backend="kernel"), _UNIFIED_IO


_STEPS: dict[str, Step] = {
    "storage": _storage,
    "layout": _layout,
    "unset_decode_backend": _decode_backend,
    "fa3_decode_backend": _decode_backend,
    "unified_memory": _unified_memory,
}


def _default_ratio(args: HicacheArguments, rules: ReleaseRules) -> HicacheArguments:
    """An unset ratio gets its default; an explicit ratio or size switches auto-sizing off."""
    fraction = args.hicache_host_memory_fraction
    if rules.auto_size and fraction is not None and not 0 < fraction <= 1:
        raise _Refused(FRACTION_RANGE)
    if not rules.resolves_ratio:
        return args
    resolved = args
    if args.hicache_ratio is None and args.disaggregation_mode != "decode":
        staging = args.hicache_host_memory_mode == "buffer_only" and rules.buffer_only_ratio is not None
        resolved = replace(resolved, hicache_ratio=rules.buffer_only_ratio if staging else DEFAULT_RATIO)
    if rules.auto_size and (args.hicache_ratio is not None or args.hicache_size > 0):
        resolved = replace(resolved, hicache_host_memory_fraction=None)
    return resolved


def _host_memory_mode(args: HicacheArguments, rules: ReleaseRules) -> tuple[HicacheArguments, str | None]:
    """buffer_only keeps nothing in host memory: it needs a store, and cannot write back into memory."""
    if not rules.host_memory_mode or args.hicache_host_memory_mode == "cache":
        return args, None
    if args.hicache_host_memory_mode != "buffer_only":
        raise _Refused(
            f"hicache_host_memory_mode must be 'cache' or 'buffer_only', got {args.hicache_host_memory_mode!r}"
        )
    if args.hicache_storage_backend is None:
        raise _Refused(
            "--hicache-host-memory-mode buffer_only requires a storage backend (--hicache-storage-backend): host "
            "memory is only a staging buffer and all cached data lives in storage."
        )
    if args.hicache_write_policy != "write_back":
        return args, None
    if rules.write_back_in_buffer_only == "refused":
        raise _Refused(
            "--hicache-host-memory-mode buffer_only does not support --hicache-write-policy write_back; use "
            "write_through or write_through_selective."
        )
    text = "--hicache-host-memory-mode buffer_only resolves --hicache-write-policy write_back to write_through"
    return replace(args, hicache_write_policy="write_through"), text


def resolve_arguments(args: HicacheArguments, rules: ReleaseRules) -> Resolution:
    """The arguments a release really runs with.

    Args:
        args: as given, defaults of the release filled in.
        rules: the release.

    Returns:
        The rewritten arguments and the log lines, or the error that stops the start.

    Source: 0.5.3–0.5.18 server_args.py ServerArgs._handle_hicache; 0.5.19+ arg_groups/hicache_hook.py.
    """
    logs: list[tuple[str, str | None]] = []
    resolved, problem = args, None
    try:
        resolved = _default_ratio(args, rules)
        if rules.resolves_only_when_enabled and not args.enable_hierarchical_cache:
            return Resolution(resolved)
        resolved, text = _host_memory_mode(resolved, rules)
        logs.append(("INFO", text))
        for name in rules.resolution_steps:
            before = resolved
            resolved, text = _STEPS[name](resolved, rules)
            logs.append(("WARNING", text))
            if name == "layout" and resolved is not before and rules.moves_page_first_to_direct:
                # both conflicts are looked at in turn within this step
                resolved, text = _layout(resolved, rules)
                logs.append(("WARNING", text))
    except _Refused as refused:
        problem = str(refused)
    said = tuple((level, text) for level, text in logs if text is not None)
    return Resolution(resolved, said, "ok" if problem is None else "ValueError", problem)
