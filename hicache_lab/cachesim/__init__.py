"""Trace-driven cache simulation: every size at once (``hit_curve``), both tiers (``surface``), HiCache's rules (``replay``)."""

from hicache_lab.cachesim.curve import HitCurve, hit_curve, hits_by_request
from hicache_lab.cachesim.replay import ReplayResult, ReplaySettings, replay
from hicache_lab.cachesim.rules import ReplayRules, rules_for
from hicache_lab.cachesim.tiers import Surface, TierHits, WritePolicy, replay_blocks, surface
from hicache_lab.cachesim.tree import EvictionPolicy

__all__ = [
    "EvictionPolicy",
    "HitCurve",
    "ReplayResult",
    "ReplayRules",
    "ReplaySettings",
    "Surface",
    "TierHits",
    "WritePolicy",
    "hit_curve",
    "hits_by_request",
    "replay",
    "replay_blocks",
    "rules_for",
    "surface",
]
