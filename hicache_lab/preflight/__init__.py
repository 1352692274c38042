"""Will it start, how much will it really take, and what to set instead."""

from hicache_lab.preflight.answer import Advice, Answer, Verdict
from hicache_lab.preflight.ask import ask, host_from_facts
from hicache_lab.preflight.contradictions import Refusal
from hicache_lab.preflight.inverse import across_releases, advise, corrected_line, with_ratio, with_release, with_size
from hicache_lab.preflight.orders import Order
from hicache_lab.preflight.question import Question
from hicache_lab.preflight.text import explain, format_advice, headline
from hicache_lab.preflight.verdict import assess

__all__ = [
    "Advice",
    "Answer",
    "Order",
    "Question",
    "Refusal",
    "Verdict",
    "across_releases",
    "advise",
    "ask",
    "assess",
    "corrected_line",
    "explain",
    "format_advice",
    "headline",
    "host_from_facts",
    "with_ratio",
    "with_release",
    "with_size",
]
