"""How each release's HiCache inserts, copies and evicts: one row an era, read from the release's own source.

Rows were read in the wheels of 0.5.3, 0.5.6, 0.5.8 and every release from 0.5.10 to 0.5.23; nothing is known about
older ones, and a release becomes ``releases.NEWEST`` only once its cache rules have been read. The rules are in
``mem_cache/hiradix_cache.py`` up to 0.5.18, from 0.5.19 in ``mem_cache/unified_radix_cache.py`` and
``mem_cache/unified_cache/unified_tree_core.py`` (the tree of a plain model: one full-attention pool).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hicache_lab.base.errors import UnknownFact
from hicache_lab.sglang.releases import NEWEST, parse_version

# choices of --radix-eviction-policy by release; before 0.5.3 the flag does not exist and the policy is lru
_POLICIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("0.5.3", ("lru", "lfu")),
    ("0.5.10", ("lru", "lfu", "slru")),
    ("0.5.11", ("lru", "lfu", "slru", "priority")),
    ("0.5.21", ("lru", "lfu", "slru", "priority", "tlru")),
)


@dataclass(frozen=True)
class ReplayRules:
    """The rules of one era.

    Attributes:
        since: first release of the era.
        alloc_evicts_need: an allocation that does not fit evicts its whole length, not what is short of it
            (``mem_cache/common.py:evict_from_tree_cache``).
        load_back_evicts_need: the same for a load back (``load_back``).
        backup_evicts_need: the same for host space (``write_backup``); otherwise a backup whose shortfall cannot be
            evicted is given up (``_execute_kv_backup``).
        gaps_allowed: a node is copied although its parent has no host copy (``write_backup``).
        backs_up_ancestors: a node's backup brings its ancestors' along (``_build_backup_kv_action``).
        failed_write_back_asserts: a write-back eviction that finds no host space ends in ``assert node.backuped``,
            which kills the scheduler; later releases drop the node and what hangs below it.
        reclaims_duplicates: under write_back, host copies of what the device holds are given up first
            (``_reclaim_full_host_duplicates``).
        splits_at_prompt_end: a finished request's prompt and output become two nodes.
        counts_once: a request counts each node once, chunks included (``InsertParams.inserted_len``); before, every
            insert but a chunk's counts.
        counts_restored: an evicted node that a new prefill restores counts a hit.
        load_back_threshold: tokens below which a host hit is computed again instead of loaded.
        policies: choices of ``--radix-eviction-policy``.
    """

    since: str
    alloc_evicts_need: bool
    load_back_evicts_need: bool
    backup_evicts_need: bool
    gaps_allowed: bool
    backs_up_ancestors: bool
    failed_write_back_asserts: bool
    reclaims_duplicates: bool
    splits_at_prompt_end: bool
    counts_once: bool
    counts_restored: bool
    load_back_threshold: int = 10
    policies: tuple[str, ...] = ()


_OLDEST_READ = ReplayRules(
    since="0.5.3",
    alloc_evicts_need=True,
    load_back_evicts_need=True,
    backup_evicts_need=True,
    gaps_allowed=True,
    backs_up_ancestors=False,
    failed_write_back_asserts=True,
    reclaims_duplicates=False,
    splits_at_prompt_end=False,
    counts_once=False,
    counts_restored=False,
)
_CONTIGUOUS = replace(_OLDEST_READ, since="0.5.11", gaps_allowed=False)
_DROPS = replace(_CONTIGUOUS, since="0.5.15", failed_write_back_asserts=False)
_SHORTFALL = replace(_DROPS, since="0.5.17", alloc_evicts_need=False)
_UNIFIED = replace(
    _SHORTFALL,
    since="0.5.19",
    load_back_evicts_need=False,
    backup_evicts_need=False,
    backs_up_ancestors=True,
    counts_restored=True,
)
_SPLIT = replace(_UNIFIED, since="0.5.20", splits_at_prompt_end=True)
_RECLAIM = replace(_SPLIT, since="0.5.21", reclaims_duplicates=True)
_ONCE = replace(_RECLAIM, since="0.5.22", counts_once=True)
ERAS: tuple[ReplayRules, ...] = (
    _OLDEST_READ, _CONTIGUOUS, _DROPS, _SHORTFALL, _UNIFIED, _SPLIT, _RECLAIM, _ONCE,
)  # fmt: skip


def cache_rules_for(release: str) -> tuple[ReplayRules, str | None]:
    """The rules of a release, and a warning when they are another release's.

    Raises:
        UnknownFact: a release older than the oldest one read.
        UsageError: not a release number.
    """
    version = parse_version(release)
    if version < parse_version(_OLDEST_READ.since):
        raise UnknownFact(
            f"sglang {release}: the cache rules of releases before {_OLDEST_READ.since} have not been read; "
            f"replay with --sglang-version {_OLDEST_READ.since} or later, or use the block model (--rules blocks)"
        )
    era = [row for row in ERAS if parse_version(row.since) <= version][-1]
    choices = [names for since, names in _POLICIES if parse_version(since) <= version][-1]
    warning = None
    if version > parse_version(NEWEST):
        warning = f"sglang {release} is newer than the newest release read ({NEWEST}); its rules are assumed"
    return replace(era, policies=choices), warning
