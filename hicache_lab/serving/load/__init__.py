"""Seeded load on an SGLang server, measured at the client.

``plans`` says what to send, ``pace`` how fast and when to stop, ``runner`` sends it, ``watch`` scrapes the
server meanwhile, ``results`` adds it up and writes it.
"""

from __future__ import annotations

from hicache_lab.serving.load.conversation import Target
from hicache_lab.serving.load.pace import Lag, Limits, Pace
from hicache_lab.serving.load.plans import (
    Plan,
    multi_turn,
    plan_of,
    random_prompts,
    rounds,
    shared_prefix,
    trace_replay,
    warmup_plan,
    write_evict_read,
)
from hicache_lab.serving.load.results import Hits, LoadResult, RequestRecord, ServerSample, Spread
from hicache_lab.serving.load.runner import load, run_load

__all__ = [
    "Hits",
    "Lag",
    "Limits",
    "LoadResult",
    "Pace",
    "Plan",
    "RequestRecord",
    "ServerSample",
    "Spread",
    "Target",
    "load",
    "multi_turn",
    "plan_of",
    "random_prompts",
    "rounds",
    "run_load",
    "shared_prefix",
    "trace_replay",
    "warmup_plan",
    "write_evict_read",
]
