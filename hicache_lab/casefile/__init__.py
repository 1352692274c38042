"""A recorded incident: its facts with their origins, and its claims recomputed one by one."""

from hicache_lab.casefile.case import Case, Fact, Moment, load_case
from hicache_lab.casefile.claims import CHECKS, ClaimResult, audit
from hicache_lab.casefile.counterfactuals import advice, conclusion, counterfactuals
from hicache_lab.casefile.levers import Lever, levers
from hicache_lab.casefile.recordings import MemoryRecording, marks, read_memory

__all__ = [
    "CHECKS",
    "Case",
    "ClaimResult",
    "Fact",
    "Lever",
    "MemoryRecording",
    "Moment",
    "advice",
    "audit",
    "conclusion",
    "counterfactuals",
    "levers",
    "load_case",
    "marks",
    "read_memory",
]
