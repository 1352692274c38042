"""The inverse of a verdict: the largest size and the largest ratio that still fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hicache_lab.preflight.verdict import Answer, Question, assess
from hicache_lab.releases import rules_for
from hicache_lab.units import GB

_RATIO_STEP = 10  # ratios are offered in tenths
_MOST_RATIO = 1000


@dataclass(frozen=True)
class Advice:
    """The largest settings with a verdict no worse than asked for; None where none is.

    ``size_gb`` is GB (1e9) per rank and a whole number, as the flag wants it; ``*_bytes`` are the host's total.
    """

    size_gb: int | None
    size_bytes: int | None
    ratio: float | None
    ratio_bytes: int | None
    size_answer: Answer | None = None
    ratio_answer: Answer | None = None


def with_size(question: Question, size_gb: int) -> Question:
    """The same launch with --hicache-size and without --hicache-ratio."""
    return replace(question, config=replace(question.config, hicache_size=size_gb, hicache_ratio=None))


def with_ratio(question: Question, ratio: float) -> Question:
    """The same launch with --hicache-ratio and without --hicache-size."""
    return replace(question, config=replace(question.config, hicache_size=None, hicache_ratio=ratio))


def with_release(question: Question, version: str) -> Question:
    """The same launch on another SGLang release."""
    return replace(question, rules=rules_for(version), config=replace(question.config, sglang_version=version))


def _largest(fits: Callable[[int], Answer], accepted: tuple[str, ...], most: int) -> Answer | None:
    """The answer for the largest number that is accepted, by bisection.

    A host pool that is too small for its device pool is refused too, so the search runs down from the top: what is
    too large stays too large.
    """
    low, high, best = 0, most + 1, None
    while high - low > 1:
        middle = (low + high) // 2
        answer = fits(middle)
        too_small = answer.verdict == "ASSERT"
        if answer.verdict in accepted:
            low, best = middle, answer
        elif too_small:
            low = middle
        else:
            high = middle
    return best


def advise(question: Question, *, accepted: tuple[str, ...] = ("FITS",)) -> Advice:
    """What to set instead.

    Args:
        question: the launch; its own size and ratio are ignored.
        accepted: verdicts that count; ("FITS", "TIGHT") gives what just leaves the reserve.

    Returns:
        The largest whole --hicache-size and the largest --hicache-ratio in tenths. The two are different settings:
        a ratio follows the device pool, a size does not.
    """
    limit = question.limit_bytes
    if limit is None:
        return Advice(None, None, None, None)
    sizes = ratios = None
    if question.rules.has_size_flag and question.geometry.kind != "dsv4":
        sizes = _largest(lambda n: assess(with_size(question, n)), accepted, max(1, limit // GB + 1))
    if question.rules.has_ratio_flag and (question.device.tokens or question.device.kv_bytes):
        ratios = _largest(
            lambda n: assess(with_ratio(question, n / _RATIO_STEP)), accepted, _MOST_RATIO * _RATIO_STEP
        )
    return Advice(
        size_gb=int(sizes.size_gb) if sizes else None,
        size_bytes=sizes.host_bytes if sizes else None,
        ratio=ratios.ratio if ratios else None,
        ratio_bytes=ratios.host_bytes if ratios else None,
        size_answer=sizes,
        ratio_answer=ratios,
    )
