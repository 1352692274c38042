"""Trace-driven simulation: all sizes at once (``hit_curve``), both tiers (``surface``), SGLang rules (``replay``)."""

from hicache_lab.cachesim.curve import HitCurve, hit_curve, hits_by_request
from hicache_lab.cachesim.many import curves, replays
from hicache_lab.cachesim.nodes import EvictionPolicy
from hicache_lab.cachesim.replay import ReplayResult, replay
from hicache_lab.cachesim.rules import ReplayRules, rules_for
from hicache_lab.cachesim.sampled import SampledCurve, sampled_curve
from hicache_lab.cachesim.settings import ReplaySettings
from hicache_lab.cachesim.tiers import Surface, TierHits, WritePolicy, replay_blocks, surface
from hicache_lab.cachesim.worth import (
    Growth,
    Rates,
    Worth,
    concurrent_requests,
    fit_tokens_per_s,
    growth,
    worth,
)

__all__ = [
    "EvictionPolicy",
    "Growth",
    "HitCurve",
    "Rates",
    "ReplayResult",
    "ReplayRules",
    "ReplaySettings",
    "SampledCurve",
    "Surface",
    "TierHits",
    "Worth",
    "WritePolicy",
    "concurrent_requests",
    "curves",
    "fit_tokens_per_s",
    "growth",
    "hit_curve",
    "hits_by_request",
    "replay",
    "replay_blocks",
    "replays",
    "rules_for",
    "sampled_curve",
    "surface",
    "worth",
]
