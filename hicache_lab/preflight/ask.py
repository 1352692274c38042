"""The one way from facts to a Question: a launch, a host and what limits it, none of it lost on the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import UsageError, did_you_mean
from hicache_lab.base.units import GB, MIB, parse_bytes
from hicache_lab.host import CgroupLevel, CgroupMemory, HostMemory
from hicache_lab.preflight.question import Question
from hicache_lab.sglang.launch import LaunchConfig, changed, parse_launch
from hicache_lab.sglang.launch.config import FIELD_TYPES, FLAG_FIELDS, check_type
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import ModelGeometry, load_geometry
from hicache_lab.sizing.rank import DeviceFacts

CONTAINER_FACTS = ("cgroup_limit", "cgroup_usage")
HOST_FACTS = ("host_ram", "available", "hugepages", *CONTAINER_FACTS)
DEVICE_FACTS = ("device_tokens", "device_kv_gb", "swa_device_tokens", "mamba_slots")
_WHOLE_FACTS = ("device_tokens", "swa_device_tokens", "mamba_slots")
OTHER_FACTS = ("overhead", "headroom", "draft_model")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def stated_bytes(facts: Mapping[str, Any], name: str) -> int | None:
    """A stated amount: text with its unit, or whole bytes.

    Raises:
        UsageError: no unit, or a number so small that GB must have been meant.
    """
    value = facts.get(name)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        if 0 < value < MIB:
            raise UsageError(f'{_option(name)}: {value} bytes? write the unit, for example "{value}GB"')
        return value
    return parse_bytes(str(value), what=_option(name))


def host_from_facts(facts: Mapping[str, str | int | None]) -> tuple[HostMemory | None, bool]:
    """Stated memory facts as a host, and whether its RAM is among them.

    Args:
        facts: ``HOST_FACTS``, each a quantity with its unit ("449GB"), whole bytes, None or absent.

    Returns:
        None when nothing was said of the host; with only ``available`` known, RAM is not known.

    Raises:
        UsageError: a quantity without its unit, or facts that need another one or contradict each other.
    """
    known = {name: amount for name in HOST_FACTS if (amount := stated_bytes(facts, name)) is not None}
    if "host_ram" not in known and "available" not in known:
        if known:
            raise UsageError(
                f"{_option(next(iter(known)))} needs --host-ram or --available beside it: "
                "it only lowers what the host has"
            )
        return None, False
    host = HostMemory.stated(
        total_bytes=known.get("host_ram", known.get("available", 0)),
        available_bytes=known.get("available"),
        hugepages_bytes=known.get("hugepages", 0) if "host_ram" in known else 0,
        cgroup_limit_bytes=known.get("cgroup_limit"),
        cgroup_usage_bytes=known.get("cgroup_usage"),
    )
    return host, "host_ram" in known


def _limited(host: HostMemory, name: str, limit_bytes: int, usage_bytes: int) -> HostMemory:
    """The host seen from inside one more container."""
    level = CgroupLevel(name, "limit", limit_bytes, usage_bytes)
    levels = host.cgroup.levels if host.cgroup else ()
    return replace(host, cgroup=CgroupMemory((*levels, level)))


def _host(host: HostMemory | None, config: LaunchConfig, facts: Mapping[str, Any]) -> tuple[HostMemory | None, bool]:
    """The host that the launch meets: measured or stated, inside every container that is known of.

    The limit that the launch line itself gives its container holds beside a stated one: the smaller one kills. Its
    usage is what is stated of the container, otherwise it starts empty.
    """
    stated = {name: facts[name] for name in HOST_FACTS if facts.get(name) is not None}
    # --memory 0 is docker's "no limit"
    carried = (config.container.memory_bytes if config.container else None) or None
    usage = stated_bytes(stated, "cgroup_usage")
    if carried is not None and "cgroup_limit" not in stated:
        stated.pop("cgroup_usage", None)
    if host is None:
        host, ram_is_known = host_from_facts(stated)
    else:
        ram_is_known = True
        measured = next((name for name in stated if name not in CONTAINER_FACTS), None)
        if measured is not None:
            raise UsageError(f"{_option(measured)}: the host's memory is measured or stated, not both")
        limit = stated_bytes(stated, "cgroup_limit")
        if limit is None and "cgroup_usage" in stated:
            raise UsageError("--cgroup-usage says nothing without --cgroup-limit")
        host = host if limit is None else _limited(host, "stated", limit, usage or 0)
    if host is not None and carried is not None:
        host = _limited(host, "the launch line's container", carried, usage or 0)
    return host, ram_is_known


def device_from_facts(facts: Mapping[str, Any]) -> DeviceFacts:
    """Device facts; tokens must be positive whole numbers, ``device_kv_gb`` GB (1e9) of KV on one rank."""
    for name in DEVICE_FACTS:
        value = facts.get(name)
        check_type(name, value, float if name == "device_kv_gb" else int)
        if value is not None and not 0 < value < _MOST_DEVICE:
            raise UsageError(f"{_option(name)}: expected a number above 0 and below 1e15, got {value}")
    kv_gb = facts.get("device_kv_gb")
    return DeviceFacts(
        tokens=facts.get("device_tokens"),
        kv_bytes=None if kv_gb is None else int(kv_gb * GB),
        swa_tokens=facts.get("swa_device_tokens"),
        mamba_slots=facts.get("mamba_slots"),
    )


def release_of(config: LaunchConfig, stated: str | None = None) -> tuple[str, str | None]:
    """The release to judge by, and a note where it was not stated but taken from the container's image tag.

    Raises:
        UsageError: neither says it.
    """
    if stated:
        return stated, None
    tag = (config.container.image_tag if config.container else None) or ""
    match = re.search(r"v?(\d+\.\d+\.\d+(?:\.?(?:post|rc)\d+)?)", tag)
    if match:
        return match[1], f"release {match[1]} taken from the image tag {tag!r}; --sglang-version says otherwise"
    raise UsageError("--sglang-version: give the SGLang release (pip show sglang), e.g. --sglang-version 0.5.8")


def check_names(facts: Iterable[str]) -> None:
    """Check that every name is a flag of SGLang's or a fact that ``ask`` knows; its own parameters are neither.

    Raises:
        UsageError: names the first that is not, and the nearest that is known.
    """
    known = {*FLAG_FIELDS, *HOST_FACTS, *DEVICE_FACTS, *OTHER_FACTS} - {"model", "host"}
    for name in facts:
        if name not in known:
            raise UsageError(f"{name}: not a flag or fact known here{did_you_mean(name, sorted(known))}")


def ask(
    model: str | Path | Mapping[str, Any] | ModelGeometry | None = None,
    sglang_version: str | None = None,
    *,
    config: LaunchConfig | str | Sequence[str] | None = None,
    host: HostMemory | None = None,
    geometry_overrides: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Question:
    """The question that one launch on one host is.

    Args:
        model: a catalogue name, a config.json, an inline geometry, or a loaded geometry; None takes the launch's own.
        sglang_version: the release, e.g. "0.5.8"; None takes the one that the container's image names.
        config: the launch, as text that people paste (a line, docker, a manifest), as words, or parsed. The memory
            limit of its container counts. Without it the launch is made of the flags given here.
        host: a host that was read (``read_host()``), instead of a stated one.
        geometry_overrides: explicit facts for an unknown architecture.
        **facts: SGLang's flags under their own names (``tp_size=8, hicache_size=48, page_size=64 …``; beside a launch
            they replace its own), host facts (``host_ram="449GB", available="445GB", hugepages, cgroup_limit,
            cgroup_usage, overhead, headroom``: text with a unit, or whole bytes) and device facts
            (``device_tokens=116_000, device_kv_gb, swa_device_tokens, mamba_slots, draft_model``). None is "not given".

    Raises:
        UsageError: an unknown name (with a suggestion), a quantity without its unit, no model or release.
        UnknownFact: a model or release that is not known.
    """
    check_names(facts)
    flags = {name: _whole(facts.pop(name), FIELD_TYPES[name]) for name in list(facts) if name in FLAG_FIELDS}
    facts = {name: _whole(value, int if name in _WHOLE_FACTS else None) for name, value in facts.items()}
    if config is not None and not isinstance(config, LaunchConfig):
        config = parse_launch(config, sglang_version=sglang_version)
    model = config.model if model is None and config is not None else model
    if model is None:
        raise UsageError("--model: the launch line names no --model-path; give --model")
    geometry = model if isinstance(model, ModelGeometry) else load_geometry(model, overrides=geometry_overrides)
    if config is None:
        stated = {name: value for name, value in flags.items() if value is not None}
        config = LaunchConfig(model=geometry.name, **({"enable_hierarchical_cache": True} | stated))
    elif flags:
        config = changed(config, flags)
    check_numbers(config)
    host, ram_is_known = _host(host, config, facts)
    return Question(
        config=config,
        geometry=geometry,
        rules=rules_for(release_of(config, sglang_version)[0]),
        host=host,
        device=device_from_facts(facts),
        overhead_bytes=stated_bytes(facts, "overhead") or 0,
        headroom_bytes=stated_bytes(facts, "headroom"),
        draft=_draft(facts.get("draft_model")),
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
    **dict.fromkeys(
        ("tp_size", "pp_size", "dp_size", "nnodes", "dcp_size", "attn_dp_size", "attn_cp_size"), _MOST_RANKS
    ),
    "page_size": 2**20,
    "max_total_tokens": _MOST_DEVICE,
    "max_mamba_cache_size": _MOST_DEVICE,
    "speculative_num_steps": 1024,
}
_BETWEEN: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "swa_full_tokens_ratio": (lambda ratio: 0 < ratio <= 1, "a number above 0 and up to 1"),
    "mamba_full_memory_ratio": (lambda ratio: 0 < ratio < 1e6, "a number above 0"),
    "hicache_ratio": (lambda ratio: 0 < ratio < 1e6, "a number above 0"),
    "hicache_size": (lambda size: 0 <= size < 1e9, "GB (1e9 bytes) per rank, 0 or more"),
}


def _whole(value: Any, kind: type | None) -> Any:
    """A whole number that JSON wrote as 8.0."""
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def check_flag(name: str, value: Any) -> None:
    """Sizes of groups and pages must be at least 1 and can be meant, and a ratio a finite number; None is not given.

    Raises:
        UsageError: names the flag.
    """
    check_type(name, value)
    if value is None:
        return
    if name in _AT_LEAST_ONE and value < 1:
        raise UsageError(f"{_option(name)}: expected at least 1, got {value}")
    if name in _AT_LEAST_ONE and value > _AT_LEAST_ONE[name]:
        raise UsageError(f"{_option(name)}: expected at most {_AT_LEAST_ONE[name]}, got {value}")
    if name in _BETWEEN:
        is_meant, expected = _BETWEEN[name]
        if not is_meant(value):
            raise UsageError(f"{_option(name)}: expected {expected}, got {value}")


def check_numbers(config: LaunchConfig) -> None:
    """Every flag of a launch as ``check_flag`` wants it, and numbers of ranks that agree with each other.

    Raises:
        UsageError: names the flag.
    """
    for name, value in config.given():
        check_flag(name, value)
    if config.processes > _MOST_RANKS:
        raise UsageError(f"--tp-size × --pp-size × --dp-size: expected at most {_MOST_RANKS}, got {config.processes}")
    ranks, nodes = config.ranks_per_engine, config.nnodes or 1
    if ranks % nodes:
        raise UsageError(f"--nnodes {nodes}: {ranks} ranks (tp × pp) do not divide over the nodes")
