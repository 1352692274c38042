"""A recorded incident: its facts with their origins, and its claims recomputed one by one."""

from hicache_lab.casefile.case import Case, Fact, Moment, load_case
from hicache_lab.casefile.claims import CHECKS, ClaimResult, audit
from hicache_lab.casefile.counterfactuals import advice, conclusion, counterfactuals
from hicache_lab.casefile.levers import Lever, levers
from hicache_lab.casefile.recordings import peak_used_bytes, recordings

__all__ = [
    "CHECKS",
    "Case",
    "ClaimResult",
    "Fact",
    "Lever",
    "Moment",
    "advice",
    "audit",
    "conclusion",
    "counterfactuals",
    "levers",
    "load_case",
    "peak_used_bytes",
    "recordings",
]
