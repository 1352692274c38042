"""One door for a question in plain words: the flags of ``hicache-lab plan`` as keyword arguments."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB, parse_bytes
from hicache_lab.host import HostMemory
from hicache_lab.preflight.verdict import Question
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS, check_type
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import ModelGeometry, load_geometry
from hicache_lab.sizing.rank import DeviceFacts

HOST_FACTS = ("host_ram", "available", "hugepages", "cgroup_limit", "cgroup_usage")
DEVICE_FACTS = ("device_tokens", "device_kv_gb", "swa_device_tokens", "mamba_slots")
_WHOLE_FACTS = ("device_tokens", "swa_device_tokens", "mamba_slots")
OTHER_FACTS = ("overhead", "headroom", "draft_model")


def host_from_facts(facts: Mapping[str, str | None]) -> tuple[HostMemory | None, bool]:
    """Stated memory facts as a host, and whether its RAM is among them.

    Args:
        facts: ``HOST_FACTS``, each a quantity with its unit ("449GB"), None or absent.

    Returns:
        None when nothing was said of the host; with only ``available`` known, RAM is not known.
    """
    known = {
        name: parse_bytes(str(text), what="--" + name.replace("_", "-"))
        for name, text in facts.items()
        if name in HOST_FACTS and text is not None
    }
    if "host_ram" not in known and "available" not in known:
        if known:
            raise UsageError(
                f"--{next(iter(known)).replace('_', '-')} needs --host-ram or --available beside it: "
                "it only lowers what the host has"
            )
        return None, False
    total = known.get("host_ram", known.get("available", 0))
    host = HostMemory.stated(
        total_bytes=total,
        available_bytes=known.get("available"),
        hugepages_bytes=known.get("hugepages", 0) if "host_ram" in known else 0,
        cgroup_limit_bytes=known.get("cgroup_limit"),
        cgroup_usage_bytes=known.get("cgroup_usage"),
    )
    return host, "host_ram" in known


def device_from_facts(facts: Mapping[str, Any]) -> DeviceFacts:
    """Device facts; tokens must be positive whole numbers, ``device_kv_gb`` GB (1e9) of KV on one rank."""
    for name in DEVICE_FACTS:
        value = facts.get(name)
        check_type(name, value, float if name == "device_kv_gb" else int)
        if value is not None and not 0 < value < _MOST_DEVICE:
            raise UsageError(f"--{name.replace('_', '-')}: expected a number above 0 and below 1e15, got {value}")
    kv_gb = facts.get("device_kv_gb")
    return DeviceFacts(
        tokens=facts.get("device_tokens"),
        kv_bytes=None if kv_gb is None else int(kv_gb * GB),
        swa_tokens=facts.get("swa_device_tokens"),
        mamba_slots=facts.get("mamba_slots"),
    )


def ask(
    model: str | Path | Mapping[str, Any] | ModelGeometry,
    sglang_version: str,
    *,
    host: HostMemory | None = None,
    config: LaunchConfig | None = None,
    geometry_overrides: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Question:
    """A question about one launch.

    Args:
        model: a catalogue name, a config.json, an inline geometry, or a loaded geometry.
        sglang_version: the release, e.g. "0.5.8".
        host: a host that was read (``read_host()``), instead of stated facts.
        config: parsed launch flags, instead of flags given here.
        geometry_overrides: explicit facts for an unknown architecture.
        **facts: SGLang's flags under their own names (``tp_size=8, hicache_size=48, page_size=64 …``), host facts
            (``host_ram="449GB", available="445GB", hugepages, cgroup_limit, cgroup_usage, overhead, headroom``) and
            device facts (``device_tokens=116_000, device_kv_gb, swa_device_tokens, mamba_slots``).

    Raises:
        UsageError: an unknown name (with a suggestion) or a quantity without its unit.
        UnknownFact: a model or release that is not known.
    """
    flags = {name: _whole(facts.pop(name), FIELD_TYPES[name]) for name in list(facts) if name in FLAG_FIELDS}
    facts = {name: _whole(value, int if name in _WHOLE_FACTS else None) for name, value in facts.items()}
    known = (*HOST_FACTS, *DEVICE_FACTS, *OTHER_FACTS)
    for name in facts:
        if name not in known:
            close = get_close_matches(name, [*known, *FLAG_FIELDS], n=1)
            raise UsageError(f"{name}: not a flag or fact known here{f'; did you mean {close[0]}?' if close else ''}")
    geometry = model if isinstance(model, ModelGeometry) else load_geometry(model, overrides=geometry_overrides)
    if config is None:
        config = LaunchConfig(model=geometry.name, enable_hierarchical_cache=True, **flags)
    check_numbers(config)
    ram_is_known = True
    if host is None:
        host, ram_is_known = host_from_facts(facts)
    overhead, headroom = facts.get("overhead"), facts.get("headroom")
    draft = _draft(facts.get("draft_model"))
    return Question(
        config=config,
        geometry=geometry,
        rules=rules_for(sglang_version),
        host=host,
        device=device_from_facts(facts),
        overhead_bytes=parse_bytes(str(overhead), what="--overhead") if overhead is not None else 0,
        headroom_bytes=parse_bytes(str(headroom), what="--headroom") if headroom is not None else None,
        draft=draft,
        ram_is_known=ram_is_known,
    )


def _draft(model: Any) -> ModelGeometry | None:
    """The separate draft model; its layers must keep keys and values of every token."""
    if model is None:
        return None
    draft = load_geometry(model)
    if draft.full is None and draft.latent is None and draft.kv_row_bytes is None:
        raise UsageError(f"--draft-model {draft.name}: a draft has attention layers; this model's are {draft.kind}")
    return draft


_MOST_RANKS = 65_536
_MOST_DEVICE = 10**15
# flag: the most that is taken for meant
_AT_LEAST_ONE = {
    "tp_size": _MOST_RANKS,
    "pp_size": _MOST_RANKS,
    "dp_size": _MOST_RANKS,
    "nnodes": _MOST_RANKS,
    "dcp_size": _MOST_RANKS,
    "attn_dp_size": _MOST_RANKS,
    "attn_cp_size": _MOST_RANKS,
    "page_size": 2**20,
    "max_total_tokens": _MOST_DEVICE,
    "max_mamba_cache_size": _MOST_DEVICE,
    "speculative_num_steps": 1024,
}


def _whole(value: Any, kind: type | None) -> Any:
    """A whole number that JSON wrote as 8.0."""
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def check_numbers(config: LaunchConfig) -> None:
    """Sizes of groups and pages must be at least 1 and can be meant, and a ratio a finite number.

    Raises:
        UsageError: names the flag.
    """
    for name, value in config.given():
        check_type(name, value)
    for name, most in _AT_LEAST_ONE.items():
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
        if value is not None and value > most:
            raise UsageError(f"--{name.replace('_', '-')}: expected at most {most}, got {value}")
    swa, mamba = config.swa_full_tokens_ratio, config.mamba_full_memory_ratio
    if swa is not None and not 0 < swa <= 1:
        raise UsageError(f"--swa-full-tokens-ratio: expected a number above 0 and up to 1, got {swa}")
    if mamba is not None and not 0 < mamba < 1e6:
        raise UsageError(f"--mamba-full-memory-ratio: expected a number above 0, got {mamba}")
    ratio = config.hicache_ratio
    if ratio is not None and not 0 < ratio < 1e6:
        raise UsageError(f"--hicache-ratio: expected a number above 0, got {ratio}")
    size = config.hicache_size
    if size is not None and not 0 <= size < 1e9:
        raise UsageError(f"--hicache-size: expected GB (1e9 bytes) per rank, 0 or more, got {size}")
    if config.processes > _MOST_RANKS:
        raise UsageError(f"--tp-size × --pp-size × --dp-size: expected at most {_MOST_RANKS}, got {config.processes}")
    ranks, nodes = config.ranks_per_engine, config.nnodes or 1
    if ranks % nodes:
        raise UsageError(f"--nnodes {nodes}: {ranks} ranks (tp × pp) do not divide over the nodes")
