"""Trace-driven simulation: every size at once (``hit_curve``), two tiers (``tier_rates``), HiCache (``replay``)."""

from hicache_lab.traffic.cachesim.curve import HitCurve, hit_curve, hits_by_request
from hicache_lab.traffic.cachesim.nodes import EvictionPolicy
from hicache_lab.traffic.cachesim.replay import ReplayResult, replay
from hicache_lab.traffic.cachesim.rules import ReplayRules, cache_rules_for
from hicache_lab.traffic.cachesim.sampled import SampledCurve, sampled_curve
from hicache_lab.traffic.cachesim.savings import Rates, Savings, concurrent_requests, knee_of, savings
from hicache_lab.traffic.cachesim.settings import ReplaySettings
from hicache_lab.traffic.cachesim.tiers import TierHits, WritePolicy, replay_blocks, tier_rates

__all__ = [
    "EvictionPolicy",
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
    "hit_curve",
    "hits_by_request",
    "knee_of",
    "replay",
    "replay_blocks",
    "sampled_curve",
    "savings",
    "tier_rates",
]
