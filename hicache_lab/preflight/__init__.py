"""Will it start, how much will it really take, and what to set instead."""

from hicache_lab.preflight.inverse import Advice, advise, with_ratio, with_release, with_size
from hicache_lab.preflight.verdict import Answer, Order, Question, Refusal, Verdict, assess
from hicache_lab.preflight.words import explain, headline

__all__ = [
    "Advice",
    "Answer",
    "Order",
    "Question",
    "Refusal",
    "Verdict",
    "advise",
    "assess",
    "explain",
    "headline",
    "with_ratio",
    "with_release",
    "with_size",
]
