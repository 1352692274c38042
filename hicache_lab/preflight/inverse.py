"""The inverse of a verdict: the largest size and the largest ratio that still fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import get_args

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import GB
from hicache_lab.preflight.answer import Advice, Answer, Verdict
from hicache_lab.preflight.decode import builds_host_pools
from hicache_lab.preflight.question import Question
from hicache_lab.preflight.verdict import assess, stopping_rejections
from hicache_lab.sglang.launch import LaunchConfig, render_launch
from hicache_lab.sglang.releases import VERIFIED, rules_for
from hicache_lab.sizing.guard import beyond_reserve_bytes

_RATIO_STEP = 10  # ratios are offered in tenths
_MOST_RATIO = 1000
_TIER_FLAGS = frozenset({"--hicache-size", "--hicache-ratio"})


def with_size(question: Question, size_gb: int) -> Question:
    """The same launch with --hicache-size and without --hicache-ratio."""
    return replace(
        question, config=replace(question.config.without_spelling(), hicache_size=size_gb, hicache_ratio=None)
    )


def with_ratio(question: Question, ratio: float) -> Question:
    """The same launch with --hicache-ratio and without --hicache-size."""
    config = replace(question.config.without_spelling(), hicache_size=None, hicache_ratio=ratio)
    return replace(question, config=config)


def with_release(question: Question, version: str) -> Question:
    """The same launch on another SGLang release."""
    return replace(question, rules=rules_for(version), config=replace(question.config, sglang_version=version))


def across_releases(question: Question) -> dict[str, Answer]:
    """The same launch under every examined release that has the flags for it (0.4.5.post3 on: --hicache-size)."""
    known = [release for release in VERIFIED if rules_for(release).has_size_flag]
    return {release: assess(with_release(question, release)) for release in known}


def _largest(fits: Callable[[int], Answer], accepted: tuple[str, ...], most: int, start: int) -> Answer | None:
    """The answer for the largest number that is accepted, by bisection.

    A host pool that is too small for its device pool is refused too, so the search runs down from the top: what is
    too large stays too large. Bytes grow almost linearly, so the first answer says where the end should be; that
    place and its neighbour are tried before the interval is halved.
    """
    low, high, best = 0, most + 1, None
    start = min(max(start, 1), most)
    probes = [start]
    while high - low > 1:
        number = probes.pop(0) if probes else (low + high) // 2
        if not low < number < high:
            continue
        answer = fits(number)
        if answer.verdict in accepted:
            low, best = number, answer
        elif answer.verdict == "ASSERT":
            low = number
        else:
            high = number
        if number == start and answer.resident_bytes > 0:
            end = int(number * _share_of_room(answer, accepted))
            probes = [end, end + 1, end - 1]
    return best


def _share_of_room(answer: Answer, accepted: tuple[str, ...]) -> float:
    """How many times this answer's pools there is room for: on the host, and for a start in whatever order."""
    question = answer.question
    room = beyond_reserve_bytes(question.limit_bytes or 0)
    kept = 0 if "TIGHT" in accepted else question.comfortable_bytes
    on_host = max(0, room - kept) / answer.resident_bytes
    if "RACE" in accepted or answer.per_rank_bytes == 0:
        return on_host
    return min(on_host, (answer.guaranteed_start_bytes or 0) / answer.per_rank_bytes)


def advise(question: Question, *, accepted: tuple[str, ...] = ("FITS",)) -> Advice:
    """What to set instead.

    Args:
        question: the launch; its own size and ratio are ignored.
        accepted: verdicts that count; ("FITS", "TIGHT") gives what just leaves the reserve.

    Returns:
        The largest whole --hicache-size and the largest --hicache-ratio in tenths. The two are different settings:
        a ratio follows the device pool, a size does not.
    """
    unknown = set(accepted) - set(get_args(Verdict))
    if isinstance(accepted, str) or unknown:
        raise UsageError(f"accepted: expected a tuple of {', '.join(get_args(Verdict))}, got {accepted!r}")
    limit = question.limit_bytes
    # a line that the server's parser refuses for another flag starts with no size at all
    others = (one for one in stopping_rejections(question) if one.flag not in _TIER_FLAGS)
    if limit is None or any(others) or not builds_host_pools(question):
        return Advice(None, None, None, None)
    sizes = ratios = None
    if question.takes_size:
        most = max(1, limit // GB + 1)
        start = most // question.config.ranks_per_host + 1
        sizes = _largest(lambda n: assess(with_size(question, n)), accepted, most, start)
    known = question.device.tokens or question.device.kv_bytes or question.config.max_total_tokens
    if question.rules.has_ratio_flag and known:
        most = _MOST_RATIO * _RATIO_STEP
        ratios = _largest(lambda n: assess(with_ratio(question, n / _RATIO_STEP)), accepted, most, 2 * _RATIO_STEP)
    return Advice(
        size_gb=int(sizes.size_gb) if sizes and sizes.size_gb else None,
        size_bytes=sizes.resident_bytes if sizes else None,
        ratio=ratios.ratio if ratios else None,
        ratio_bytes=ratios.resident_bytes if ratios else None,
        size_answer=sizes,
        ratio_answer=ratios,
    )


def corrected_line(answer: Answer, advice: Advice, config: LaunchConfig) -> str | None:
    """The launch line with the largest safe size (or ratio) in it; None where nothing is to be corrected or fits.

    Args:
        answer: the verdict on the line.
        advice: the largest settings for the same launch.
        config: the line as it was parsed.
    """
    if answer.verdict == "FITS":
        return None
    by_size = advice.size_gb is not None and answer.size_gb is not None
    if not by_size and advice.ratio is None:
        return None
    changes = {"hicache_size": advice.size_gb if by_size else None, "hicache_ratio": None if by_size else advice.ratio}
    return render_launch(config, changes=changes)
