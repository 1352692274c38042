"""What else could have been set: the launch as it was, the settings proposed afterwards, later releases."""

from __future__ import annotations

from dataclasses import replace

from hicache_lab.base.units import format_gb
from hicache_lab.forensics.cases.case import Case
from hicache_lab.preflight import Advice, Answer, advise, assess, format_advice, with_ratio, with_release, with_size
from hicache_lab.preflight.text import count_ranks, why_no_pools
from hicache_lab.sglang.releases import first_release_where, parse_version
from hicache_lab.sizing.guard import RESERVE_TEXT, divides_since


def counterfactuals(case: Case) -> dict[str, Answer]:
    """Named settings of the same model on the same host, each judged.

    The launch and later releases are judged from the reported available memory, as each rank would have seen it; the
    settings proposed afterwards also with the server's own memory, as an operator has to.
    """
    question, planned = case.question(), case.question(with_overhead=True)
    answers = {f"as launched ({question.rules.version})": assess(question)}
    if "safe_size_gb" in case.facts:
        size = case.value("safe_size_gb")
        answers[f"--hicache-size {size}"] = assess(with_size(planned, size))
    if "safe_ratio" in case.facts:
        ratio = case.value("safe_ratio")
        answers[f"--hicache-ratio {ratio:g}"] = assess(with_ratio(planned, ratio))
    plain = replace(question, config=replace(question.config, hicache_size=None, hicache_ratio=None))
    for release, text, asked in (
        (divides_since(), "the same on {}", question),
        (first_release_where(lambda rules: rules.auto_size), "neither flag on {}", plain),
    ):
        if release is not None and parse_version(release) > parse_version(question.rules.version):
            answers[text.format(release)] = assess(with_release(asked, release))
    return answers


def recommended(case: Case) -> Advice:
    """The largest settings with 10 % of RAM to spare, the server's own memory counted: what to set."""
    return advise(case.question(with_overhead=True))


def bound(case: Case) -> Advice:
    """The largest settings that leave only the reserve, the server's own memory counted: what nobody may exceed."""
    return advise(case.question(with_overhead=True), accepted=("FITS", "TIGHT"))


def case_conclusion(case: Case) -> str:
    """What happened and what to set, in Markdown, every number computed."""
    answer = assess(case.question())
    setting, limit = format_advice(recommended(case), "`"), answer.question.limit_bytes or 0
    if answer.rank is None or not answer.rank.pools:
        lines = [f"- **{answer.verdict}**, before any host pool is built: {why_no_pools(answer)}."]
    else:
        lines = [
            f"- **{answer.verdict}**: {count_ranks(answer.ranks_on_host)} × {format_gb(answer.per_rank_bytes)} = "
            f"**{format_gb(answer.host_bytes, 0)}**; the host had {format_gb(limit, 0)} available.",
        ]
        lines.append(f"- Each rank's pool would have held {answer.rank.tokens:,} tokens.")
    if setting:
        lines.append(f"- **Set** {setting}: 10 % of RAM stay free beyond the reserve.")
    elif answer.ranks:
        lines.append("- **Set** no host tier: none leaves 10 % of RAM free beyond the reserve.")
    if most := format_advice(bound(case), "`"):
        lines.append(f"- The bound, for comparison: {most} leaves only the {RESERVE_TEXT} reserve.")
    return "\n".join(lines)
