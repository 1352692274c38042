"""The launch in a log as a question for preflight: the one place where a log becomes one.

Every size that a diagnosis, a report or a corrected line names is preflight's answer to this question. Where the
question cannot be asked, the facts that are missing are named, each with the flag that states it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from hicache_lab.base.errors import InputError, UnknownFact, UsageError
from hicache_lab.base.units import GB, format_gb
from hicache_lab.forensics.logs.fingerprints import ReleaseRange
from hicache_lab.preflight import Advice, Answer, Question, advise, ask, assess, format_advice, with_ratio, with_size
from hicache_lab.preflight.ask import DEVICE_FACTS, check_flag, device_from_facts, host_from_facts, stated_bytes
from hicache_lab.preflight.question import pool_limit_bytes
from hicache_lab.sglang.launch import LaunchConfig
from hicache_lab.sglang.releases import READ, VERIFIED, parse_version, rules_for
from hicache_lab.sizing.guard import RESERVE_TEXT, Budget, beyond_reserve_bytes, read_free_amount
from hicache_lab.sizing.rank import DeviceFacts

# sizes in the server's lines are printed to 0.01 GB
_HALF_A_PRINTED_DIGIT = GB // 200
# of what the log shows, that much must be computed too
_MOST = 0.99


@dataclass(frozen=True)
class Stated:
    """What the user says of an incident beside its files: the flags of ``diagnose`` and ``report``.

    Attributes:
        model: a catalogue name, hub id or config.json, where the log's model path tells nothing.
        tp_size: ranks of the tensor-parallel group, where the log does not show the server's arguments.
        overhead_bytes: host memory of the server's processes besides the pools.
        by: who says it, in a word.
        question: the question itself, from an incident.json; nothing is then read from the log for it.
    """

    host_ram_bytes: int | None = None
    available_bytes: int | None = None
    hugepages_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    cgroup_usage_bytes: int | None = None
    overhead_bytes: int | None = None
    device_tokens: int | None = None
    device_kv_gb: float | None = None
    swa_device_tokens: int | None = None
    mamba_slots: int | None = None
    model: str | None = None
    draft_model: str | None = None
    tp_size: int | None = None
    release: str | None = None
    by: str = "stated"
    question: Question | None = None


def stated_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``Stated`` from facts under the command line's names: ``host_ram="449GB", sglang_version …``.

    Raises:
        UsageError: a name that is not known, a quantity without its unit, or a number that cannot be meant.
    """
    flags = {"sglang_version" if name == "release" else name.removesuffix("_bytes"): name for name in _STATED}
    unknown = next((name for name in facts if name not in flags), None)
    if unknown is not None:
        raise UsageError(f"{unknown}: not a fact of an incident; known are {', '.join(flags)}")
    check_flag("tp_size", facts.get("tp_size"))
    device_from_facts(facts)
    return {flags[name]: stated_bytes(facts, name) if flags[name].endswith("_bytes") else facts[name] for name in facts}


_STATED = [one.name for one in fields(Stated) if one.name not in ("by", "question")]


@dataclass(frozen=True)
class RefusedPool:
    """The first refusal of a launch: what was asked, what was free, and what the same rank held by then. Bytes."""

    requested_bytes: int
    free_bytes: int
    held_bytes: int


@dataclass(frozen=True)
class LaunchFacts:
    """What a log and the files beside it tell of one launch; None where nothing does.

    Attributes:
        launch: the server's arguments.
        releases: those that could have printed the log.
        tp_ranks: tensor-parallel ranks that spoke.
        size_gb: ``--hicache-size``, from the arguments or from the pools.
        pools_bytes: the host pools that one rank asked for, the most that a rank shows; 0 where none does.
        total_bytes: RAM of the host.
        available_bytes: memory available when the pools were asked for, or before the launch.
        server_is_counted: whether ``available_bytes`` was read while the server ran, its own memory already taken.
        container_limit_bytes: the tightest memory limit of a control group.
        hugepages_bytes: reserved huge pages that nobody uses.
        refused: a refusal, whose free amount tells what was available where nothing else does.
        device: what the device pools of one rank hold.
    """

    launch: LaunchConfig | None = None
    releases: ReleaseRange | None = None
    tp_ranks: int | None = None
    size_gb: float | None = None
    pools_bytes: int = 0
    total_bytes: int | None = None
    available_bytes: int | None = None
    server_is_counted: bool = False
    container_limit_bytes: int | None = None
    hugepages_bytes: int = 0
    refused: RefusedPool | None = None
    device: DeviceFacts = field(default_factory=DeviceFacts)


@dataclass(frozen=True)
class LaunchQuestion:
    """What preflight is asked about a launch, and what follows from its answers.

    Attributes:
        questions: one for each release that could have printed the log, the oldest first; none when facts are missing.
        missing: those facts, each with the way to state it.
        assumed: what was assumed for want of a fact.
        host_limit_bytes: what all host pools together could take, where at least that is known.
    """

    questions: tuple[Question, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    host_limit_bytes: int | None = None

    @cached_property
    def question(self) -> Question | None:
        """The question of the release that leaves least room."""
        return min(self.questions, key=_room, default=None)

    @cached_property
    def answer(self) -> Answer | None:
        """What preflight says of the launch as it was."""
        return None if self.question is None else assess(self.question)

    @property
    def limit_bytes(self) -> int | None:
        """What all host pools together could take: every fact that lowers it is counted."""
        return self.host_limit_bytes if self.question is None else self.question.limit_bytes

    @cached_property
    def budget(self) -> Budget | None:
        """What one rank's check allows before any pool, if all releases in question agree on the arithmetic."""
        budgets = {budget.divides: budget for one in self.questions if one.host and (budget := one.budget())}
        return next(iter(budgets.values())) if len(budgets) == 1 else None

    @cached_property
    def comfortable(self) -> Advice:
        """The largest settings that fit with room to spare, whichever of the releases it was."""
        return _accepted_by_all(self.questions, ("FITS",))

    @cached_property
    def bound(self) -> Advice:
        """The largest settings that leave only the reserve, whichever of the releases it was."""
        return _accepted_by_all(self.questions, ("FITS", "TIGHT"))

    @property
    def remedy(self) -> str:
        """What to set instead, in flags to paste; where that cannot be computed, what is missing for it."""
        if not self.questions:
            bound = ""
            if self.host_limit_bytes is not None:
                most = format_gb(max(beyond_reserve_bytes(self.host_limit_bytes), 0))
                bound = (
                    f"; only a bound is known: all host pools of this host together at most {most}, "
                    f"the {RESERVE_TEXT} reserve kept back"
                )
            return f"a size cannot be computed: {'; '.join(self.missing)}{bound}"
        settings = format_advice(self.comfortable) or format_advice(self.bound)
        if not settings:
            return self._without_settings()
        text = f"{settings}{self._leaving_only_the_reserve()}"
        if len(self.questions) > 1:
            text += (
                f"; accepted by every release from {self.questions[0].rules.version} to "
                f"{self.questions[-1].rules.version} that could have printed this log (--sglang-version narrows it)"
            )
        return "; ".join([text, *self.assumed, *self._assumed_by_preflight()])

    def _leaving_only_the_reserve(self) -> str:
        if not format_advice(self.comfortable):
            return f", which leaves only the {RESERVE_TEXT} reserve"
        most = self.bound.size_gb if self.comfortable.size_gb is not None else self.bound.ratio
        if most in (None, self.comfortable.size_gb, self.comfortable.ratio):
            return ""
        flag = "--hicache-size" if self.comfortable.size_gb is not None else "--hicache-ratio"
        return f"; the bound, with only the {RESERVE_TEXT} reserve left: {flag} {most:g}"

    def _assumed_by_preflight(self) -> list[str]:
        """What a reader could state more exactly, and what is not counted at all."""
        rank = self.answer.rank if self.answer is not None else None
        if rank is None:
            return []
        uncounted = [f"not counted: {text}" for text in rank.uncounted]
        return uncounted + [f"assumed: {text}" for text in rank.assumed if "--" in text]

    def _without_settings(self) -> str:
        missing = self.answer.missing if self.answer is not None else ()
        if missing:
            return f"a size cannot be computed: {'; '.join(missing)}"
        refusal = self.answer.refusal if self.answer is not None else None
        if refusal is not None and refusal.requested_bytes is None:
            return f"no size helps: {refusal.flag}: {refusal.message}"
        return "there is no room for a host tier on this host; launch without --enable-hierarchical-cache"


def _room(question: Question) -> tuple[float, float]:
    advice = advise(question)
    return advice.size_gb or 0, advice.ratio or 0


def _accepted_by_all(questions: tuple[Question, ...], accepted: tuple[str, ...]) -> Advice:
    """The largest size and the largest ratio that every one of the questions accepts."""
    each = [advise(question, accepted=accepted) for question in questions]
    if len(each) == 1:
        return each[0]
    sizes, ratios = [one.size_gb for one in each], [one.ratio for one in each]
    size = ratio = None
    if each and None not in sizes:
        least = min(size for size in sizes if size is not None)
        size = _worst([assess(with_size(question, least)) for question in questions], accepted)
    if each and None not in ratios:
        smallest = min(ratio for ratio in ratios if ratio is not None)
        ratio = _worst([assess(with_ratio(question, smallest)) for question in questions], accepted)
    return Advice(
        size_gb=int(size.size_gb) if size and size.size_gb else None,
        size_bytes=size.resident_bytes if size else None,
        ratio=ratio.ratio if ratio else None,
        ratio_bytes=ratio.resident_bytes if ratio else None,
        size_answer=size,
        ratio_answer=ratio,
    )


def _worst(answers: list[Answer], accepted: tuple[str, ...]) -> Answer | None:
    """The answer that takes most; None if one of them is not accepted (a pool too small for an older release)."""
    if any(answer.verdict not in accepted for answer in answers):
        return None
    return max(answers, key=lambda answer: answer.resident_bytes)


def ask_launch(facts: LaunchFacts, stated: Stated) -> LaunchQuestion:
    """The question that preflight would have been asked about a launch.

    Args:
        facts: what the files tell.
        stated: what the user says; it completes the files, and its model and release go before theirs.
    """
    if stated.question is not None:
        return LaunchQuestion((stated.question,))
    config, missing = _config(facts, stated)
    releases = releases_in_question(stated.release, facts.releases)
    if not releases:
        missing.append("the release, which the log's wording does not tell (--sglang-version states it)")
    hosts = tuple(host for release in releases if (host := _host(facts, stated, release, config)) is not None)
    if len(hosts) < len(releases):
        missing.append("the host's memory, which is not in the files (--host-ram and --available state it)")
    if missing or config is None:
        return LaunchQuestion(missing=tuple(missing), host_limit_bytes=hosts[0].limit_bytes if hosts else None)
    stated_device = device_from_facts({name: getattr(stated, name) for name in DEVICE_FACTS})
    device = DeviceFacts(
        tokens=facts.device.tokens or stated_device.tokens,
        kv_bytes=None if facts.device.tokens else stated_device.kv_bytes,
        swa_tokens=facts.device.swa_tokens or stated_device.swa_tokens,
        mamba_slots=facts.device.mamba_slots or stated_device.mamba_slots,
    )
    # without the arguments the size is not known, and its pools explain nothing
    pools = facts.pools_bytes if config.hicache_size or facts.launch is not None else 0
    models = (stated.model, stated.draft_model)
    return _launch_question(config, models, releases, hosts, device, pools, tuple(_assumed(facts, stated)))


def _config(facts: LaunchFacts, stated: Stated) -> tuple[LaunchConfig | None, list[str]]:
    """The launch, and what is missing of it."""
    launch = facts.launch
    if launch is not None and launch.notes:
        # a field that was lost may be one that sizes depend on
        return None, [f"the server's arguments, which could not be read whole ({launch.notes[0]})"]
    if launch is None:
        size = int(facts.size_gb) if facts.size_gb is not None and facts.size_gb.is_integer() else None
        launch = LaunchConfig(enable_hierarchical_cache=True, hicache_size=size)
    if launch.tp_size is None:
        launch = replace(launch, tp_size=facts.tp_ranks or stated.tp_size)
    missing = []
    if stated.model is None and launch.model is None:
        missing.append("the model, which the log does not name (--model states it)")
    if launch.tp_size is None:
        missing.append("the number of ranks, which the log does not show (--tp-size states it)")
    if launch.enable_hierarchical_cache is None:
        launch = replace(launch, enable_hierarchical_cache=True)
    elif not launch.enable_hierarchical_cache and not facts.pools_bytes:
        missing.append("a host tier: this launch has no --enable-hierarchical-cache")
    # a random seed changes no size, and a server that restarts all night draws a new one each time
    other = tuple(one for one in launch.other if one[0] != "--random-seed")
    return replace(launch.without_spelling(), other=other), missing


def releases_in_question(stated: str | None, printed_by: ReleaseRange | None) -> tuple[str, ...]:
    """The release that is stated, or every examined one that could have printed the log, the oldest first.

    All of them and not the two ends: between two releases that take what was asked lie some that take more.
    """
    if stated is not None:
        return (stated,)
    if printed_by is None:
        return ()
    first, last = parse_version(printed_by.first), parse_version(printed_by.last)
    examined = sorted((*VERIFIED, *READ), key=parse_version)
    return tuple(release for release in examined if first <= parse_version(release) <= last)


@dataclass(frozen=True)
class _Host:
    """The host before its pools were taken, by the names of ``ask``; amounts in bytes."""

    host_ram: int | None
    available: int | None
    cgroup_limit: int | None
    cgroup_usage: int | None
    hugepages: int | None
    overhead: int

    @property
    def limit_bytes(self) -> int:
        """What the pools can have at most, where no question can be asked."""
        host, _ = host_from_facts(asdict(self))
        assert host is not None
        return pool_limit_bytes(host, self.overhead)


def _host(facts: LaunchFacts, stated: Stated, release: str, config: LaunchConfig | None) -> _Host | None:
    """The host as a release sees it."""
    total, available, limit = facts.total_bytes, facts.available_bytes, facts.container_limit_bytes
    if available is None and facts.refused is not None:
        available = _behind_a_refusal(facts.refused, release, config)
    if total is None and available is None and limit is None:
        return None
    # of a container alone, its limit is all the memory there is
    if total is None and available is None:
        total = limit
    # files of several moments may disagree a little; the smaller amount kills nobody
    if total is not None and available is not None:
        available = min(total, available)
    return _Host(
        host_ram=total,
        available=available,
        cgroup_limit=limit,
        cgroup_usage=None if limit is None else stated.cgroup_usage_bytes,
        hugepages=facts.hugepages_bytes if total else None,
        overhead=0 if facts.server_is_counted else stated.overhead_bytes or 0,
    )


def _behind_a_refusal(refused: RefusedPool, release: str, config: LaunchConfig | None) -> int | None:
    """What was available before the refused rank took its first pool, at least: other ranks may hold some as well."""
    free = read_free_amount(
        [rules_for(release)],
        ranks=config.ranks_per_host if config is not None else None,
        requested_bytes=refused.requested_bytes,
        free_bytes=refused.free_bytes - _HALF_A_PRINTED_DIGIT,
    )
    return None if free.available_bytes is None else free.available_bytes + refused.held_bytes


def _assumed(facts: LaunchFacts, stated: Stated) -> Iterator[str]:
    if facts.available_bytes is None and facts.refused is None:
        yield "assumed: all RAM was available (--available states what was)"
    if not facts.server_is_counted and stated.overhead_bytes is None:
        yield "the server's own host memory is not counted (--overhead states it)"


# a server that restarts all night asks the same question each time
@lru_cache(maxsize=256)
def _launch_question(
    config: LaunchConfig,
    models: tuple[str | None, str | None],
    releases: tuple[str, ...],
    hosts: tuple[_Host, ...],
    device: DeviceFacts,
    pools_bytes: int,
    assumed: tuple[str, ...],
) -> LaunchQuestion:
    """One question a release; without the fact that is missing for them, none."""
    limit = hosts[0].limit_bytes
    model, draft_model = models
    try:
        questions = tuple(
            replace(
                ask(
                    model,
                    release,
                    config=replace(config, sglang_version=release),
                    draft_model=draft_model,
                    **asdict(host),
                ),
                device=device,
            )
            for release, host in zip(releases, hosts, strict=True)
        )
    except (UnknownFact, InputError):
        if model is not None:
            raise
        missing = f"the shape of the model {config.model!r} (--model names one of the catalogue or its config.json)"
        return LaunchQuestion(missing=(missing,), host_limit_bytes=limit)
    except UsageError as error:
        return LaunchQuestion(missing=(f"a launch that can be judged ({error})",), host_limit_bytes=limit)
    # a release that does not know a flag of the launch did not print this log
    answers = [assess(question) for question in questions]
    known = [answer for answer in answers if not (answer.refusal and answer.refusal.error == "argparse")] or answers
    # nor did one that takes less for it than the log shows
    possible = [answer for answer in known if not answer.per_rank_bytes or answer.per_rank_bytes >= _MOST * pools_bytes]
    if not possible:
        computed = format_gb(max(answer.per_rank_bytes for answer in known))
        missing = (
            f"what explains the {format_gb(pools_bytes)} of host pools that one rank asked for: from the other facts "
            f"{computed} are computed (another --model, a --draft-model)"
        )
        return LaunchQuestion(missing=(missing,), host_limit_bytes=limit)
    versions = {answer.question.rules.version for answer in possible}
    return LaunchQuestion(tuple(q for q in questions if q.rules.version in versions), assumed=assumed)
