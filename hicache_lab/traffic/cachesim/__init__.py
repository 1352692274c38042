"""Trace-driven simulation: all sizes at once (``hit_curve``), both tiers (``surface``), SGLang rules (``replay``)."""

from hicache_lab.traffic.cachesim.curve import HitCurve, hit_curve, hits_by_request
from hicache_lab.traffic.cachesim.many import curves, replays
from hicache_lab.traffic.cachesim.nodes import EvictionPolicy
from hicache_lab.traffic.cachesim.replay import ReplayResult, replay
from hicache_lab.traffic.cachesim.rules import ReplayRules, rules_for
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
from hicache_lab.traffic.cachesim.tiers import Surface, TierHits, WritePolicy, replay_blocks, surface

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
    "Surface",
    "TierHits",
    "WritePolicy",
    "concurrent_requests",
    "curves",
    "growth",
    "hit_curve",
    "hits_by_request",
    "replay",
    "replay_blocks",
    "replays",
    "rules_for",
    "sampled_curve",
    "savings",
    "surface",
]
