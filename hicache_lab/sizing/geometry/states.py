"""The recurrent state of linear layers from a config; one small builder a kind.

Shapes as in SGLang's ``configs/mamba_utils.py`` (0.5.8 and 0.5.23 read); mamba1 (Jamba) and lightning
(MiniMax-M1) by shape only, no release of SGLang up to 0.5.23 serves those models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hicache_lab.sizing.geometry.config import Facts
from hicache_lab.sizing.geometry.shapes import StateShape

# What SGLang accepts for the state (configs/mamba_utils.py:mamba2_state_dtype).
STATE_DTYPES = ("float32", "bfloat16", "float16")


def _mamba1(facts: Facts) -> StateShape:
    inner = facts.need("mamba_expand") * facts.need("hidden_size")
    return StateShape("mamba1", inner, facts.need("mamba_d_conv") - 1, inner, 1, facts.need("mamba_d_state"))


def _mamba2(facts: Facts) -> StateShape:
    # Nemotron-H and Granite name the same numbers differently
    heads, dim = facts.need("mamba_num_heads", "mamba_n_heads"), facts.need("mamba_head_dim", "mamba_d_head")
    groups, size = facts.need("n_groups", "mamba_n_groups"), facts.need("ssm_state_size", "mamba_d_state")
    rows = facts.need("conv_kernel", "mamba_d_conv") - 1
    return StateShape("mamba2", heads * dim + 2 * groups * size, rows, heads, dim, size, groups, 2 * size)


def _gdn(facts: Facts) -> StateShape:
    keys, key_dim = facts.need("linear_num_key_heads"), facts.need("linear_key_head_dim")
    values, value_dim = facts.need("linear_num_value_heads"), facts.need("linear_value_head_dim")
    channels = values * value_dim + 2 * keys * key_dim
    rows = facts.need("linear_conv_kernel_dim") - 1
    return StateShape("gdn", channels, rows, values, value_dim, key_dim, keys, 2 * key_dim)


def _kda(facts: Facts) -> StateShape:
    config = facts.get("linear_attn_config")
    part = Facts(config if isinstance(config, Mapping) else {}, {}, f"{facts.origin}: linear_attn_config")
    heads, dim = part.need("num_heads"), part.need("head_dim")
    rows = part.need("short_conv_kernel_size") - 1
    for key in part.missing:
        facts.lack(f"linear_attn_config.{key}")
    return StateShape("kda", 3 * heads * dim, rows, heads, dim, dim)


def _lightning(facts: Facts) -> StateShape:
    dim = facts.need("head_dim")
    return StateShape("lightning", 0, 0, facts.need("num_attention_heads"), dim, dim)


STATES: dict[str, Callable[[Facts], StateShape]] = {
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "gdn": _gdn,
    "kda": _kda,
    "lightning": _lightning,
}


def state_shape(facts: Facts, kind: str) -> StateShape | None:
    """The state of the linear layers; what is missing goes on the facts' record."""
    if kind not in STATES:
        facts.lack("state", f"recurrent state of the linear layers: {', '.join(STATES)}")
        return None
    shape = STATES[kind](facts)
    dtype = facts.either("mamba_ssm_dtype")
    if dtype is None:
        return shape
    if not isinstance(dtype, str) or dtype not in STATE_DTYPES:
        raise facts.error("mamba_ssm_dtype", f"expected one of {', '.join(STATE_DTYPES)}, got {str(dtype)[:40]!r}")
    return replace(shape, ssm_dtype=dtype)
