"""What else could have been set: the launch as it was, the settings proposed afterwards, later releases."""

from __future__ import annotations

from dataclasses import replace

from hicache_lab.base.units import format_gb
from hicache_lab.forensics.cases.case import Case
from hicache_lab.preflight import Advice, Answer, advise, assess, with_ratio, with_release, with_size
from hicache_lab.sglang.releases import first_release_where, parse_version
from hicache_lab.sizing.guard import RESERVE_TEXT, divides_since


def counterfactuals(case: Case) -> dict[str, Answer]:
    """Named settings of the same model on the same host, each judged.

    The launch and later releases are judged from the reported available memory, as each rank would have seen it; the
    settings proposed afterwards also with the server's own memory, as an operator has to.
    """
    question, planned = case.question(), case.question(with_overhead=True)
    found = {f"as launched ({question.rules.version})": assess(question)}
    if "safe_size_gb" in case.facts:
        size = case.value("safe_size_gb")
        found[f"--hicache-size {size}"] = assess(with_size(planned, size))
    if "safe_ratio" in case.facts:
        ratio = case.value("safe_ratio")
        found[f"--hicache-ratio {ratio:g}"] = assess(with_ratio(planned, ratio))
    unsized = replace(question, config=replace(question.config, hicache_size=None, hicache_ratio=None))
    sizes_itself_since = first_release_where(lambda rules: rules.auto_size)
    for release, text, asked in (
        (divides_since(), "the same on {}", question),
        (sizes_itself_since, "neither flag on {}", unsized),
    ):
        if release is not None and parse_version(release) > parse_version(question.rules.version):
            found[text.format(release)] = assess(with_release(asked, release))
    return found


def advice(case: Case) -> tuple[Advice, Advice]:
    """The largest settings with 10 % of RAM to spare, and those that leave only the reserve; overhead counted."""
    question = case.question(with_overhead=True)
    return advise(question), advise(question, accepted=("FITS", "TIGHT"))


def conclusion(case: Case) -> str:
    """What happened and what to set, in Markdown, every number computed."""
    answer = assess(case.question())
    comfortable, just = advice(case)
    rank, limit = answer.rank, answer.question.limit_bytes or 0
    lines = [
        f"- **{answer.verdict}**: {answer.ranks_on_host} ranks × {format_gb(answer.per_rank_bytes)} = "
        f"**{format_gb(answer.host_bytes, 0)}**; the host had {format_gb(limit, 0)} available.",
    ]
    if rank is not None and rank.pools:
        lines.append(f"- Each rank's pool would have held {rank.tokens:,} tokens.")
    for text, found in (("with 10 % of RAM to spare", comfortable), (f"leaving only the {RESERVE_TEXT} reserve", just)):
        if found.size_gb is not None and found.ratio is not None:
            lines.append(
                f"- Largest settings {text}: `--hicache-size {found.size_gb}` "
                f"({format_gb(found.size_bytes or 0, 0)} in all) or `--hicache-ratio {found.ratio:g}` "
                f"({format_gb(found.ratio_bytes or 0, 0)} in all)."
            )
    return "\n".join(lines)
