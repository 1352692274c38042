"""Verdicts, rules and hosts as rows of a table: column titles carry units, values are plain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hicache_lab.base.units import gb
from hicache_lab.host import HostMemory
from hicache_lab.preflight import Advice, Answer, Question, assess, with_ratio, with_size
from hicache_lab.sglang.launch import LaunchConfig, flag_of
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.releases import CHANGES, ReleaseRules, parse_version
from hicache_lab.sglang.source import Reading
from hicache_lab.sizing.guard import CHECK_RULES

Rows = list[dict[str, Any]]

# rule → (the question it answers, value → plain words); what is not here does not decide memory
_RULES: Mapping[str, tuple[str, Mapping[Any, str]]] = {
    "has_size_flag": ("is there a --hicache-size", {True: "yes: GB (1e9 bytes) for each rank", False: "no"}),
    "default_ratio": ("ratio when no flag is given", {}),
    "auto_size": ("does it size itself when neither flag is given", {True: "yes, from the host's memory", False: "no"}),
    "rounding": (
        "tokens are rounded",
        {"none": "not at all", "down": "down to a whole page", "up_a_page": "down, and one page is added"},
    ),
    **CHECK_RULES,
    "mla_bytes_count_layers": (
        "the check of an MLA pool counts",
        {True: "all layers", False: "one layer; all of them are taken"},
    ),
    "guard_reads_cgroup": ("does it look at the container's limit", {True: "yes", False: "no, at the host only"}),
    "cgroup_credits_page_cache": (
        "page cache inside the container",
        {True: "does not count as used", False: "counts as used"},
    ),
    "not_larger": (
        "host pool not larger than the device pool",
        {
            "assert_ratio": "stops with an AssertionError",
            "assert_tokens": "stops with an AssertionError",
            "warn": "starts with a warning",
        },
    ),
    "indexer": (
        "DSA indexer keys on the host",
        {
            "not_mirrored": "not kept",
            "inside_the_flag": "inside --hicache-size",
            "sidecar": "on top of --hicache-size",
        },
    ),
    "size_split": (
        "several pools in one model",
        {True: "share one --hicache-size", False: "each take the whole --hicache-size"},
    ),
    "draft": (
        "draft layers on the host",
        {"none": "not kept", "sidecar": "a pool on top of --hicache-size", "packed": "inside --hicache-size"},
    ),
    "allocation": (
        "memory is taken as",
        {
            "zero_filled": "zero-filled pages",
            "torch_pinned": "pinned buffers, each rounded up to a power of two",
            "host_register": "plain pages, then registered with the driver",
            "mmap_register": "mapped pages, then registered with the driver",
        },
    ),
    "pp_stages_share_tokens": (
        "pipeline stages and one --hicache-size",
        {True: "the smallest stage's tokens for all", False: "each stage its own tokens"},
    ),
    "default_write_policy": ("write policy when none is given", {None: "no such flag"}),
    "default_layout": ("layout when none is given", {}),
}


def _words(rule: str, value: Any) -> str:
    """The value of a rule in words."""
    return str(_RULES[rule][1].get(value, value))


def rule_rows(rules: ReleaseRules) -> Rows:
    """What one release does, a row a question, and since when it does so."""
    rows, wanted = [], parse_version(rules.version)
    known = [change for change in CHANGES if parse_version(change[0]) <= wanted]
    for rule, (question, _) in _RULES.items():
        value = getattr(rules, rule)
        since = [release for release, changes, _ in known if rule in changes]
        rows.append(
            {"question": question, f"SGLang {rules.version}": _words(rule, value), "since": (since or ["0.4.4"])[-1]}
        )
    return rows


def change_rows() -> Rows:
    """Every change between releases that decides memory, in order, with the source it was read from."""
    rows = []
    for release, changes, source in CHANGES:
        told = [f"{_RULES[rule][0]}: {_words(rule, value)}" for rule, value in changes.items() if rule in _RULES]
        if told:
            rows.append({"from release": release, "what changes": "; ".join(told), "read in": source})
    return rows


def flag_rows(names: Iterable[str] = ()) -> Rows:
    """Since when the HiCache flags (or the named ones) exist."""
    chosen = list(names) or [name for name in known_flags() if "hicache" in name or "hierarchical" in name]
    return [{"flag": name, "releases": known_flags()[name].history} for name in sorted(chosen)]


def setting_rows(answers: Mapping[str, Answer]) -> Rows:
    """Several settings of one launch side by side."""
    rows = []
    for name, answer in answers.items():
        left = answer.over_reserve_bytes if answer.rank and answer.rank.pools else None
        rows.append(
            {
                "setting": name,
                "verdict": answer.verdict,
                "asked a rank (GB)": round(gb(answer.per_rank_bytes), 2),
                "taken on the host (GB)": round(gb(answer.resident_bytes), 1),
                "tokens a rank": answer.rank.tokens if answer.rank else 0,
                "beyond the reserve (GB)": None if left is None else round(gb(left), 1),
            }
        )
    return rows


def edge_answers(question: Question, comfortable: Advice, just: Advice) -> dict[str, Answer]:
    """The largest settings of both kinds, and one step beyond the last: where the verdict turns.

    Args:
        question: the launch.
        comfortable: the largest settings that keep headroom.
        just: the largest that leave only the reserve.
    """
    found = {}
    sizes = [size for size in (comfortable.size_gb, just.size_gb) if size is not None]
    for size in dict.fromkeys([*sizes, *(size + 1 for size in sizes[-1:])]):
        found[f"--hicache-size {size}"] = assess(with_size(question, size))
    ratios = [ratio for ratio in (comfortable.ratio, just.ratio) if ratio is not None]
    for ratio in dict.fromkeys([*ratios, *(round(ratio + 0.1, 1) for ratio in ratios[-1:])]):
        found[f"--hicache-ratio {ratio:g}"] = assess(with_ratio(question, ratio))
    return found


def given_rows(config: LaunchConfig) -> Rows:
    """What a launch line sets, under the server's own flag names."""
    given = [{"flag": flag_of(name), "value": str(value)} for name, value in config.given()]
    return given + [{"flag": name, "value": "" if value is None else str(value)} for name, value in config.other]


def host_rows(host: HostMemory) -> Rows:
    """The memory facts of a host that a launch depends on; what is not known is left out."""
    facts = {
        "RAM": host.total_bytes,
        "available (MemAvailable)": host.available_bytes,
        "huge pages reserved": host.hugepages_reserved_bytes,
        "shared memory in use": host.shmem_bytes,
        "container limit": host.cgroup.limit_bytes if host.cgroup else None,
        "obtainable by this process": host.effective_available_bytes,
    }
    return [{"fact": name, "GB": round(gb(value), 1)} for name, value in facts.items() if value is not None]


def reading_rows(reading: Reading | None) -> Rows:
    """What an SGLang tree's own host-pool code does, one row a fact, differing ones first; () without a tree."""
    if reading is None:
        return []
    differs = {one.fact.name: one.expected for one in reading.differences}
    rows = [
        {
            "fact": name,
            "the tree": fact.value,
            "the rules": differs.get(name, "the same"),
            "where": str(fact.line or ""),
            "its words": fact.says,
        }
        for name, fact in reading.facts.items()
    ]
    return sorted(rows, key=lambda row: row["the rules"] == "the same")
