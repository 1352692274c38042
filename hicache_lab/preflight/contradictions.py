"""Flags that the server itself refuses before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_lab.preflight.question import Question
from hicache_lab.sglang.launch import Rejection


@dataclass(frozen=True)
class Refusal:
    """Why the server does not start: which flag, how much was asked, how much was there, the words it prints."""

    flag: str
    error: str
    message: str
    meaning: str = ""
    requested_bytes: int | None = None
    allowed_bytes: int | None = None
    rank: int | None = None


def find_contradiction(question: Question, rejections: Sequence[Rejection]) -> Refusal | None:
    """The first thing that the server stops at.

    Args:
        question: the launch.
        rejections: what the release's own argument parser refuses.
    """
    config, rules = question.config, question.rules
    for flag, value, known in (
        ("--hicache-size", config.hicache_size, rules.has_size_flag),
        ("--hicache-ratio", config.hicache_ratio, rules.has_ratio_flag),
    ):
        if value and not known:
            why = f"{rules.version} does not have {flag} yet"
            return Refusal(flag, "argparse", f"unrecognized arguments: {flag} {value}", why)
    for rejection in rejections:
        return Refusal(rejection.flag, "argparse", rejection.message)
    if config.disable_radix_cache:
        text = (
            "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
            "used at the same time. Please use only one of them."
        )
        return Refusal("--disable-radix-cache", "ValueError", text, "the host tier extends the radix cache")
    if (config.dcp_size or 1) > 1 and (refused := _dcp_contradiction(question)) is not None:
        return refused
    heads = question.geometry.full
    if heads is not None and not heads.splits_evenly(config.attn_tp_size):
        return Refusal(
            "--tp-size",
            "AssertionError",
            f"{heads.kv_heads} KV heads and {config.attn_tp_size} ranks that share them: neither divides the other",
            "the attention layers assert it while the model is built (models/llama.py and its like)",
        )
    return None


def _dcp_contradiction(question: Question) -> Refusal | None:
    """What decode context parallelism cannot be combined with.

    Source: 0.5.17 server_args.py _resolve_hicache_dcp_compatibility; 0.5.19+ arg_groups/hicache_hook.py.
    """
    config, rules, flag = question.config, question.rules, "--dcp-size"
    if not rules.dcp_host_pool:
        return Refusal(flag, "unsupported", "the host pool knows decode context parallelism from 0.5.17 on only")
    algorithm = config.speculative_algorithm
    if algorithm is not None and algorithm not in rules.dcp_speculation:
        text = (
            "HiCache with --dcp-size > 1 only supports DSPARK speculative decoding; other draft-model host pools have "
            "no DCP index translation."
            if rules.dcp_speculation
            else "HiCache with --dcp-size > 1 does not support speculative decoding yet (the draft-model host pool has "
            "no DCP index translation)."
        )
        return Refusal(flag, "NotImplementedError", text)
    if question.geometry.kind not in ("mla", "dsa"):
        text = (
            "HiCache with --dcp-size > 1 is only supported for MLA models: the index translation lives in "
            "MLATokenToKVPoolHost, and the MHA host pool has none."
        )
        return Refusal(flag, "NotImplementedError", text)
    return None
