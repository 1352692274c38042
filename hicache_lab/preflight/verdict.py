"""Will it start, and what will the host see: what each rank believes against what all of them take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hicache_lab.preflight.answer import Answer, Verdict
from hicache_lab.preflight.contradictions import Refusal, find_contradiction
from hicache_lab.preflight.decode import SWITCHED_OFF, builds_host_pools, unset_ratio
from hicache_lab.preflight.orders import one_after_another, together
from hicache_lab.preflight.question import Question
from hicache_lab.sglang.arguments import HicacheArguments, Resolution, resolve_arguments
from hicache_lab.sglang.launch import Rejection, refusals
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sizing.guard import AutoSize, LaunchFailure, auto_size
from hicache_lab.sizing.pools import failure_without_check, pool_warnings
from hicache_lab.sizing.rank import RankPlanner, RankPools


def assess(question: Question) -> Answer:
    """Judge one launch.

    Args:
        question: flags, model, release, host and device facts.

    Returns:
        The verdict with pools, orders, refusal and margin. "Does not fit" is a verdict, not an exception; a fact
        that is missing gives UNKNOWN and is named.
    """
    rules = question.rules
    stops, warned = _rejections(question)
    warnings = _warnings(question, [one.message for one in warned])
    refused = find_contradiction(question, stops)
    parsed = refused is None or refused.error != "argparse"
    if parsed and not builds_host_pools(question):
        return Answer(question, "FITS", warnings=(*warnings, SWITCHED_OFF))
    arguments = HicacheArguments.of(question.config, rules, mla=question.geometry.latent is not None)
    resolution = resolve_arguments(arguments, rules)
    if refused is None and resolution.outcome != "ok":
        refused = Refusal("HiCache arguments", resolution.outcome, resolution.message or "")
    if refused is not None:
        return Answer(question, _stopped_by(refused.error), refusal=refused, warnings=tuple(warnings))
    return _assess_resolved(question, resolution, warnings)


def stopping_rejections(question: Question) -> list[Rejection]:
    """What the release's own argument parser refuses of this launch."""
    return _rejections(question)[0]


def _rejections(question: Question) -> tuple[list[Rejection], list[Rejection]]:
    """What its parser stops at, and what is only warned of: options that no release knows are not judged."""
    judged, known = refusals(question.config, question.rules.version), known_flags()
    return [one for one in judged if one.flag in known], [one for one in judged if one.flag not in known]


def _stopped_by(error: str) -> Verdict:
    return "ASSERT" if error == "AssertionError" else "REFUSED"


def _warnings(question: Question, rejections: Sequence[str]) -> list[str]:
    found = [question.rules.warning] if question.rules.warning else []
    geometry = question.geometry
    if geometry.confidence not in ("confirmed", "config file", "inline"):
        found.append(f"geometry of {geometry.name}: {geometry.confidence} source, not confirmed from its own config")
    return [*found, *rejections]


def _assess_resolved(question: Question, resolution: Resolution, warnings: list[str]) -> Answer:
    arguments, config, rules = resolution.arguments, question.config, question.rules
    notes = [text for _, text in resolution.logs]
    laid_out = replace(config, hicache_mem_layout=arguments.hicache_mem_layout)
    planners = [
        RankPlanner(laid_out, question.geometry, rules, question.device, draft=question.draft, stage=stage)
        for stage in range(config.pp_size or 1)
    ]
    size_gb, ratio = config.hicache_size or 0, arguments.hicache_ratio
    if ratio is None:
        ratio = unset_ratio(question, planners[0].device_tokens)
    sized: AutoSize | None = None
    missing: list[str] = []
    try:
        if rules.auto_size and arguments.hicache_host_memory_fraction is not None:
            sized, missing = _auto_size(question, planners, ratio, arguments.hicache_host_memory_fraction)
            ratio = sized.ratio if sized else ratio
        # the stages of a pipeline agree on the tokens that one size gives
        agree = len(planners) > 1 and size_gb > 0 and planners[0].groups
        wanted = [planner.wanted_tokens(size_gb) for planner in planners] if agree else []
        stages = [
            planner.pools(ratio=ratio, size_gb=size_gb, peers=wanted[:stage] + wanted[stage + 1 :])
            for stage, planner in enumerate(planners)
        ]
    except LaunchFailure as failure:
        of_model = any(failure is planner.refusal for planner in planners)
        flag = "--model-path" if of_model else "--hicache-size" if size_gb > 0 else "--hicache-ratio"
        refusal = Refusal(flag, failure.kind, failure.message)
        kind = _stopped_by(failure.kind)
        return Answer(question, kind, refusal=refusal, warnings=tuple(warnings), notes=tuple(notes))
    ranks = _on_one_host(question, stages)
    first = ranks[0]
    of_pools = [text for pool in first.pools for text in pool_warnings(pool, rules)]
    no_host = ["host memory (--host-ram and, better, --available; or --this-host)"] if question.host is None else []
    answer = Answer(
        question,
        "UNKNOWN",
        ranks,
        ratio=None if size_gb > 0 else ratio,
        size_gb=size_gb or None,
        auto=sized,
        warnings=tuple(dict.fromkeys([*warnings, *first.uncounted, *of_pools])),
        notes=tuple(dict.fromkeys([*notes, *first.assumed])),
        missing=tuple(dict.fromkeys([*missing, *first.missing, *no_host])),
    )
    if not first.pools:
        return answer
    if question.host is None or (sized is None and missing):
        return _without_host(answer)
    booked = sized.budget_bytes if sized else None
    at_once = together(question, ranks, booked)
    apart = at_once if sized else one_after_another(question, ranks)
    answer = replace(answer, orders=(at_once, apart), refusal=at_once.refusal or apart.refusal)
    return replace(answer, verdict=_judge(question, answer))


def _on_one_host(question: Question, stages: list[RankPools]) -> tuple[RankPools, ...]:
    """The ranks of the host that has most to hold: rank = stage × tp + tensor rank, hosts take them in order."""
    config = question.config
    everyone = [stage for stage in stages for _ in range(config.tp_size or 1)]
    per_host = config.ranks_per_host
    hosts = [everyone[start : start + per_host] for start in range(0, len(everyone), per_host)]
    fullest = max(hosts, key=lambda ranks: sum(rank.requested_bytes for rank in ranks))
    return tuple(fullest) * config.dp_replicas


def _judge(question: Question, answer: Answer) -> Verdict:
    """The verdict of a plan whose bytes are known, on a host that is known."""
    at_once, apart = answer.orders
    limit = question.limit_bytes
    assert limit is not None
    # where the server's other memory alone passes the limit, no refusal comes before the kill
    stopped = at_once.refusal if at_once.resident_bytes <= limit else None
    if stopped is not None and stopped.error == "AssertionError":
        return "ASSERT"
    if stopped is not None and at_once.resident_bytes == 0:
        return "REFUSED"
    if answer.resident_bytes > limit:
        return "REFUSED" if stopped is not None and apart.refusal is not None else "OOM_RISK"
    if at_once.passes != apart.passes and answer.auto is None:
        return "RACE"
    if not at_once.passes:
        return "REFUSED"
    over = answer.over_reserve_bytes
    assert over is not None
    return "FITS" if over >= question.comfortable_bytes else "TIGHT"


def _without_host(answer: Answer) -> Answer:
    """Without a host only an assertion can still be foretold."""
    pool = answer.ranks[0].pools[0]
    failure = failure_without_check(pool, answer.question.rules)
    if failure is None or failure.kind != "AssertionError":
        return answer
    refusal = Refusal("--hicache-ratio", failure.kind, failure.message, requested_bytes=pool.requested_bytes)
    return replace(answer, verdict="ASSERT", refusal=refusal)


def _auto_size(
    question: Question, planners: Sequence[RankPlanner], ratio: float, fraction: float
) -> tuple[AutoSize | None, list[str]]:
    """Auto-sizing of the release, the smallest ratio of all stages; None with the missing facts otherwise."""
    for planner in planners:
        planner.require_auto_size()
    if question.host is None or any(planner.device_bytes is None for planner in planners):
        return None, ["auto-sizing needs the host's available memory and the device tokens"]
    view = question.view()
    sized = [
        auto_size(question.rules, view, ratio=ratio, fraction=fraction, device_bytes=planner.device_bytes or 1)
        for planner in planners
    ]
    return min(sized, key=lambda one: one.ratio), []
