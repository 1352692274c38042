"""Each claim of an incident, recomputed: it agrees, differs, holds under a condition, or cannot be checked.

The claims are data (``claims.json``); a claim names one of the checks below and gives it its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hicache_lab.base.errors import InputError
from hicache_lab.base.units import GB, format_gb
from hicache_lab.forensics.cases.case import Case, read_json
from hicache_lab.forensics.cases.counterfactuals import bound, recommended
from hicache_lab.preflight import Answer, Question, assess, with_ratio, with_release, with_size
from hicache_lab.preflight.text import count_ranks, kill_in_words, why_no_pools
from hicache_lab.sizing.guard import RESERVE_TEXT

SCHEMA, SCHEMA_VERSION = "hicache-lab/claims", 1
Status = Literal["agrees", "differs", "holds if", "cannot be checked"]


@dataclass(frozen=True)
class ClaimResult:
    """One row of the claims table; ``recomputed`` is the number with its arithmetic."""

    id: str
    step: int
    claim: str
    recomputed: str
    status: Status
    source: str = "computed"

    @property
    def row(self) -> dict[str, str | int]:
        """The row as plain values, for a table or a result record."""
        return {"step": self.step, "claim": self.claim, "recomputed": self.recomputed, "agrees": self.status}


Outcome = tuple[Status, str]
Inputs = Mapping[str, Any]
Check = Callable[[Case, Inputs], Outcome]


def audit(case: Case) -> list[ClaimResult]:
    """Recompute every claim in the case's ``claims.json``.

    Raises:
        InputError: an unknown check, or an input that the check needs and the claim does not give.
    """
    path = case.folder / "claims.json"
    results = []
    for raw in read_json(path, SCHEMA, SCHEMA_VERSION)["claims"]:
        check = CHECKS.get(raw.get("check"))
        if check is None:
            raise InputError(f"{path}: claim {raw.get('id')!r}: check is one of {', '.join(CHECKS)}")
        try:
            try:
                status, text = check(case, raw)
            except _NoPoolsError as error:
                status, text = "cannot be checked", str(error)
            results.append(ClaimResult(raw["id"], raw["step"], raw["claim"], text, status))
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: claim {raw.get('id')!r}: input missing or of another form ({error})") from error
    return results


class _NoPoolsError(Exception):
    """The setting that a claim speaks of builds no host pools; the message says why."""


def _assess(question: Question) -> Answer:
    """The verdict on a claim's setting.

    Raises:
        _NoPoolsError: there are no bytes to compute with.
    """
    answer = assess(question)
    if answer.rank is None or not answer.rank.pools:
        raise _NoPoolsError(why_no_pools(answer))
    return answer


def _setting(question: Question, setting: Mapping[str, Any]) -> Question:
    if "size_gb" in setting:
        return with_size(question, setting["size_gb"])
    return with_ratio(question, setting["ratio"])


def _named(setting: Mapping[str, Any]) -> str:
    return f"--hicache-size {setting['size_gb']}" if "size_gb" in setting else f"--hicache-ratio {setting['ratio']:g}"


def _product(answer: Answer) -> str:
    return (
        f"{count_ranks(answer.ranks_on_host)} × {format_gb(answer.per_rank_bytes)} = {format_gb(answer.host_bytes, 1)}"
    )


def _within(value: float, claimed: float, tolerance: float) -> Status:
    return "agrees" if abs(value - claimed) <= tolerance * abs(claimed) else "differs"


def _size_is_host_total(case: Case, inputs: Inputs) -> Outcome:
    answer = _assess(with_size(case.question(), inputs["size_gb"]))
    return _within(answer.host_bytes / GB, inputs["size_gb"], 0.01), f"per rank: {_product(answer)}"


def _host_total(case: Case, inputs: Inputs) -> Outcome:
    answer = _assess(_setting(case.question(), inputs["setting"]))
    return _within(answer.host_bytes / GB, inputs["claimed_gb"], inputs["within"]), _product(answer)


def _tokens_of_size(case: Case, inputs: Inputs) -> Outcome:
    answer = _assess(with_size(case.question(), inputs["size_gb"]))
    assert answer.rank is not None
    pool = answer.rank.pools[0]
    formula = int(inputs["size_gb"] * 1e9 // pool.spec.bytes_per_token)
    text = f"{formula:,} by the formula; {answer.question.rules.version} makes {pool.tokens:,} ({pool.pages:,} pages)"
    return "agrees" if formula == pool.tokens else "differs", text


def _concurrency(case: Case, inputs: Inputs) -> Outcome:
    tokens, mean, requests = case.value("device_tokens"), inputs["mean_tokens"], inputs["requests"]
    fit = tokens // mean
    text = f"{tokens:,} ÷ {mean:,} = {fit}; {requests} at a time means {tokens // requests:,} tokens each"
    return "agrees" if fit >= requests else "differs", text


def _host_tier_adds_concurrency(case: Case, inputs: Inputs) -> Outcome:
    fit = case.value("device_tokens") // inputs["mean_tokens"]
    text = (
        f"{fit} of {inputs['mean_tokens']:,} tokens fit, with or without a host tier: a running request needs device "
        "tokens; the host tier keeps prefixes for reuse and saves their prefill"
    )
    return "agrees" if fit >= inputs["requests"] else "differs", text


def _guard_is_per_process(case: Case, _inputs: Inputs) -> Outcome:
    question = case.question()
    if question.budget().divides:
        return "differs", f"{question.rules.version} divides the free memory by the ranks on the host first"
    return (
        "agrees",
        f"{question.rules.version}: requested ≤ available − {RESERVE_TEXT}, in each process, "
        "nothing booked between them",
    )


def _all_ranks_pass(case: Case, inputs: Inputs) -> Outcome:
    question = with_size(case.question(), inputs["size_gb"])
    answer = _assess(question)
    if not answer.orders:
        return "cannot be checked", "; ".join(answer.missing)
    limit = question.limit_bytes or 0
    together, apart = answer.orders
    if together.passes and apart.passes:
        return "agrees", "in any order"
    if not together.passes:
        if together.refusal is None:
            return "differs", kill_in_words(together, limit)
        return "differs", f"the first rank is refused: {together.refusal.message}"
    budget = question.budget()
    slack = (budget.budget_bytes - answer.per_rank_bytes) * budget.divisor
    end = kill_in_words(apart, limit)
    if apart.refusal is not None:
        end = f'one after another, rank {(apart.refusal.rank or 0) + 1} is refused: "{apart.refusal.message}"'
    return "holds if", f"all read the memory before {format_gb(slack)} had become resident; {end}"


def _sum_of_facts(case: Case, inputs: Inputs) -> Outcome:
    parts = [case.value(name) for name in inputs["parts"]]
    whole, unit = case.value(inputs["whole"]), case.facts[inputs["whole"]].unit
    text = f"{' + '.join(f'{part:g}' for part in parts)} = {sum(parts):g} of {whole:g} {unit}"
    return "agrees" if abs(sum(parts) - whole) <= inputs["within"] else "differs", text


def _leaves_the_reserve(case: Case, inputs: Inputs) -> Outcome:
    answer = _assess(_setting(case.question(with_overhead=True), inputs["setting"]))
    over = answer.over_reserve_bytes or 0
    taken = format_gb(answer.resident_bytes + answer.question.overhead_bytes, 0)
    text = (
        f"{taken} of {case.value('available_gb'):g} GB taken, {format_gb(answer.margin_bytes or 0, 1)} left, "
        f"{format_gb(over, 1)} beyond the reserve: {answer.verdict}"
    )
    status: Status = "differs"
    if over >= 0:
        status = "agrees" if answer.verdict in ("FITS", "TIGHT") else "holds if"
    if answer.verdict == "RACE" and answer.refusal is not None:
        text += f"; refused when the ranks check one after another (rank {(answer.refusal.rank or 0) + 1})"
    return status, text


def _largest_size(case: Case, inputs: Inputs) -> Outcome:
    most, comfortable = bound(case), recommended(case).size_gb
    if most.size_gb is None:
        answer = assess(with_size(case.question(with_overhead=True), inputs["size_gb"]))
        if not answer.ranks:
            return "cannot be checked", why_no_pools(answer)
        return "differs", f"no size leaves the {RESERVE_TEXT} reserve"
    total = format_gb(most.size_bytes or 0, 0)
    text = f"{most.size_gb} GB leaves the {RESERVE_TEXT} reserve, in whatever order the ranks check ({total} in all)"
    if comfortable is not None:
        text += f"; {comfortable} GB keeps 10 % of RAM besides"
    return "agrees" if most.size_gb == inputs["size_gb"] else "differs", text


def _settings_are_equal(case: Case, inputs: Inputs) -> Outcome:
    answers = [_assess(_setting(case.question(), setting)) for setting in inputs["settings"]]
    tokens = [answer.rank.tokens if answer.rank else 0 for answer in answers]
    text = "; ".join(
        f"{_named(setting)}: {format_gb(answer.host_bytes, 1)}, {held:,} tokens a rank"
        for setting, answer, held in zip(inputs["settings"], answers, tokens, strict=True)
    )
    return _within(answers[0].host_bytes, answers[1].host_bytes, 0.01), text


def _tokens_add_up(case: Case, inputs: Inputs) -> Outcome:
    question = case.question()
    answer = _assess(_setting(question, inputs["setting"]))
    assert answer.rank is not None
    if question.geometry.latent is None:
        return "agrees", f"each rank holds its own heads of the same {answer.rank.tokens:,} tokens"
    text = (
        f"{answer.rank.tokens:,} distinct tokens: the latent KV is replicated, so the {answer.ranks_on_host} ranks "
        "hold the same ones"
    )
    return "differs", text


def _factor(case: Case, inputs: Inputs) -> Outcome:
    before = case.value(inputs["before"])
    low, high = (case.value(name) / before for name in inputs["after"])
    least, most = inputs["claimed"]
    inside = low >= least and high <= most
    return "agrees" if inside else "differs", f"{low:.2f}–{high:.2f} times"


def _release_refuses(case: Case, inputs: Inputs) -> Outcome:
    answer = assess(with_size(with_release(case.question(), inputs["release"]), inputs["size_gb"]))
    refused = answer.verdict == "REFUSED" and answer.refusal is not None and answer.refusal.allowed_bytes is not None
    if not refused or answer.refusal is None or answer.refusal.allowed_bytes is None:
        if not answer.ranks:
            raise _NoPoolsError(f"{inputs['release']}: {why_no_pools(answer)}")
        return "differs", f"{inputs['release']}: {answer.verdict}"
    status = _within(answer.refusal.allowed_bytes / GB, inputs["claimed_gb"], 0.0005)
    return status, f'{inputs["release"]}: "{answer.refusal.message}"'


def _auto_size(case: Case, inputs: Inputs) -> Outcome:
    question = with_release(case.question(), inputs["release"])
    answer = assess(replace(question, config=replace(question.config, hicache_size=None, hicache_ratio=None)))
    if answer.ratio is None:
        return "cannot be checked", why_no_pools(answer)
    same = _within(answer.ratio, inputs["claimed_ratio"], 0.0005) == _within(
        answer.host_bytes / GB, inputs["claimed_gb"], 0.001
    )
    text = f"{inputs['release']}: ratio {answer.ratio:g}, {_product(answer)}, {answer.verdict}"
    agrees = same and _within(answer.ratio, inputs["claimed_ratio"], 0.0005) == "agrees"
    return "agrees" if agrees else "differs", text


def _outside(_case: Case, inputs: Inputs) -> Outcome:
    return "cannot be checked", str(inputs["why"])


CHECKS: Mapping[str, Check] = {
    "size_is_host_total": _size_is_host_total,
    "host_total": _host_total,
    "tokens_of_size": _tokens_of_size,
    "concurrency": _concurrency,
    "host_tier_adds_concurrency": _host_tier_adds_concurrency,
    "guard_is_per_process": _guard_is_per_process,
    "all_ranks_pass": _all_ranks_pass,
    "sum_of_facts": _sum_of_facts,
    "leaves_the_reserve": _leaves_the_reserve,
    "largest_size": _largest_size,
    "settings_are_equal": _settings_are_equal,
    "tokens_add_up": _tokens_add_up,
    "factor": _factor,
    "release_refuses": _release_refuses,
    "auto_size": _auto_size,
    "outside": _outside,
}
