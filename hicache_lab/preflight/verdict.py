"""Will it start, and what will the host see: what each rank believes against what all of them take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from hicache_lab.host import HostMemory
from hicache_lab.preflight.decode import unset_ratio
from hicache_lab.sglang.arguments import HicacheArguments, Resolution, resolve_arguments
from hicache_lab.sglang.launch import LaunchConfig, Rejection, refusals
from hicache_lab.sglang.launch.flags import known_flags
from hicache_lab.sglang.releases import ReleaseRules
from hicache_lab.sizing.geometry import ModelGeometry
from hicache_lab.sizing.guard import Budget, HostView, LaunchFailure, beyond_reserve_bytes, rank_budget
from hicache_lab.sizing.pools import HostPool, construct_pool
from hicache_lab.sizing.rank import DeviceFacts, RankPlanner, RankPools, resident_bytes
from hicache_lab.sizing.shares import AutoSize, auto_size

Verdict = Literal["FITS", "TIGHT", "RACE", "REFUSED", "OOM_RISK", "ASSERT", "UNKNOWN"]

DEFAULT_HEADROOM = 0.10
"""Share of RAM (or limit) that a comfortable plan leaves free beyond the releases' reserve (page cache, growth)."""


@dataclass(frozen=True)
class Question:
    """Everything a verdict depends on.

    Attributes:
        config: the launch flags.
        geometry: the model.
        rules: the SGLang release.
        host: memory facts, or None when nothing is known of the host.
        device: tokens (or bytes) that the device pools of one rank hold.
        overhead_bytes: host memory that the server's processes take besides the pools, before the check.
        headroom_bytes: what a comfortable plan leaves beyond the reserve; None takes a tenth (``comfortable_bytes``).
        draft: geometry of a separate draft model.
        ram_is_known: False when only the available memory was stated.
    """

    config: LaunchConfig
    geometry: ModelGeometry
    rules: ReleaseRules
    host: HostMemory | None = None
    device: DeviceFacts = field(default_factory=DeviceFacts)
    overhead_bytes: int = 0
    headroom_bytes: int | None = None
    draft: ModelGeometry | None = None
    ram_is_known: bool = True

    @property
    def limit_bytes(self) -> int | None:
        """What all ranks of this host can really take: available, lowered by the container, minus the overhead."""
        if self.host is None:
            return None
        return self.host.effective_available_bytes - self.overhead_bytes

    @property
    def comfortable_bytes(self) -> int:
        """Headroom beyond the reserve that separates FITS from TIGHT.

        A tenth of the RAM stays free on the host and a tenth of its limit in each container: a bound that comes on top,
        or RAM that is added, then never makes the other look roomier.
        """
        host = self.host
        if self.headroom_bytes is not None or host is None:
            return self.headroom_bytes or 0
        rooms = [host.available_bytes - int(host.total_bytes * DEFAULT_HEADROOM)]
        for level in host.cgroup.levels if host.cgroup else ():
            if not level.is_unlimited:
                rooms.append(level.headroom_bytes(credit_page_cache=True) - int(level.limit_bytes * DEFAULT_HEADROOM))
        return host.effective_available_bytes - min(rooms)

    def view(self, taken_bytes: int = 0) -> HostView:
        """What a rank reads once ``taken_bytes`` of the host are resident."""
        assert self.host is not None
        used = taken_bytes + self.overhead_bytes
        headroom = self.host.container_headroom_bytes(credit_page_cache=self.rules.cgroup_credits_page_cache)
        return HostView(
            available_bytes=self.host.available_bytes - used,
            cgroup_headroom_bytes=None if headroom is None else max(0, headroom - used),
            ranks_per_host=self.config.ranks_per_host,
        )

    def budget(self, taken_bytes: int = 0) -> Budget:
        """What the release's check allows one rank once ``taken_bytes`` of the host are resident."""
        return rank_budget(self.rules, self.view(taken_bytes))


@dataclass(frozen=True)
class Refusal:
    """Why the server does not start: which flag, how much was asked, how much was there, the words it prints."""

    flag: str
    error: str
    message: str
    meaning: str = ""
    requested_bytes: int | None = None
    available_bytes: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class Order:
    """One order in which the ranks of a host check and take memory; it ends at a refusal or where the limit kills.

    Attributes:
        name: which order.
        refusal: what stopped it, if a check did.
        resident_bytes: what all ranks had taken by then.
        killed_rank: the rank whose pool passes what the host (or its container) can give; None if none does. Of
            ranks that take their pools together it is the first in number that finds nothing left.
        passes: whether every rank got through its checks.
    """

    name: Literal["together", "one after another"]
    refusal: Refusal | None
    resident_bytes: int
    killed_rank: int | None = None
    passes: bool = True


@dataclass(frozen=True)
class Answer:
    """A verdict with the arithmetic behind it; every number in it is computed from the stated facts."""

    question: Question
    verdict: Verdict
    ranks: tuple[RankPools, ...] = ()
    orders: tuple[Order, ...] = ()
    refusal: Refusal | None = None
    ratio: float | None = None
    size_gb: float = 0
    auto: AutoSize | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    provenance: str = field(default="computed")

    @property
    def rank(self) -> RankPools | None:
        """The largest rank of this host."""
        return max(self.ranks, key=lambda rank: rank.requested_bytes, default=None)

    @property
    def ranks_on_host(self) -> int:
        """Scheduler processes on the host, data-parallel replicas included."""
        return len(self.ranks)

    @property
    def per_rank_bytes(self) -> int:
        """Bytes that the largest rank asks for, all its pools."""
        return self.rank.requested_bytes if self.rank else 0

    @property
    def host_bytes(self) -> int:
        """Bytes that all ranks of the host ask for."""
        return sum(rank.requested_bytes for rank in self.ranks)

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes that would really become resident on the host."""
        return sum(rank.resident_bytes(self.question.rules) for rank in self.ranks)

    @property
    def margin_bytes(self) -> int | None:
        """What is left on the host when every rank has its pools; negative when it does not fit."""
        limit = self.question.limit_bytes
        return None if limit is None else limit - self.resident_bytes

    @property
    def over_reserve_bytes(self) -> int | None:
        """What is left beyond the releases' reserve."""
        return None if self.margin_bytes is None else beyond_reserve_bytes(self.margin_bytes)

    @property
    def guaranteed_start_bytes(self) -> int | None:
        """Largest equal share a rank with one pool may ask for and start in whatever order the ranks check."""
        if self.question.host is None or not self.ranks:
            return None
        return self.question.budget().certain_start_bytes(self.ranks_on_host)


def _arguments(question: Question) -> HicacheArguments:
    config, rules = question.config, question.rules
    fraction = config.hicache_host_memory_fraction
    if fraction is None:
        fraction = rules.default_host_memory_fraction
    ratio = config.hicache_ratio
    if ratio is None and not rules.resolves_ratio:
        ratio = rules.default_ratio
    return HicacheArguments(
        enable_hierarchical_cache=bool(config.enable_hierarchical_cache),
        hicache_ratio=ratio,
        hicache_size=config.hicache_size or 0,
        hicache_host_memory_fraction=fraction,
        hicache_host_memory_mode=config.hicache_host_memory_mode or "cache",
        hicache_write_policy=config.hicache_write_policy or rules.default_write_policy or "write_through",
        hicache_io_backend=config.hicache_io_backend or "kernel",
        hicache_mem_layout=config.hicache_mem_layout or rules.default_layout,
        hicache_storage_backend=config.hicache_storage_backend,
        attention_backend=config.attention_backend,
        decode_attention_backend=config.decode_attention_backend,
        disaggregation_mode=config.disaggregation_mode or "null",
        enable_unified_memory=bool(config.enable_unified_memory),
        dcp_size=config.dcp_size or 1,
        mla=question.geometry.latent is not None,
    )


def _argparse_refusals(question: Question) -> list[Rejection]:
    """What the release's own argument parser refuses in a pasted line; options known to no release are not judged."""
    if question.config.source is None:
        return list(question.config.rejections)
    found = refusals(question.config, question.rules.version)
    return [one for one in found if one.flag in known_flags()]


def _contradiction(question: Question) -> Refusal | None:
    """Flags that the server itself refuses before anything is built."""
    config, rules = question.config, question.rules
    for flag, value, known in (
        ("--hicache-size", config.hicache_size, rules.has_size_flag),
        ("--hicache-ratio", config.hicache_ratio, rules.has_ratio_flag),
    ):
        if value and not known:
            why = f"{rules.version} does not have {flag} yet"
            return Refusal(flag, "argparse", f"unrecognized arguments: {flag} {value}", why)
    for rejection in _argparse_refusals(question):
        return Refusal(rejection.flag, "argparse", rejection.message)
    if config.disable_radix_cache:
        text = (
            "The arguments enable-hierarchical-cache and disable-radix-cache are mutually exclusive and cannot be "
            "used at the same time. Please use only one of them."
        )
        return Refusal("--disable-radix-cache", "ValueError", text, "the host tier extends the radix cache")
    if (config.dcp_size or 1) > 1 and (refused := _dcp_contradiction(question)) is not None:
        return refused
    heads = question.geometry.full
    if heads is not None and not heads.splits_evenly(config.attn_tp_size):
        return Refusal(
            "--tp-size",
            "AssertionError",
            f"{heads.kv_heads} KV heads and {config.attn_tp_size} ranks that share them: neither divides the other",
            "the attention layers assert it while the model is built (models/llama.py and its like)",
        )
    return None


def _dcp_contradiction(question: Question) -> Refusal | None:
    """What decode context parallelism cannot be combined with.

    Source: 0.5.17 server_args.py _resolve_hicache_dcp_compatibility; 0.5.19+ arg_groups/hicache_hook.py.
    """
    config, rules, flag = question.config, question.rules, "--dcp-size"
    if not rules.dcp_host_pool:
        return Refusal(flag, "unsupported", "the host pool knows decode context parallelism from 0.5.17 on only")
    algorithm = config.speculative_algorithm
    if algorithm is not None and algorithm not in rules.dcp_speculation:
        text = (
            "HiCache with --dcp-size > 1 only supports DSPARK speculative decoding; other draft-model host pools have "
            "no DCP index translation."
            if rules.dcp_speculation
            else "HiCache with --dcp-size > 1 does not support speculative decoding yet (the draft-model host pool has "
            "no DCP index translation)."
        )
        return Refusal(flag, "NotImplementedError", text)
    if question.geometry.kind not in ("mla", "dsa"):
        text = (
            "HiCache with --dcp-size > 1 is only supported for MLA models: the index translation lives in "
            "MLATokenToKVPoolHost, and the MHA host pool has none."
        )
        return Refusal(flag, "NotImplementedError", text)
    return None


def _planners(question: Question) -> list[RankPlanner]:
    stages = range(question.config.pp_size or 1)
    return [
        RankPlanner(
            question.config, question.geometry, question.rules, question.device, draft=question.draft, stage=stage
        )
        for stage in stages
    ]


def _stage_pools(planners: Sequence[RankPlanner], ratio: float, size_gb: float) -> list[RankPools]:
    if len(planners) == 1 or size_gb <= 0 or planners[0].refusal is not None or not planners[0].groups:
        return [planner.pools(ratio=ratio, size_gb=size_gb) for planner in planners]
    wanted = [planner.wanted_tokens(size_gb) for planner in planners]
    return [
        planner.pools(ratio=ratio, size_gb=size_gb, peers=wanted[:index] + wanted[index + 1 :])
        for index, planner in enumerate(planners)
    ]


def _on_one_host(question: Question, stages: list[RankPools]) -> tuple[RankPools, ...]:
    """The ranks of the host that has most to hold: rank = stage × tp + tensor rank, hosts take them in order."""
    config = question.config
    everyone = [stage for stage in stages for _ in range(config.tp_size or 1)]
    per_host = config.ranks_per_host
    hosts = [everyone[start : start + per_host] for start in range(0, len(everyone), per_host)]
    fullest = max(hosts, key=lambda ranks: sum(rank.requested_bytes for rank in ranks))
    return tuple(fullest) * config.dp_replicas


def _meaning(question: Question, budget: Budget | None) -> str:
    """What the number in the refusal is in this release."""
    host = question.host
    if host is None or budget is None:
        return ""
    in_container = question.rules.guard_reads_cgroup and host.cgroup
    free = budget.meaning("what the container's limit leaves" if in_container else "available memory")
    return f"the free amount it prints is {free}"


def _check(question: Question, pool: HostPool, taken: int, rank: int, booked: int | None) -> Refusal | None:
    done = construct_pool(pool.spec, question.rules, question.view(taken), booked_budget_bytes=booked)
    if done.outcome == "ok":
        return None
    by_size = bool(question.config.hicache_size)
    return Refusal(
        flag="--hicache-size" if by_size else "--hicache-ratio",
        error=done.outcome,
        message=done.message or "",
        meaning=_meaning(question, done.budget),
        requested_bytes=pool.requested_bytes,
        available_bytes=done.budget.budget_bytes if done.budget else None,
        rank=rank,
    )


def _together(question: Question, ranks: Sequence[RankPools], booked: int | None) -> Order:
    """All ranks check their first pool, then all take it, then the second pool, and so on."""
    taken, limit = 0, question.limit_bytes or 0
    deepest = max(len(rank.pools) for rank in ranks)
    for depth in range(deepest):
        level = [(number, rank.pools[depth]) for number, rank in enumerate(ranks) if depth < len(rank.pools)]
        checked: dict[tuple[int, int], Refusal | None] = {}
        for number, pool in level:
            left = None if booked is None else booked - sum(p.requested_bytes for p in ranks[number].pools[:depth])
            # ranks of one stage ask the same question; one answer serves them all
            key = (id(ranks[number]), depth)
            if key not in checked:
                checked[key] = _check(question, pool, taken, number, left)
            if checked[key] is not None:
                return Order("together", checked[key], taken, passes=False)
        killed = None
        for number, pool in level:
            taken += resident_bytes(pool, question.rules)
            killed = number if killed is None and taken > limit else killed
        if killed is not None:
            return Order("together", None, taken, killed, passes=depth == deepest - 1)
    return Order("together", None, taken)


def _one_after_another(question: Question, ranks: Sequence[RankPools]) -> Order:
    """Each rank takes all its pools before the next one checks."""
    taken, limit = 0, question.limit_bytes or 0
    for number, rank in enumerate(ranks):
        for pool in rank.pools:
            refusal = _check(question, pool, taken, number, None)
            if refusal is not None:
                return Order("one after another", refusal, taken, passes=False)
            taken += resident_bytes(pool, question.rules)
            if taken > limit:
                is_last = number == len(ranks) - 1 and pool is rank.pools[-1]
                return Order("one after another", None, taken, number, passes=is_last)
    return Order("one after another", None, taken)


def _warnings(question: Question, ranks: Sequence[RankPools]) -> list[str]:
    found = [question.rules.warning] if question.rules.warning else []
    geometry = question.geometry
    if geometry.confidence not in ("confirmed", "config file", "inline"):
        found.append(f"geometry of {geometry.name}: {geometry.confidence} source, not confirmed from its own config")
    stops = {one.message for one in _argparse_refusals(question)}
    found += [one.message for one in refusals(question.config, question.rules.version) if one.message not in stops]
    found += [text for rank in ranks[:1] for text in rank.uncounted]
    for pool in ranks[0].pools if ranks else ():
        done = construct_pool(pool.spec, question.rules, HostView(2**62))
        found += [text for level, text in done.logs if level == "WARNING"]
    return found


def _judge(question: Question, answer: Answer) -> Verdict:
    """The verdict of a plan whose bytes are known, on a host that is known."""
    together, apart = answer.orders
    limit = question.limit_bytes
    assert limit is not None
    # where the server's other memory alone passes the limit, no refusal comes before the kill
    stopped = together.refusal if together.resident_bytes <= limit else None
    if stopped is not None and stopped.error == "AssertionError":
        return "ASSERT"
    if stopped is not None and together.resident_bytes == 0:
        return "REFUSED"
    if answer.resident_bytes > limit:
        return "REFUSED" if stopped is not None and apart.refusal is not None else "OOM_RISK"
    if together.passes != apart.passes and answer.auto is None:
        return "RACE"
    if not together.passes:
        return "REFUSED"
    over = answer.over_reserve_bytes
    assert over is not None
    return "FITS" if over >= question.comfortable_bytes else "TIGHT"


def assess(question: Question) -> Answer:
    """Judge one launch.

    Args:
        question: flags, model, release, host and device facts.

    Returns:
        The verdict with pools, orders, refusal and margin. "Does not fit" is a verdict, not an exception; a fact
        that is missing gives UNKNOWN and is named.
    """
    config = question.config
    refused = _contradiction(question)
    resolution = resolve_arguments(_arguments(question), question.rules)
    if refused is None and resolution.outcome != "ok":
        refused = Refusal("HiCache arguments", resolution.outcome, resolution.message or "")
    if refused is not None:
        kind: Verdict = "ASSERT" if refused.error == "AssertionError" else "REFUSED"
        return Answer(question, kind, refusal=refused, warnings=tuple(_warnings(question, ())))
    return _assess_resolved(question, resolution, config)


def _assess_resolved(question: Question, resolution: Resolution, config: LaunchConfig) -> Answer:
    arguments, asked = resolution.arguments, question
    question = replace(question, config=replace(config, hicache_mem_layout=arguments.hicache_mem_layout))
    notes = [text for _, text in resolution.logs]
    planners = _planners(question)
    size_gb = config.hicache_size or 0
    ratio = arguments.hicache_ratio
    if ratio is None:
        ratio = unset_ratio(config, question.geometry, question.rules, planners[0].device_tokens)
    sized: AutoSize | None = None
    missing: list[str] = []
    try:
        if question.rules.auto_size and arguments.hicache_host_memory_fraction is not None:
            sized, missing = _auto_size(question, planners, ratio, arguments.hicache_host_memory_fraction)
            ratio = sized.ratio if sized else ratio
        stages = _stage_pools(planners, ratio, size_gb)
    except LaunchFailure as failure:
        kind: Verdict = "ASSERT" if failure.kind == "AssertionError" else "REFUSED"
        of_model = any(failure is planner.refusal for planner in planners)
        flag = "--model-path" if of_model else "--hicache-size" if size_gb > 0 else "--hicache-ratio"
        refusal = Refusal(flag, failure.kind, failure.message)
        return Answer(question, kind, refusal=refusal, warnings=tuple(_warnings(asked, ())), notes=tuple(notes))
    ranks = _on_one_host(question, stages)
    answer = Answer(
        question,
        "UNKNOWN",
        ranks,
        ratio=None if size_gb > 0 else ratio,
        size_gb=size_gb,
        auto=sized,
        warnings=tuple(dict.fromkeys(_warnings(asked, ranks))),
        notes=tuple(dict.fromkeys([*notes, *ranks[0].assumed])),
        missing=tuple(dict.fromkeys([*missing, *ranks[0].missing, *_missing_host(question)])),
    )
    if not ranks[0].pools:
        return answer
    if question.host is None or (sized is None and missing):
        return _without_host(answer)
    booked = sized.budget_bytes if sized else None
    together = _together(question, ranks, booked)
    apart = together if sized else _one_after_another(question, ranks)
    answer = replace(answer, orders=(together, apart), refusal=together.refusal or apart.refusal)
    return replace(answer, verdict=_judge(question, answer))


def _without_host(answer: Answer) -> Answer:
    """Without a host only an assertion can still be foretold."""
    pool = answer.ranks[0].pools[0]
    done = construct_pool(pool.spec, answer.question.rules, HostView(2**62))
    if done.outcome != "AssertionError":
        return answer
    refusal = Refusal("--hicache-ratio", done.outcome, done.message or "", requested_bytes=pool.requested_bytes)
    return replace(answer, verdict="ASSERT", refusal=refusal)


def _missing_host(question: Question) -> list[str]:
    if question.host is not None:
        return []
    return ["host memory (--host-ram and, better, --available; or --this-host)"]


def _auto_size(
    question: Question, planners: Sequence[RankPlanner], ratio: float, fraction: float
) -> tuple[AutoSize | None, list[str]]:
    """Auto-sizing of the release, the smallest ratio of all stages; None with the missing facts otherwise."""
    for planner in planners:
        if planner.refusal is not None:
            raise planner.refusal
    if question.geometry.kind == "dsv4":
        raise LaunchFailure(
            "ValueError",
            "HiCache auto-sizing does not support DeepSeekV4TokenToKVPool; "
            "set --hicache-ratio or --hicache-size explicitly.",
        )
    if question.host is None or any(planner.device_bytes is None for planner in planners):
        return None, ["auto-sizing needs the host's available memory and the device tokens"]
    sized = [
        auto_size(
            question.rules, question.view(), ratio=ratio, fraction=fraction, device_bytes=planner.device_bytes or 1
        )
        for planner in planners
    ]
    return min(sized, key=lambda one: one.ratio), []
