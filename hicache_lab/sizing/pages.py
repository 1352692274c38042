"""Tokens a page, as the server will run: what was given, unless the model or an attention backend forces another."""

from __future__ import annotations

from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry import ModelGeometry

DSV4_PAGE = 256
DSA_PAGE = 64
_MLA_PAGES = {
    "flashmla": (64,),
    "cutlass_mla": (128,),
    "trtllm_mla": (32, 64),
    "tokenspeed_mla": (32, 64),
    "cutedsl_mla": (32, 64),
}
_MHA_PAGES = {"fa4": (128,), "hpc_ops": (64,)}


def resolve_page_size(config: LaunchConfig, geometry: ModelGeometry, rules: ReleaseRules) -> tuple[int, str | None]:
    """Tokens a page as the server will run, and why where it is not what was given.

    Source: server_args.py page-size handling of the attention backends, 0.5.8–0.5.18; arg_groups/overrides.py,
    0.5.19–0.5.23 (CUDA). A backend that runs prefill or decoding only forces its page as well.
    """
    given = config.page_size
    if geometry.kind == "dsv4":
        return DSV4_PAGE, None if given == DSV4_PAGE else "DeepSeek-V4 runs with page size 256 on CUDA"
    if geometry.kind == "dsa":
        return DSA_PAGE, None if given == DSA_PAGE else "DSA models run with page size 64 on CUDA"
    backends = _MLA_PAGES if geometry.kind == "mla" else {**_MHA_PAGES, "trtllm_mha": rules.trtllm_mha_pages}
    for backend in (config.attention_backend, config.decode_attention_backend, config.prefill_attention_backend):
        allowed = backends.get(backend or "")
        if allowed and given not in allowed:
            return allowed[-1], f"attention backend {backend} forces page size {allowed[-1]}"
    return given or 1, None
