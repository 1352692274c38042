"""A verdict in words: one word, the arithmetic, what each side believes, what will not help, what to do.

The same block stands in the terminal, in the notebooks and in the report.
"""

from __future__ import annotations

from hicache_lab.base.units import GB, format_both, format_gb, format_gib
from hicache_lab.preflight.answer import Advice, Answer
from hicache_lab.preflight.orders import Order
from hicache_lab.preflight.question import Question
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.guard import RESERVE_TEXT, divides_since, rank_budget

_WORTH_SAYING = 0.001  # an index buffer's extra page is not


def _amount(n_bytes: float) -> str:
    """GB with decimals only where they say something."""
    return f"{n_bytes / GB:,.0f} GB" if abs(n_bytes) >= 1000 * GB else format_gb(n_bytes)


def count_ranks(number: int) -> str:
    """``1 rank``, ``8 ranks``."""
    return "1 rank" if number == 1 else f"{number} ranks"


def _place(question: Question) -> str:
    return "container" if question.container_binds else "host"


def headline(answer: Answer) -> str:
    """The word and the arithmetic that leads to it."""
    question, rank = answer.question, answer.rank
    if rank is None or not rank.pools:
        if answer.refusal is not None:
            return f"{answer.verdict}  {why_no_pools(answer)}"
        if answer.verdict == "FITS":
            return "FITS  0 bytes of host pools"
        return f"{answer.verdict}  missing: {'; '.join(answer.missing)}"
    by = "--hicache-size is per rank" if answer.size_gb is not None else f"--hicache-ratio {answer.ratio:g} is per rank"
    ranks = count_ranks(answer.ranks_on_host)
    total = f"{ranks} × {format_gb(rank.requested_bytes)} = {_amount(answer.host_bytes)}"
    if len({one.requested_bytes for one in answer.ranks}) > 1:
        total = (
            f"{answer.ranks_on_host} ranks, up to {format_gb(rank.requested_bytes)} each = {_amount(answer.host_bytes)}"
        )
    line = f"{answer.verdict}  {by}: {total} ({format_gib(answer.host_bytes, 0)})"
    if abs(answer.resident_bytes - answer.host_bytes) > _WORTH_SAYING * answer.host_bytes:
        line += f", {format_both(answer.resident_bytes)} really taken"
    if question.host is not None:
        line += f"; this {_place(question)} has {format_gb(question.host.effective_available_bytes, 0)} available"
    return line


def _beliefs(answer: Answer) -> list[str]:
    """What one rank sees when it checks, before any other has taken memory."""
    question, rank = answer.question, answer.rank
    if question.host is None or rank is None or not rank.pools:
        return []
    budget, pool = question.budget(), rank.pools[0]
    passes = pool.requested_bytes <= budget.budget_bytes
    end = "is refused"
    if passes:
        end = f"passes, {answer.ranks_on_host} times if they sample together" if answer.ranks_on_host > 1 else "passes"
    asks = f"{format_gb(pool.requested_bytes)} {'≤' if passes else '>'} {format_gb(budget.budget_bytes)}"
    lines = [f"each rank checks alone ({question.rules.version}): {asks} ({budget.text}) → {end}"]
    free = budget.available_bytes
    true_free = question.limit_bytes
    if true_free is not None and true_free < free:
        lines.append(
            f"the check does not see the container: it reads {format_gb(free)}, the limit leaves {format_gb(true_free)}"
        )
    return lines


def why_no_pools(answer: Answer) -> str:
    """Why an answer has no bytes to compute with: what the server stops at, or the facts that are missing."""
    if answer.refusal is not None:
        return f"{answer.refusal.flag}: {answer.refusal.message}"
    return "; ".join(answer.missing) or "; ".join(answer.warnings) or "no host pools are built"


def _order_line(order: Order) -> str:
    if order.refusal is None:
        return f"checking {order.name}: every rank passes"
    refusal, number = order.refusal, (order.refusal.rank or 0) + 1
    free = "" if refusal.allowed_bytes is None else f", {format_gb(refusal.allowed_bytes)} allowed"
    return f"checking {order.name}: rank {number} is refused{free}"


def kill_in_words(order: Order, limit_bytes: int) -> str:
    """Which rank passes the limit in an order of the checks; empty where none does."""
    if order.killed_rank is None:
        return ""
    total = f"{_amount(order.resident_bytes)} of {format_gb(limit_bytes)}"
    return f"{order.name}: rank {order.killed_rank + 1} passes the limit ({total}) before any check refuses"


def _outcome(answer: Answer) -> list[str]:
    question, lines = answer.question, []
    if answer.verdict == "OOM_RISK":
        limit = question.limit_bytes or 0
        if limit <= 0:
            other = format_gb(question.overhead_bytes)
            return [f"the server's other memory ({other}) alone takes all that is available, before any host pool"]
        lines.append(
            f"the {_place(question)} is out of memory at about {format_gb(limit, 0)} resident; the kernel kills workers"
        )
        if len(answer.ranks) > 1:
            apart = answer.orders[1]
            end = kill_in_words(apart, limit)
            if not end:
                end = f"{_order_line(apart).removeprefix('checking ')}: a clean refusal"
            lines.append(f"if the ranks come {end}")
        lines.append("will not help: swap, --mem-fraction-static, another write policy")
    elif answer.verdict == "RACE":
        lines += [_order_line(order) for order in answer.orders]
        bound = answer.guaranteed_start_bytes
        if bound is not None:
            lines.append(f"a start is certain up to {format_gb(bound)} a rank, in whatever order the ranks check")
    elif answer.verdict in ("FITS", "TIGHT") and answer.ranks:
        over = answer.over_reserve_bytes or 0
        host = question.host
        whole, where = ("its limit", "in the container") if question.container_binds else ("RAM", "on the host")
        share = f" ({100 * answer.resident_bytes / host.effective_total_bytes:.0f} % of {whole})" if host else ""
        left = format_gb(answer.margin_bytes or 0)
        lines.append(f"left {where}: {left}, {format_gb(over)} beyond the {RESERVE_TEXT} reserve{share}")
    return lines


def format_advice(advice: Advice, quote: str = "") -> str:
    """The largest settings as flags to paste, with what all ranks of the host take; empty where there are none.

    Args:
        advice: the settings.
        quote: stands around each flag: "`" in Markdown.
    """
    choices = []
    if advice.size_gb is not None and advice.size_bytes is not None and advice.size_answer is not None:
        ranks = advice.size_answer.ranks_on_host
        total = f"{count_ranks(ranks)} {'takes' if ranks == 1 else 'take'} {format_gb(advice.size_bytes, 1)} in all"
        choices.append(f"{quote}--hicache-size {advice.size_gb}{quote} ({total})")
    if advice.ratio is not None and advice.ratio_bytes is not None:
        choices.append(f"{quote}--hicache-ratio {advice.ratio:g}{quote} ({format_gb(advice.ratio_bytes, 1)} in all)")
    return " or ".join(choices)


def _later(answer: Answer) -> list[str]:
    """What a later release would say about the same launch."""
    question, pool = answer.question, answer.rank.pools[0] if answer.rank and answer.rank.pools else None
    if answer.verdict != "OOM_RISK" or question.host is None or pool is None or question.budget().divides:
        return []
    since = divides_since()
    budget = rank_budget(rules_for(since), question.view())
    if pool.requested_bytes <= budget.budget_bytes:
        return []
    shown = f"{budget.shown_bytes / GB:.2f} GB"
    return [f'from {since} the server refuses this itself: "only have {shown} free" is one rank\'s share']


def explain(answer: Answer, advice: Advice | None = None) -> str:
    """The whole block.

    Args:
        answer: the verdict.
        advice: what to set instead, from :func:`hicache_lab.preflight.advise`.
    """
    details = [*_beliefs(answer), *_outcome(answer)]
    refusal = answer.refusal
    if refusal is not None and answer.verdict in ("REFUSED", "ASSERT"):
        details += [f'the server stops with {refusal.error}: "{refusal.message}"']
        details += [refusal.meaning] if refusal.meaning else []
    if advice is not None and answer.verdict != "FITS" and answer.question.host is not None:
        if settings := format_advice(advice):
            details.append(f"do: {settings}")
        elif refusal is not None and refusal.error == "argparse":
            details.append(f"do: correct or remove {refusal.flag} first; no size helps before")
        elif answer.ranks:
            details.append("do: no host tier of a useful size fits on this host")
    details += [
        *_later(answer),
        *(f"missing: {fact}" for fact in answer.missing),
        *(f"warning: {text}" for text in answer.warnings),
        *(f"assumed: {text}" for text in answer.notes),
    ]
    return "\n  ".join([headline(answer), *details])
