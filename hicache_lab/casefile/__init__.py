"""A recorded incident: its facts with their origins, and its claims recomputed one by one."""

from hicache_lab.casefile.case import Case, Fact, Moment, load_case
from hicache_lab.casefile.claims import CHECKS, ClaimResult, audit
from hicache_lab.casefile.levers import Lever, levers

__all__ = ["CHECKS", "Case", "ClaimResult", "Fact", "Lever", "Moment", "audit", "levers", "load_case"]
