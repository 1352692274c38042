"""Decode servers of a disaggregated pair: they may build host pools without --enable-hierarchical-cache."""

from __future__ import annotations

from hicache_lab.preflight.question import Question
from hicache_lab.sglang.arguments import DEFAULT_RATIO
from hicache_lab.sizing.kv import option

SWITCHED_OFF = "the launch line has no --enable-hierarchical-cache: there is no host tier and no host pool is built"
_CPU_TENSOR_ONLY = (
    "disaggregation-decode-enable-radix-cache",
    "disaggregation-decode-enable-offload-kvcache",
    "enable-priority-scheduling",
)


def retracts_to_host(question: Question) -> bool:
    """Whether a decode server keeps retracted requests in a host pool; 0.5.18+ does so by default for MHA models.

    Source: 0.5.18+ mem_cache/kv_cache_builder.py resolve_decode_retraction_backup (CUDA).
    """
    config, geometry = question.config, question.geometry
    if config.disaggregation_mode != "decode" or question.rules.decode_retraction_ratio is None:
        return False
    chosen = option(config, "disaggregation-decode-retraction-backup")
    if chosen is not None:
        return chosen == "host_pool"
    mirrored = geometry.kind == "gqa" and "linear" not in geometry.layer_kinds
    return mirrored and (config.dcp_size or 1) == 1 and all(option(config, name) is None for name in _CPU_TENSOR_ONLY)


def unset_ratio(question: Question, device_tokens: int | None) -> float:
    """The ratio of a decode server that was given neither a ratio nor a size.

    Source: 0.5.18–0.5.23 mem_cache/kv_cache_builder.py resolve_decode_retraction_backup.
    """
    config, rules = question.config, question.rules
    if not retracts_to_host(question):
        return DEFAULT_RATIO
    if config.enable_hierarchical_cache:
        return rules.decode_shared_ratio
    ratio = rules.decode_retraction_ratio or DEFAULT_RATIO
    context = config.context_length or question.geometry.max_position_embeddings
    if not rules.decode_retraction_holds_a_request or not device_tokens or not context:
        return ratio
    page = config.page_size or 1
    longest = -(-min(context - 1, device_tokens) // page) * page
    return max(ratio, longest / device_tokens)


def host_pool_without_hicache(question: Question) -> str | None:
    """Why a server without --enable-hierarchical-cache still builds a host pool, in words; None if it does not.

    Source: 0.5.3+ disaggregation/decode_kvcache_offload_manager.py for finished requests that are offloaded.
    """
    if option(question.config, "disaggregation-decode-enable-offload-kvcache") is not None:
        return "--disaggregation-decode-enable-offload-kvcache builds a host pool without --enable-hierarchical-cache"
    if not retracts_to_host(question):
        return None
    return (
        f"a decode server of {question.rules.version} keeps retracted requests in a host pool, without "
        "--enable-hierarchical-cache too (--disaggregation-decode-retraction-backup cpu_tensor builds none)"
    )


def builds_host_pools(question: Question) -> bool:
    """Whether this launch builds any host pool."""
    return bool(question.config.enable_hierarchical_cache) or host_pool_without_hicache(question) is not None
