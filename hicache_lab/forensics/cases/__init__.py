"""A recorded incident: its facts with their origins, and its claims recomputed one by one."""

from hicache_lab.forensics.cases.alternatives import Alternative, alternatives
from hicache_lab.forensics.cases.case import Case, Fact, Moment, load_case
from hicache_lab.forensics.cases.claims import CHECKS, ClaimResult, audit
from hicache_lab.forensics.cases.counterfactuals import bound, case_conclusion, counterfactuals, recommended
from hicache_lab.forensics.cases.recordings import peak_used_bytes, recordings

__all__ = [
    "CHECKS",
    "Alternative",
    "Case",
    "ClaimResult",
    "Fact",
    "Moment",
    "alternatives",
    "audit",
    "bound",
    "case_conclusion",
    "counterfactuals",
    "load_case",
    "peak_used_bytes",
    "recommended",
    "recordings",
]
