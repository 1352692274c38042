"""Host-tier sizes in every unit at once: the flag, tokens, bytes of a rank, bytes of the host, and the verdict.

The bridge between ``preflight`` (what a flag takes and whether it fits) and ``cachesim`` (what tokens buy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_lab.base.errors import UsageError
from hicache_lab.preflight import Question, advise, assess
from hicache_lab.preflight.answer import Answer
from hicache_lab.preflight.inverse import with_ratio, with_size


@dataclass(frozen=True)
class HostTier:
    """One setting of the host tier.

    Attributes:
        label: the flag, as it would be written.
        ratio: host tokens over device tokens (computed where a size was given).
        size_gb: GB (1e9) per rank where a size was given, else None.
        tokens: tokens one rank's pool holds. The ranks of a tensor-parallel group hold the same tokens (an MLA rank
            the whole token, another its heads' share), so this is what the engine can keep, not a share of it.
        per_rank_bytes: what one rank asks for, all its pools.
        host_bytes: what all ranks of the host ask for.
        allocated_host_bytes: what they really take of it (0.4.5 … 0.5.4 round each pool up).
        ranks_on_host: how many that are.
        verdict: preflight's word for it ("UNKNOWN" where no host was stated).
    """

    label: str
    ratio: float
    size_gb: int | None
    tokens: int
    per_rank_bytes: int
    host_bytes: int
    allocated_host_bytes: int
    ranks_on_host: int
    verdict: str


def host_tier(question: Question, *, ratio: float | None = None, size_gb: int | None = None) -> HostTier:
    """Size one setting.

    Args:
        question: the launch (its own ratio and size are ignored) with ``device_tokens``.
        ratio: ``--hicache-ratio``, or
        size_gb: ``--hicache-size``, GB per rank.

    Raises:
        UsageError: both or none given, or the launch cannot be sized; the message is the refusal's.
    """
    if (ratio is None) == (size_gb is None):
        raise UsageError("a host tier: expected a ratio or a size, one of both")
    if ratio is not None and not 0 < ratio < math.inf:
        raise UsageError(f"--hicache-ratio: expected a number above 0, got {ratio:g}")
    if size_gb is not None and size_gb < 1:
        raise UsageError(f"--hicache-size: expected whole GB (1e9 bytes) per rank, at least 1, got {size_gb}")
    asked = with_ratio(question, ratio) if ratio is not None else with_size(question, size_gb or 0)
    return _tier(assess(asked), f"--hicache-ratio {ratio:g}" if ratio is not None else f"--hicache-size {size_gb}")


def host_tiers(
    question: Question, *, ratios: Sequence[float] = (), sizes_gb: Sequence[int] = ()
) -> tuple[HostTier, ...]:
    """Size many settings, ascending by tokens; settings of equal tokens are kept once."""
    found = [host_tier(question, ratio=ratio) for ratio in ratios]
    found += [host_tier(question, size_gb=size) for size in sizes_gb]
    by_tokens = {tier.tokens: tier for tier in reversed(found)}
    return tuple(by_tokens[tokens] for tokens in sorted(by_tokens))


def largest_safe(question: Question, *, accepted: tuple[str, ...] = ("FITS",)) -> HostTier | None:
    """The largest tier that preflight accepts, by size or by ratio, whichever holds more; None: none, or no host."""
    advice = advise(question, accepted=accepted)
    answers = [answer for answer in (advice.size_answer, advice.ratio_answer) if answer and answer.rank]
    if not answers:
        return None
    best = max(answers, key=lambda answer: answer.rank.tokens if answer.rank else 0)
    label = f"--hicache-size {best.size_gb:g}" if best.size_gb else f"--hicache-ratio {best.ratio:g}"
    return _tier(best, label)


def _tier(answer: Answer, label: str) -> HostTier:
    rank = answer.rank
    if rank is None or not rank.pools:
        reason = answer.refusal.message if answer.refusal else f"missing: {', '.join(answer.missing) or 'facts'}"
        raise UsageError(f"{label}: cannot be sized; {reason}")
    device = rank.device_tokens or answer.question.device.tokens
    if not device:
        raise UsageError("--device-tokens: give max_total_num_tokens as the server logs it")
    return HostTier(
        label=label,
        ratio=rank.tokens / device,
        size_gb=int(answer.size_gb) if answer.size_gb else None,
        tokens=rank.tokens,
        per_rank_bytes=answer.per_rank_bytes,
        host_bytes=answer.host_bytes,
        allocated_host_bytes=answer.resident_bytes,
        ranks_on_host=answer.ranks_on_host,
        verdict=answer.verdict,
    )
