"""Trace-driven simulation: every size at once (``hit_curve``), two tiers (``tier_rates``), HiCache (``replay``)."""

from hicache_lab.traffic.cachesim.curve import HitCurve, hit_curve, hits_by_request
from hicache_lab.traffic.cachesim.many import curves, replays
from hicache_lab.traffic.cachesim.nodes import EvictionPolicy
from hicache_lab.traffic.cachesim.replay import ReplayResult, replay
from hicache_lab.traffic.cachesim.rules import ReplayRules, cache_rules_for
from hicache_lab.traffic.cachesim.sampled import SampledCurve, sampled_curve
from hicache_lab.traffic.cachesim.savings import (
    Growth,
    Rates,
    Savings,
    concurrent_requests,
    growth,
    savings,
)
from hicache_lab.traffic.cachesim.settings import ReplaySettings
from hicache_lab.traffic.cachesim.tiers import TierHits, WritePolicy, replay_blocks, tier_rates

__all__ = [
    "EvictionPolicy",
    "Growth",
    "HitCurve",
    "Rates",
    "ReplayResult",
    "ReplayRules",
    "ReplaySettings",
    "SampledCurve",
    "Savings",
    "TierHits",
    "WritePolicy",
    "cache_rules_for",
    "concurrent_requests",
    "curves",
    "growth",
    "hit_curve",
    "hits_by_request",
    "replay",
    "replay_blocks",
    "replays",
    "sampled_curve",
    "savings",
    "tier_rates",
]
