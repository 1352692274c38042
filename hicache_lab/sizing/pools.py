"""One host pool: how many tokens it holds, what it asks for, what the release says while it is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hicache_lab.base.units import GB
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.guard import Budget, HostView, LaunchFailure, LogLine, rank_budget, refusal_text

Kind = Literal["mha", "mla", "nsa", "mamba", "indexer", "dsv4", "dsv4_state"]
_PAGE_POOLS = ("dsv4", "dsv4_state")

NOT_LARGER = "The host memory should be larger than the device memory with the current protocol"


@dataclass(frozen=True)
class PoolSpec:
    """What is asked of one host pool.

    Attributes:
        kind: the host pool class.
        label: the name that the log gives it (kv, full, swa, draft; c4, swa … for DeepSeek-V4).
        bytes_per_token: bytes of a token (a state slot; a page item of one layer for DeepSeek-V4), all layers.
        device_tokens: tokens (slots) of the device pool that it mirrors.
        page_size: tokens a page, as the server is started with it (widened by ``dcp_size``).
        ratio: host tokens per device token, used when ``size_gb`` is not positive.
        size_gb: GB (1e9) for this pool on this rank.
        layout: --hicache-mem-layout.
        allocated_bytes_per_token: bytes really taken a token where that differs from what is checked (0.4.5 MLA).
        target_layers, draft_layers: layers, and draft layers packed behind them.
        dcp_size: decode context parallel ranks that share one latent row.
        pp_peer_tokens: tokens that the other pipeline stages get from the same --hicache-size.
        host_token_capacity: exact tokens (0.5.23 draft and interleaved pools), instead of ratio and size.
        anchor_tokens: tokens of the KV pool that an indexer lies beside.
        pages: host pages of a DeepSeek-V4 pool.
        index_stride_bytes: bytes of one indexer page, where the log prints it.
    """

    kind: Kind
    bytes_per_token: int
    device_tokens: int
    page_size: int = 1
    ratio: float = 2.0
    size_gb: float = 0
    label: str = "kv"
    layout: str = "layer_first"
    allocated_bytes_per_token: int | None = None
    target_layers: int = 1
    draft_layers: int = 0
    dcp_size: int = 1
    pp_peer_tokens: tuple[int, ...] = ()
    host_token_capacity: int | None = None
    anchor_tokens: int = 0
    pages: int = 0
    index_stride_bytes: int | None = None

    @property
    def layers(self) -> int:
        """Target and packed draft layers."""
        return self.target_layers + self.draft_layers


@dataclass(frozen=True)
class HostPool:
    """One host pool as it is built: ``requested_bytes`` is what the check sees, ``allocated_bytes`` what is taken."""

    spec: PoolSpec
    tokens: int
    pages: int
    page_size: int
    requested_bytes: int
    allocated_bytes: int
    synced_from_tokens: int | None = None

    @property
    def equivalent_ratio(self) -> float:
        """Host tokens per device token."""
        return self.tokens / self.spec.device_tokens if self.spec.device_tokens else float("inf")


@dataclass(frozen=True)
class Construction:
    """How building a pool ends: ``outcome`` is ``ok`` or the exception's type, with what was logged before."""

    outcome: str = "ok"
    message: str | None = None
    logs: tuple[LogLine, ...] = ()
    budget: Budget | None = None


def size_pool(spec: PoolSpec, rules: ReleaseRules) -> HostPool:
    """Tokens, pages and bytes of a pool under a release's rules.

    Args:
        spec: what is asked.
        rules: the release.

    Returns:
        The pool; integers throughout, as the release computes them (a float product is truncated, not rounded).

    Raises:
        LaunchFailure: an exact capacity that is not a positive multiple of the page, or a page that the DCP
            ranks cannot divide.

    Source: HostKVCache.__init__ (0.4.5–0.5.9 mem_cache/memory_pool_host.py, 0.5.16+ mem_cache/pool_host/base.py),
    DSAIndexerPoolHost and DeepSeekV4PagedHostPool.
    """
    if spec.kind in _PAGE_POOLS:
        total = spec.layers * spec.pages * spec.bytes_per_token
        return HostPool(spec, spec.pages * spec.page_size, spec.pages, spec.page_size, total, total)
    if spec.kind == "indexer":
        pages = spec.anchor_tokens // spec.page_size
        buffer_pages = (spec.anchor_tokens + spec.page_size + 1) // spec.page_size
        page_bytes = spec.page_size * spec.bytes_per_token
        return HostPool(spec, spec.anchor_tokens, pages, spec.page_size, pages * page_bytes, buffer_pages * page_bytes)
    if spec.page_size % spec.dcp_size:
        raise LaunchFailure(
            "AssertionError",
            f"HiCache host pool page_size ({spec.page_size}) must be a multiple of dcp_size ({spec.dcp_size}); "
            "expected the widened page from the DCP paged allocator.",
        )
    page = 1 if spec.kind == "mamba" else spec.page_size // spec.dcp_size
    synced_from = None
    if spec.host_token_capacity is not None:
        tokens = spec.host_token_capacity
        if tokens <= 0 or tokens % page:
            raise LaunchFailure(
                "ValueError",
                f"Host token capacity must be positive and page-aligned, got {tokens} for page_size={page}",
            )
        pages = tokens // page
    else:
        wanted = int(spec.device_tokens * spec.ratio)
        if spec.size_gb > 0:
            own = int(spec.size_gb * float(GB) // spec.bytes_per_token)  # a float product, as in the source
            # from 0.5.15 on the pipeline stages agree on the smallest
            wanted = min((own, *spec.pp_peer_tokens)) if rules.pp_stages_share_tokens else own
            synced_from = own if wanted != own else None
        pages = wanted // page + (1 if rules.rounding == "up_a_page" else 0)
        tokens = wanted if rules.rounding == "none" else pages * page
    requested = tokens * spec.bytes_per_token
    allocated = tokens * (spec.allocated_bytes_per_token or spec.bytes_per_token)
    if spec.kind == "nsa" and spec.index_stride_bytes is not None:
        # the index buffers have one page more than the check counts
        extra = (tokens + page + 1) // page - tokens // page
        allocated += extra * spec.index_stride_bytes * spec.layers
    return HostPool(spec, tokens, pages, page, requested, allocated, synced_from)


def resident_bytes(pool: HostPool, rules: ReleaseRules) -> int:
    """Host bytes that a pool really takes, pinned-allocator rounding included."""
    return rules.resident_bytes(pool.allocated_bytes)


def _packed(spec: PoolSpec, noun: str) -> str:
    return (
        f", packed MTP {noun}: target_layers={spec.target_layers}, draft_layers={spec.draft_layers}, "
        f"total_layers={spec.layers}"
        if spec.draft_layers
        else ""
    )


def allocating_text(pool: HostPool, rules: ReleaseRules) -> str:
    """The line that a rank writes before it takes the memory; an OOM-killed rank has written it too."""
    spec, amount = pool.spec, f"{pool.requested_bytes / GB:.2f} GB"
    if spec.kind == "mamba":
        slots = f"{pool.tokens} state slots, " if rules.mamba_log_slots else ""
        return f"Allocating {amount} host memory for hierarchical Mamba cache ({slots}layout={spec.layout})."
    if spec.kind == "indexer":
        packed = _packed(spec, "layers")
        return f"Allocating {amount} host memory for {rules.indexer_label} indexer (layout={spec.layout}){packed}."
    if spec.kind in _PAGE_POOLS:
        layout = f", layout={spec.layout}" if rules.dsv4_log_layout else ""
        if spec.kind == "dsv4_state":
            return (
                f"Allocating {amount} host memory for V4 state pool '{spec.label}' (layers={spec.layers}, "
                f"pages={pool.pages}, state_page_bytes={spec.bytes_per_token}{layout})."
            )
        return (
            f"Allocating {amount} host memory for V4 paged pool '{spec.label}' (layers={spec.layers}, "
            f"pages={pool.pages}, item_bytes={spec.bytes_per_token}{layout})."
        )
    if rules.pool_label_in_log:
        packed = _packed(spec, "KV layers")
        return f"Allocating {spec.label} hierarchical KV host pool: {pool.tokens} tokens, {amount} host memory{packed}."
    return f"Allocating {amount} host memory for hierarchical KV cache."


def _before_check(pool: HostPool, rules: ReleaseRules) -> Iterator[LogLine]:
    """What the release writes, and stops at, before it looks at the host's memory."""
    spec = pool.spec
    # from 0.5.14 on, mamba pools look at the layout before anything else
    if spec.kind == "mamba" and rules.mamba_layout_error != "after_guard":
        if rules.mamba_layout_error == "first_value_error" and spec.layout != "page_first_direct":
            text = f"MambaPoolHost only supports layout='page_first_direct', got '{spec.layout}'."
            raise LaunchFailure("ValueError", text)
        if spec.layout not in ("page_first", "page_first_direct"):
            raise LaunchFailure("AssertionError", f"Unsupported layout: {spec.layout}")
    if rules.not_larger == "assert_ratio" and spec.ratio < 1 and spec.size_gb <= 0:
        raise LaunchFailure("AssertionError", NOT_LARGER)
    if pool.synced_from_tokens is not None:
        smallest = min(spec.pp_peer_tokens)
        yield "INFO", f"Sync fixed-size HiCache host token capacity from {pool.synced_from_tokens} to {smallest}."
    if spec.kind in ("indexer", *_PAGE_POOLS) or pool.tokens > spec.device_tokens:
        return
    # host not larger than device: an assertion until 0.5.14, then a warning
    if rules.not_larger == "assert_tokens":
        raise LaunchFailure("AssertionError", NOT_LARGER)
    if rules.not_larger == "warn":
        named = rules.warning_names_pool and spec.kind != "mamba"
        name = f"{spec.label} host pool" if named else "host KV pool"
        yield (
            "WARNING",
            f"HiCache {name} ({pool.tokens} tokens) is smaller than the device pool ({spec.device_tokens} tokens);"
            "L2 cache effectiveness is reduced.Consider increasing --hicache-ratio (or --hicache-size) "
            "for higher L2 cache hit rate.",
        )


def failure_without_check(pool: HostPool, rules: ReleaseRules) -> LaunchFailure | None:
    """What stops this pool on any host, before its memory is looked at; None if nothing does."""
    try:
        list(_before_check(pool, rules))
    except LaunchFailure as failure:
        return failure
    return None


def pool_warnings(pool: HostPool, rules: ReleaseRules) -> list[str]:
    """What the release warns of while it builds this pool, on any host."""
    try:
        return [text for level, text in _before_check(pool, rules) if level == "WARNING"]
    except LaunchFailure:
        return []


def check_pool(
    pool: HostPool, rules: ReleaseRules, view: HostView, *, booked_budget_bytes: int | None = None
) -> Construction:
    """Build one pool as the release does: its check, its log lines, its exception.

    Args:
        pool: what is asked, sized.
        rules: the release.
        view: what this rank reads at its check.
        booked_budget_bytes: inside auto-sizing, what is left of the one snapshot instead of a new reading.

    Returns:
        The outcome; nothing is allocated.
    """
    spec, budget = pool.spec, None
    logs: list[LogLine] = []
    try:
        for line in _before_check(pool, rules):
            logs.append(line)  # also those before a failure
        if booked_budget_bytes is None:
            budget = rank_budget(rules, view)
            logs += budget.logs
        else:
            budget = Budget(booked_budget_bytes, reserve_bytes=0)
        if pool.requested_bytes > budget.budget_bytes:
            label = rules.indexer_label if spec.kind == "indexer" else spec.label
            text = refusal_text(spec.kind, label, pool.requested_bytes, budget.shown_bytes)
            raise LaunchFailure("ValueError", text)
        logs.append(("INFO", allocating_text(pool, rules)))
        if spec.kind == "nsa" and spec.index_stride_bytes is not None:
            pages = (pool.tokens + pool.page_size + 1) // pool.page_size
            text = (
                "NSATokenToKVPoolHost initialized with indexer page stride size: "
                f"{spec.index_stride_bytes}, page num: {pages}"
            )
            logs.append(("INFO", text))
        layouts = rules.layouts.get("mha" if spec.kind == "mha" else "mla", frozenset())
        if spec.kind in ("mha", "mla", "nsa") and spec.layout not in layouts:
            raise LaunchFailure("ValueError", f"Unsupported layout: {spec.layout}")
    except LaunchFailure as failure:
        return Construction(failure.kind, failure.message, tuple(logs), budget)
    return Construction(logs=tuple(logs), budget=budget)
