"""What each SGLang release does with host memory: one table of changes, one frozen row of rules a release.

Nothing else in this package asks for a version. A row says from which release a rule holds and the function under
``sglang/srt`` in which it was read; :func:`rules_for` folds the rows up to the release asked for. All rows were read
in the released source and most were executed (see tests/baselines): 34 releases from 0.4.4 to 0.5.23. The post
releases between them were read and compared (``READ_EQUAL``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from hicache_lab.base.errors import UnknownFact
from hicache_lab.base.units import GIB

VERIFIED = (
    "0.4.4 0.4.5 0.4.5.post3 0.4.6 0.4.7 0.4.8 0.4.9 0.4.9.post6 0.4.10.post2 0.5.1 0.5.2 0.5.3 0.5.4 0.5.5 "
    "0.5.5.post3 0.5.6 0.5.7 0.5.8 0.5.9 0.5.10 0.5.10.post1 0.5.11 0.5.12 0.5.13 0.5.14 0.5.15 0.5.16 0.5.17 "
    "0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23"
).split()
"""Releases whose own code produced the recorded vectors, oldest first."""

NEWEST = VERIFIED[-1]
"""The newest examined release: what later ones are taken to do."""

EXAMINED = f"{VERIFIED[0]} … {NEWEST}"
"""The range of examined releases in words."""

_EQUALS = {
    "0.4.4": "0.4.4.post1",
    "0.4.5": "0.4.4.post4",
    "0.4.6": "0.4.6.post1 0.4.6.post2 0.4.6.post3 0.4.6.post4",
    "0.4.7": "0.4.6.post5",
    "0.4.8": "0.4.7.post1 0.4.8.post1",
    "0.4.9": "0.4.9.post1 0.4.9.post2",
    "0.4.9.post6": "0.4.9.post3 0.4.9.post4 0.4.9.post5 0.4.10",
    "0.4.10.post2": "0.5.0rc0 0.5.0rc1 0.5.0rc2",
    "0.5.1": "0.5.1.post1 0.5.1.post2 0.5.1.post3",
    "0.5.3": "0.5.3.post1 0.5.3.post2 0.5.3.post3",
    "0.5.5": "0.5.4.post2 0.5.4.post3 0.5.5.post1 0.5.5.post2",
    "0.5.6": "0.5.6.post1 0.5.6.post2",
    "0.5.8": "0.5.8.post1",
    "0.5.12": "0.5.12.post1",
    "0.5.13": "0.5.13.post1",
    "0.5.15": "0.5.15.post1",
}
READ_EQUAL: Mapping[str, str] = MappingProxyType(
    {read: known for known, equal in _EQUALS.items() for read in equal.split()}
)
"""Releases read beside an examined one: host pools, their order, flags and pipeline split are the same in both."""

READ = ("0.4.4.post2", "0.4.4.post3", "0.4.5.post1", "0.4.5.post2", "0.5.4.post1")
"""Releases that equal no examined one; what they change was read in their own source and stands in ``CHANGES``."""

RESERVE_BYTES = 10 * GIB
"""What every release leaves to the rest of the machine; the source calls it ten GB, the number is 10 GiB."""

Rounding = Literal["none", "down", "up_a_page"]
NotLarger = Literal["assert_ratio", "assert_tokens", "warn"]
Shown = Literal["available", "allowance"]
Allocation = Literal["zero_filled", "unpinned", "torch_pinned", "host_register", "mmap_register"]
Indexer = Literal["not_mirrored", "inside_the_flag", "sidecar"]
Draft = Literal["none", "sidecar", "packed"]
ResolutionStep = Literal["storage", "layout", "unset_decode_backend", "fa3_decode_backend", "unified_memory"]


@dataclass(frozen=True)
class ReleaseRules:
    """The rules of one release. ``verified`` is False when the release itself was not examined."""

    version: str
    verified: bool = True
    warning: str | None = None
    era: str = "A"
    # flags and defaults
    has_ratio_flag: bool = False
    has_size_flag: bool = False
    default_ratio: float = 3.0
    buffer_only_ratio: float | None = None
    default_write_policy: str | None = None
    default_layout: str = "layer_first"
    default_host_memory_fraction: float | None = None
    # tokens of a host pool
    rounding: Rounding = "none"
    pp_stages_share_tokens: bool = False
    # bytes per token
    mla_bytes_count_layers: bool = True
    v_head_dim: Literal["taken_as_head_dim", "separate_class", "counted"] = "taken_as_head_dim"
    row_width_override: bool = False
    dsa_wide_rows: bool = False
    dsa_backend_of_role: bool = False
    dsa_fp8_on_blackwell: Literal["flashmla", "trtllm"] = "flashmla"
    indexer: Indexer = "not_mirrored"
    indexer_owners_only: bool = False
    indexer_label: str = "NSA"
    layer_shards: bool = False
    trtllm_mha_pages: tuple[int, ...] = (16, 32, 64)
    dcp_host_pool: bool = False
    draft: Draft = "none"
    draft_exact: bool = False
    dsa_draft_like_device: bool = False
    pp_remainder: Literal["last_stage", "last_stages"] = "last_stage"
    pp_refuses_mtp: bool = False
    dcp_logs_logical_tokens: bool = False
    dcp_speculation: frozenset[str] = frozenset()
    # which pools exist
    layouts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mamba_host_pool: bool = False
    mamba_layout_error: Literal["after_guard", "first_value_error", "first_assertion"] = "after_guard"
    mamba_log_slots: bool = False
    swa_architectures: frozenset[str] = frozenset()
    swa_needs_hybrid_ratio: bool = False
    swa_flat_with_hicache: frozenset[str] = frozenset()
    swa_flat_with_speculation: frozenset[str] = frozenset()
    swa_flat_with_trtllm_mha: frozenset[str] = frozenset()
    swa_needs_unified_tree: frozenset[str] = frozenset()
    swa_host_pool: bool = False
    size_split: bool = False
    dsv4_host_pool: bool = False
    dsv4_full_page_more_than_device: bool = False
    dsv4_c128_pages: bool = False
    dsv4_c128_state: bool = False
    dsv4_log_layout: bool = False
    # the guard
    not_larger: NotLarger = "assert_ratio"
    shown: Shown = "available"
    guard_divides_by_ranks: bool = False
    guard_reads_cgroup: bool = False
    cgroup_credits_page_cache: bool = False
    cgroup_fallback: bool = False
    auto_size: bool = False
    # a decode server's own host pool
    decode_retraction_ratio: float | None = None
    decode_retraction_holds_a_request: bool = False
    decode_shared_ratio: float = 2.0
    # how the memory is taken
    allocation: Allocation = "zero_filled"
    # texts
    pool_label_in_log: bool = False
    warning_names_pool: bool = False
    # argument resolution
    resolution_steps: tuple[ResolutionStep, ...] = ()
    resolves_only_when_enabled: bool = False
    moves_page_first_to_direct: bool = False
    layout_warning: str = ""
    layer_first_stores: frozenset[str] = frozenset({"mooncake"})
    layer_first_stores_named: str = "Mooncake"
    resolves_ratio: bool = False
    host_memory_mode: bool = False
    write_back_in_buffer_only: Literal["refused", "changed"] = "refused"
    sources: tuple[str, ...] = ()

    @property
    def pinned_power_of_two(self) -> bool:
        """Whether torch's pinned allocator rounds every host buffer up to a power of two."""
        return self.allocation == "torch_pinned"

    def resident_bytes(self, allocated_bytes: int) -> int:
        """Host bytes that one buffer really takes: torch's pinned allocator (0.4.5–0.5.4) rounds up to a power of two.

        Source: 0.4.5–0.5.4 mem_cache/memory_pool_host.py ``torch.empty(..., pin_memory=True)``, one buffer a pool;
        PyTorch's CachingHostAllocator rounds a request up to the next power of two.
        """
        if not self.pinned_power_of_two or allocated_bytes <= 0:
            return allocated_bytes
        return 1 << (allocated_bytes - 1).bit_length()

    def allocated_within(self, resident_bytes: int) -> int:
        """The largest buffer that takes no more than these bytes."""
        if not self.pinned_power_of_two or resident_bytes <= 0:
            return resident_bytes
        return 1 << (resident_bytes.bit_length() - 1)


def _layouts(mha: str, mla: str) -> Mapping[str, frozenset[str]]:
    return MappingProxyType({"mha": frozenset(mha.split()), "mla": frozenset(mla.split())})


_LLAMA4 = frozenset({"Llama4ForConditionalGeneration"})
_MIMO = frozenset({"MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2MTP"})
_GPT_OSS = frozenset({"GptOssForCausalLM"})
_GEMMA4 = frozenset({"Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"})
_DSV4 = frozenset({"DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN"})
_SWA_SINK = frozenset({"GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"})
_LAYER = "layer_first"
_PAGE = "layer_first page_first"
_DIRECT = "layer_first page_first page_first_direct"
_HEAD = f"{_DIRECT} page_head"
_SPLIT = f"{_DIRECT} page_first_kv_split"

Change = tuple[str, dict[str, Any], str]


def _change(since: str, source: str, **rules: Any) -> Change:
    """From this release on these rules hold; ``source`` is where they were read, below sglang/srt."""
    return since, rules, source


CHANGES: tuple[Change, ...] = (
    _change("0.4.4", "mem_cache/memory_pool.py MHATokenToKVPoolHost", era="A", layouts=_layouts(_LAYER, "")),
    _change(
        "0.4.4.post2",
        "mem_cache/memory_pool.py HostKVCache, MLATokenToKVPoolHost.get_size_per_token; mem_cache/hiradix_cache.py",
        has_ratio_flag=True,
        default_ratio=2.0,
        mla_bytes_count_layers=False,
        allocation="unpinned",
        layouts=_layouts(_LAYER, _LAYER),
    ),
    _change(
        "0.4.4.post4",
        "mem_cache/memory_pool.py HostKVCache.__init__",
        era="B",
        rounding="down",
        allocation="torch_pinned",
    ),
    _change(
        "0.4.5.post1",
        "mem_cache/memory_pool.py MLATokenToKVPoolHost.get_size_per_token",
        mla_bytes_count_layers=True,
    ),
    _change(
        "0.4.5.post3",
        "mem_cache/memory_pool.py HostKVCache.__init__",
        era="C",
        has_size_flag=True,
        not_larger="assert_tokens",
        default_write_policy="write_through_selective",
    ),
    _change("0.4.9", "configs/model_config.py is_hybrid_model", swa_architectures=_LLAMA4, swa_needs_hybrid_ratio=True),
    _change("0.4.9.post3", "mem_cache/memory_pool_host.py HostKVCache.__init__", era="D", shown="allowance"),
    _change("0.4.9.post6", "model_executor/model_runner.py ModelRunner.initialize", pp_refuses_mtp=True),
    _change(
        "0.4.10.post2",
        "mem_cache/memory_pool_host.py MHATokenToKVPoolHost.init_kv_buffer",
        layouts=_layouts(_PAGE, _PAGE),
    ),
    _change("0.5.2", "server_args.py ServerArgs", default_write_policy="write_through"),
    _change(
        "0.5.3",
        "server_args.py ServerArgs._handle_hicache",
        layouts=_layouts(_DIRECT, _DIRECT),
        resolution_steps=("storage", "layout"),
        layout_warning="Page first direct layout only support direct io backend",
    ),
    _change(
        "0.5.4.post1",
        "server_args.py ServerArgs._handle_hicache",
        resolution_steps=("storage", "layout", "unset_decode_backend"),
    ),
    _change("0.5.4.post2", "mem_cache/memory_pool_host.py HostKVCache.init_kv_buffer", allocation="host_register"),
    _change("0.5.5.post3", "mem_cache/memory_pool_host.py HostKVCache.__init__", era="E", rounding="up_a_page"),
    _change(
        "0.5.6",
        "mem_cache/memory_pool_host.py MHATokenToKVPoolHost.init_kv_buffer; distributed/utils.py get_pp_indices",
        layouts=_layouts(_HEAD, _SPLIT),
        pp_remainder="last_stages",
    ),
    _change(
        "0.5.7",
        "configs/model_config.py is_hybrid_model; server_args.py MiMoV2 branch",
        swa_architectures=_LLAMA4 | _MIMO,
        swa_flat_with_hicache=_MIMO,
    ),
    _change(
        "0.5.8",
        "configs/model_config.py is_hybrid_swa_model; server_args.py _handle_hicache",
        swa_architectures=_LLAMA4 | _MIMO | _GPT_OSS,
        swa_needs_hybrid_ratio=False,
        swa_flat_with_speculation=_GPT_OSS,
        swa_flat_with_trtllm_mha=_GPT_OSS,
        resolution_steps=("layout", "fa3_decode_backend", "storage"),
        layout_warning="Kernel io backend does not support page first direct layout",
    ),
    _change(
        "0.5.9",
        "mem_cache/memory_pool_host.py NSATokenToKVPoolHost",
        row_width_override=True,
        dsa_wide_rows=True,
        indexer="inside_the_flag",
        swa_flat_with_speculation=frozenset(),
    ),
    _change(
        "0.5.10",
        "mem_cache/memory_pool_host.py MambaPoolHost; server_args.py _handle_hicache",
        mamba_host_pool=True,
        swa_flat_with_trtllm_mha=frozenset(),
        dsa_fp8_on_blackwell="trtllm",
        resolution_steps=("layout", "storage", "fa3_decode_backend", "layout"),
        resolves_only_when_enabled=True,
        moves_page_first_to_direct=True,
        layout_warning="Kernel io backend does not support page first direct layout, switching to direct io backend",
    ),
    _change(
        "0.5.11",
        "mem_cache/memory_pool_host.py NSAIndexerPoolHost; managers/scheduler.py draft host pool; "
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py build_shared_anchor_stack (no row width is handed on)",
        indexer="sidecar",
        draft="sidecar",
        dsa_wide_rows=False,
        swa_architectures=_LLAMA4 | _MIMO | _GPT_OSS | _GEMMA4,
    ),
    _change(
        "0.5.12",
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py; managers/scheduler.py unified radix tree",
        swa_host_pool=True,
        swa_needs_unified_tree=_LLAMA4 | _GPT_OSS | _GEMMA4 | _DSV4,
        dsa_wide_rows=True,
        dsv4_host_pool=True,
        dsv4_c128_state=True,
        dsv4_full_page_more_than_device=True,
        swa_architectures=_LLAMA4 | _MIMO | _GPT_OSS | _GEMMA4 | _DSV4,
    ),
    _change(
        "0.5.13",
        "mem_cache/memory_pool_host.py alloc_with_host_register; mem_cache/registry.py default_radix_cache_factory; "
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py build_deepseek_v4_hicache_stack",
        allocation="mmap_register",
        indexer_label="DSA",
        dsv4_log_layout=True,
        dsv4_c128_state=False,
        swa_needs_unified_tree=frozenset(),
    ),
    _change(
        "0.5.14",
        "mem_cache/memory_pool_host.py AsymmetricMHATokenToKVPoolHost, MambaPoolHost",
        v_head_dim="separate_class",
        swa_flat_with_hicache=frozenset(),
        swa_needs_unified_tree=_MIMO,
        mamba_layout_error="first_value_error",
        default_layout="page_first",
        resolution_steps=("layout", "storage"),
    ),
    _change(
        "0.5.15",
        "mem_cache/memory_pool_host.py HostKVCache.__init__, sync_fixed_hicache_size",
        era="F",
        pp_stages_share_tokens=True,
        not_larger="warn",
        dsv4_full_page_more_than_device=False,
    ),
    _change(
        "0.5.16",
        "mem_cache/pool_host/mamba.py; mem_cache/pool_host/base.py _effective_host_layer_num",
        mamba_layout_error="first_assertion",
        layer_shards=True,
    ),
    _change(
        "0.5.17",
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py _split_hicache_size; mem_cache/pool_host/base.py",
        size_split=True,
        dcp_host_pool=True,
        pool_label_in_log=True,
        warning_names_pool=True,
    ),
    _change(
        "0.5.18",
        "mem_cache/pool_host/mha.py, mla.py packed MTP layers; server_args.py _handle_hicache_ratio_default; "
        "mem_cache/hybrid_cache/hybrid_pool_assembler.py build_full_draft_pools; "
        "mem_cache/kv_cache_builder.py resolve_decode_retraction_backup",
        draft="packed",
        trtllm_mha_pages=(16, 32, 128, 64),
        decode_retraction_ratio=1.0,
        decode_shared_ratio=1.0,
        dsa_draft_like_device=True,
        resolves_ratio=True,
        dcp_speculation=frozenset({"DSPARK"}),
    ),
    _change(
        "0.5.19",
        "mem_cache/pool_host/base.py host_memory_budget_bytes; arg_groups/hicache_hook.py",
        era="G",
        guard_divides_by_ranks=True,
        swa_needs_unified_tree=frozenset(),
        buffer_only_ratio=1.2,
        decode_retraction_ratio=0.2,
        decode_shared_ratio=2.0,
        host_memory_mode=True,
        swa_architectures=_LLAMA4 | _MIMO | _GPT_OSS | _GEMMA4 | _DSV4 | _SWA_SINK,
    ),
    _change(
        "0.5.20",
        "arg_groups/hicache_hook.py resolve_storage_layout_compatibility; _deepseek_v4_num_host_pages",
        layer_first_stores=frozenset({"mooncake", "npu_memcache"}),
        layer_first_stores_named="Mooncake/Ascend MemCache",
        dsv4_c128_pages=True,
        dsa_backend_of_role=True,
    ),
    _change(
        "0.5.21",
        "mem_cache/host_memory.py; mem_cache/hicache_auto_size.py; "
        "model_executor/model_runner_components/layer_setup.py",
        era="H",
        guard_reads_cgroup=True,
        auto_size=True,
        decode_retraction_holds_a_request=True,
        default_host_memory_fraction=0.8,
        pp_refuses_mtp=False,
        dcp_logs_logical_tokens=True,
    ),
    _change(
        "0.5.22",
        "mem_cache/host_memory.py _cgroup_memory_headroom; mem_cache/pool_host/mha.py, dsa.py",
        era="I",
        cgroup_credits_page_cache=True,
        cgroup_fallback=True,
        v_head_dim="counted",
        indexer_owners_only=True,
        write_back_in_buffer_only="changed",
    ),
    _change(
        "0.5.23",
        "mem_cache/pool_host/base.py HostKVCache.__init__ host_token_capacity",
        era="J",
        draft_exact=True,
        resolution_steps=("layout", "storage", "unified_memory"),
        mamba_log_slots=True,
        layouts=_layouts(f"{_HEAD} page_unified", f"{_SPLIT} page_unified"),
    ),
)


@lru_cache(maxsize=1024)
def parse_version(text: str) -> Version:
    """A release as it is printed (``0.5.10.post1``, ``v0.5.8``, ``0.5.24.dev7+gabc``).

    Raises:
        UnknownFact: not a version.
    """
    try:
        return Version(text.strip())
    except InvalidVersion:
        raise UnknownFact(f"--sglang-version: expected a release such as 0.5.8, got {text!r}") from None


@lru_cache(maxsize=256)
def rules_for(version: str) -> ReleaseRules:
    """The rules of a release.

    Args:
        version: the release as SGLang prints it, for example ``"0.5.8"`` or ``"0.5.10.post1"``.

    Returns:
        The rules; ``warning`` is set (and ``verified`` False) when that very release was not examined: a release
        newer than the newest known one gets the newest rules, one between two known ones those of the older.

    Raises:
        UnknownFact: not a version, or older than 0.4.4, the first release with a host tier.
    """
    release = parse_version(version)
    if release < Version(VERIFIED[0]):
        raise UnknownFact(
            f"--sglang-version {version}: known releases start at {VERIFIED[0]}; "
            "earlier ones have no hierarchical cache"
        )
    applied = [(changes, source) for since, changes, source in CHANGES if Version(since) <= release]
    merged = {name: value for changes, _ in applied for name, value in changes.items()}
    rules = replace(ReleaseRules(version=str(release)), **merged, sources=tuple(source for _, source in applied))
    exact = {Version(known) for known in VERIFIED}
    # a build for one CUDA or ROCm ("0.5.8+cu129") is the release itself; a development build is not
    if release.local and not release.is_devrelease:
        release = Version(release.public)
    if release in exact or release in {Version(known) for known in (*READ_EQUAL, *READ)}:
        return rules
    older = max(known for known in exact if known <= release)
    relation = "newer than the newest examined release" if release > Version(NEWEST) else "not an examined release"
    return replace(
        rules,
        verified=False,
        warning=f"not verified for {version}: it is {relation}; the rules of {older} are used",
    )


def first_release_where(applies: Callable[[ReleaseRules], bool]) -> str | None:
    """The first release whose rules satisfy ``applies``, or None: for sentences such as "from 0.5.19 …"."""
    return next((since for since, _, _ in CHANGES if applies(rules_for(since))), None)
