"""The sections of a postmortem."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from hicache_lab import __version__
from hicache_lab.base.units import GB, format_both, format_gb
from hicache_lab.forensics.cases import Case, alternatives, audit
from hicache_lab.forensics.incident import Facts
from hicache_lab.forensics.incident.diagnosis import also_in
from hicache_lab.forensics.incident.facts import Evidence
from hicache_lab.forensics.incident.findings import Finding
from hicache_lab.forensics.incident.launches import RunFacts, run_facts
from hicache_lab.preflight import assess, corrected_line, explain, with_release
from hicache_lab.sglang.launch import parse_launch
from hicache_lab.sizing.guard import RESERVE_TEXT, beyond_reserve_bytes, divides_since
from hicache_lab.views.figures.incident import incident_figure
from hicache_lab.views.report.document import Document
from hicache_lab.views.report.postmortem import Postmortem

_EXCERPT = 12
_SPARKS = " ▁▂▃▄▅▆▇█"


def to_document(post: Postmortem) -> Document:
    """The document, ready to edit."""
    document = Document(post.title)
    for part in (_head, _summary, _impact, _timeline, _cause, _evidence, _factors, _caught, _actions, _unknown):
        part(post, document)
    return document


def _head(post: Postmortem, document: Document) -> None:
    runs = post.facts.log.runs
    times = [at for run in runs for at in (run.first, run.last) if at is not None]
    first, launch = post.diagnosis.first, post.diagnosis.first_launch
    if post.case is not None and "sglang_version" in post.case.facts:
        fact = post.case.facts["sglang_version"]
        release = f"{fact.value} ({fact.origin})"
    else:
        release = next((one.release for one in run_facts(post.facts)), "not known")
        release += "" if post.facts.stated.release else " (from the log's wording)"
    rows = [
        ("outcome", launch.outcome if launch is not None else "no launch in these files"),
        (
            "when",
            f"{min(times):%Y-%m-%d %H:%M:%S} – {_clock(max(times), times)} ({post.timezone}, as printed)"
            if times
            else "the logs carry no time",
        ),
        (
            "risk" if post.diagnosis.only_risks else "root cause",
            f"{first.cause} ({first.confidence} confidence)" if first else "none found",
        ),
        ("release", release),
        ("files", "; ".join(f"{name} ({what}, {post.origin})" for name, what in post.files)),
        ("written by", f"hicache-lab {__version__} from these files; edit freely"),
        ("reviewed by", "…"),
    ]
    document.table(("", ""), rows)
    if post.origin != "measured":
        document.paragraph(
            f"The files are {post.origin}: they were rebuilt from what people reported, "
            "and the figures read from them are too."
        )


def _summary(post: Postmortem, document: Document) -> None:
    document.heading("Summary")
    first = post.diagnosis.first
    if first is None:
        document.paragraph(
            f"No cause was found. {post.diagnosis.recognised_lines:,} statements were recognised in "
            f"{post.diagnosis.lines:,} lines; what was looked for is listed under “What is not known”."
        )
    else:
        document.paragraph(first.explanation)
        document.paragraph(f"What to do: {first.remedy}.")
    document.room("In two sentences for readers who do not run inference servers:")


def _impact(post: Postmortem, document: Document) -> None:
    document.heading("Impact")
    rows = []
    times = [at for run in post.facts.log.runs for at in (run.first, run.last) if at is not None]
    for seen in run_facts(post.facts):
        run = seen.run
        ready = run.milestone("ready")
        state = f"ready at {_clock(ready.at, times)}" if ready and ready.at else "never ready"
        if run.batches.prefill or run.batches.decode:
            state = f"served {run.batches.prefill:,} prefill and {run.batches.decode:,} decode batches"
        ended = len(seen.kills) or len(seen.deaths)
        rows.append(
            (str(run.index), state, f"{ended} killed" if ended else "none killed", f"{run.counts['retraction']}")
        )
    document.table(("launch", "state", "processes", "retractions"), rows)
    low = post.facts.lowest_left()
    if low is not None and low.left_bytes is not None:
        used = f", {format_gb(low.in_use_bytes)} in use" if low.in_use_bytes is not None else ""
        document.paragraph(
            f"Least memory left: {format_gb(low.left_bytes)}{used} ({post.origin}, "
            f"{Path(low.where.file).name}:{low.where.line})."
        )
    document.room("Who was affected, for how long, and what it cost:")


def _timeline(post: Postmortem, document: Document) -> None:
    document.heading("Timeline")
    figure = incident_figure(post.facts, post.moments, source=post.origin)
    if figure is not None:
        document.figure(figure, f"Times in {post.timezone}, as printed; {post.origin}.", _sketch(post.facts))
    rows = []
    times = [moment.at for moment in post.moments if moment.at]
    for moment in post.moments:
        when = _clock(moment.at, times) if moment.at else "no time"
        quote = f": {moment.quote}" if moment.quote else ""
        rows.append((when, moment.source, f"{moment.what}{quote}", _place(moment.evidence)))
    document.table((f"time ({post.timezone})", "who says so", "what", "where"), rows)
    if post.case is not None and post.case.timeline:
        document.heading("As people told it", 3)
        steps = tuple((str(moment.step), moment.what, moment.origin) for moment in post.case.timeline)
        document.table(("step", "what", "origin"), steps)
    document.room("Decisions and hand-overs that no log shows:")


def _clock(at: datetime, among: Sequence[datetime]) -> str:
    """The time of day; with its date where the times are of several days."""
    return f"{at:%H:%M:%S}" if len({one.date() for one in among}) < 2 else f"{at:%Y-%m-%d %H:%M:%S}"


def _sketch(facts: Facts) -> str:
    used = [s.in_use_bytes for s in facts.memory if s.in_use_bytes is not None]
    total = facts.total
    if len(used) < 2 or total is None:
        return ""
    step = max(len(used) // 60, 1)
    picked = used[::step]
    bars = "".join(_SPARKS[min(round(value / total.bytes * (len(_SPARKS) - 1)), len(_SPARKS) - 1)] for value in picked)
    return (
        f"memory in use, 0 … {format_gb(total.bytes, 0)}\n{bars}\n{format_gb(used[0], 0)} at first, "
        f"{format_gb(max(used), 0)} at most"
    )


def _place(evidence: Evidence) -> str:
    return f"{Path(evidence.file).name}:{evidence.line}"


def _cause(post: Postmortem, document: Document) -> None:
    document.heading("Root cause")
    first = post.diagnosis.first
    if first is None:
        document.paragraph("Not shown by these files.")
        return
    risk = "Nothing failed in these files; this is a risk. " if post.diagnosis.only_risks else ""
    document.paragraph(f"{risk}{first.cause} ({first.confidence} confidence). {first.explanation}")
    launch = post.diagnosis.first_launch
    rows = _arithmetic(launch, post) if launch is not None else ()
    if rows:
        document.heading("The arithmetic", 3)
        document.table(("what", "amount", "from"), rows)
    if post.answer is not None:
        document.paragraph(
            "What the check and the host see, computed from the launch line by the same rules as hicache-lab preflight:"
        )
        document.code(explain(post.answer, post.advice))


def _arithmetic(launch: RunFacts, post: Postmortem) -> tuple[tuple[str, str, str], ...]:
    rows: list[tuple[str, str, str]] = []
    run, ranks, in_log = launch.run, launch.run.ranks, f"log, {post.origin}"
    if launch.size_gb and ranks:
        total = round(launch.size_gb * GB * ranks)
        rows.append(("asked by one rank", f"{launch.size_gb:g} GB", "--hicache-size"))
        rows.append(("asked by all", f"{ranks} × {launch.size_gb:g} GB = {format_both(total)}", "computed"))
    elif run.host_pools:
        rows.append(("asked by all ranks shown", format_both(run.host_bytes), in_log))
        if run.projected_host_bytes != run.host_bytes:
            projected = format_both(run.projected_host_bytes)
            rows.append(("asked by all", projected, "computed: ranks not shown taken alike"))
    if post.answer is not None and post.answer.resident_bytes > post.answer.host_bytes:
        rows.append(("really taken by all", format_both(post.answer.resident_bytes), "computed"))
    for refusal in launch.refusals[:1]:
        if refusal.requested_bytes is not None and refusal.free_bytes is not None:
            text = f"{format_gb(refusal.requested_bytes)} asked, {format_gb(refusal.free_bytes)} free"
            rows.append(("refused", text, in_log))
    if (available := launch.available) is not None:
        room = format_gb(beyond_reserve_bytes(available.bytes))
        rows.append(("available when the pools were asked for", format_gb(available.bytes), available.source))
        rows.append((f"less the reserve of {RESERVE_TEXT}", room, "computed"))
    for name, amount in (
        ("RAM of the host", post.facts.total),
        ("the container's limit", post.facts.container_limit),
    ):
        if amount is not None:
            rows.append((name, format_gb(amount.bytes), amount.source))
    if run.device_tokens:
        rows.append(("device tokens of one rank", f"{run.device_tokens:,}", in_log))
    return tuple(rows)


def _evidence(post: Postmortem, document: Document) -> None:
    document.heading("Evidence")
    for finding, others in post.diagnosis.grouped():
        launch = f", launch {finding.run}{also_in(others)}" if len(post.facts.log.runs) > 1 else ""
        document.heading(f"{finding.cause} ({finding.role}, {finding.confidence} confidence{launch})", 3)
        lines = [f"{_place(evidence)}  {evidence.text}" for evidence in finding.evidence[:_EXCERPT]]
        more = len(finding.evidence) - _EXCERPT
        document.code("\n".join([*lines, *([f"… and {more} more lines"] if more > 0 else [])]))
    if not post.diagnosis.findings:
        document.paragraph("None.")


def _factors(post: Postmortem, document: Document) -> None:
    document.heading("Contributing factors and consequences")
    rest = [finding for finding, _ in post.diagnosis.grouped()][1:]
    if rest:
        document.table(("what", "role", "explanation"), ((f.cause, f.role, f.explanation) for f in rest))
    document.room("How the people involved came to believe what they believed (documentation, help texts, habits):")


def _caught(post: Postmortem, document: Document) -> None:
    document.heading("What would have caught it")
    if post.answer is None:
        document.paragraph(f"hicache-lab preflight, before the launch. It cannot be shown here: {post.why_no_answer}.")
        return
    document.paragraph(
        f"One command before the launch. It answers {post.answer.verdict}; exit code 3 stops a start script:"
    )
    document.code(" ".join(shlex.quote(word) for word in _preflight_words(post)) + f" \\\n    -- {post.line}")
    later = divides_since()
    refused = assess(with_release(post.answer.question, later)).verdict == "REFUSED"
    if refused and post.answer.verdict != "REFUSED":
        document.paragraph(
            f"A server of {later} or later refuses such a launch by itself: its check divides by the ranks on the host."
        )


def _preflight_words(post: Postmortem) -> list[str]:
    """The preflight command that is asked the same question."""
    assert post.answer is not None
    question, stated = post.answer.question, post.facts.stated
    host, device = question.host, question.device
    cgroup = host.cgroup if host is not None else None
    words = ["hicache-lab", "preflight", "--sglang-version", str(question.rules.version)]
    for flag, n_bytes in (
        ("--host-ram", host.total_bytes if host else None),
        ("--available", host.available_bytes if host else None),
        ("--cgroup-limit", cgroup.limit_bytes if cgroup else None),
        ("--cgroup-usage", (cgroup.usage_bytes or None) if cgroup else None),
        ("--overhead", question.overhead_bytes or None),
    ):
        if n_bytes is not None:
            words += [flag, f"{n_bytes / GB:.15g}GB"]
    for flag, fact in (
        ("--device-tokens", device.tokens),
        ("--swa-device-tokens", device.swa_tokens),
        ("--mamba-slots", device.mamba_slots),
        ("--model", stated.model),
        ("--draft-model", stated.draft_model),
    ):
        if fact is not None:
            words += [flag, str(fact)]
    return words


def _actions(post: Postmortem, document: Document) -> None:
    document.heading("Action items")
    causes = [finding for finding, _ in post.diagnosis.grouped() if finding.role != "consequence"]
    rows = [(f"{number}", remedy, "…", "…") for number, remedy in enumerate(_remedies(causes), 1)]
    rows.append((f"{len(rows) + 1}", "run hicache-lab preflight in the start script, before the server", "…", "…"))
    rows.append(
        (
            f"{len(rows) + 1}",
            "keep a memory series for the next time: hicache-lab watch --sglang --output watch.jsonl",
            "…",
            "…",
        )
    )
    document.table(("", "what", "who", "until"), rows)
    if post.answer is not None and post.advice is not None:
        config = parse_launch(post.line) if post.case is not None and post.line else post.answer.question.config
        corrected = corrected_line(post.answer, post.advice, config)
        if corrected:
            document.paragraph("The launch line corrected, with room to spare:")
            document.code(corrected)
    if post.case is not None:
        _alternatives(post.case, document)


def _remedies(findings: Iterable[Finding]) -> list[str]:
    """Each remedy once; of one that only adds to another, what it adds."""
    said: list[str] = []
    for finding in findings:
        remedy = finding.remedy
        for earlier in said:
            remedy = remedy.removeprefix(earlier).lstrip("; ").removeprefix("or ")
        if remedy:
            said.append(remedy)
    return said


def _alternatives(case: Case, document: Document) -> None:
    """Other ways to the goal: a postmortem that only resizes the host pool has not looked at all of them."""
    rows = [
        (
            one.flag,
            one.since,
            f"{one.device_tokens:,}" if one.device_tokens else "–",
            one.what,
        )
        for one in alternatives(case)
    ]
    document.heading("Alternatives", 3)
    document.table(("flag", "since", "device tokens", "what it does"), rows)
    if (case.folder / "claims.json").exists():
        claims = tuple((str(result.step), result.claim, result.status, result.recomputed) for result in audit(case))
        document.heading("Conclusions of the time, computed again", 3)
        document.table(("step", "claim", "status", "recomputed"), claims)


def _unknown(post: Postmortem, document: Document) -> None:
    document.heading("What is not known")
    items = list(post.case.not_known) if post.case is not None else []
    if post.facts.total is None:
        items.append("how much RAM the host has")
    if not post.facts.memory:
        items.append("memory over time: no series was given")
    if not post.facts.kernel:
        items.append("what the kernel did: no kernel log was given")
    if post.diagnosis.warning:
        items.append(post.diagnosis.warning)
    if post.why_no_answer:
        items.append(f"what preflight would have said: {post.why_no_answer}")
    assumed = [name for name, fact in post.case.facts.items() if fact.origin == "assumed"] if post.case else []
    if assumed:
        items.append(f"assumed, because nobody said: {', '.join(assumed)}")
    document.bullets(tuple(items) or ("nothing that the rules ask for",))
    missing = tuple((cause, looks_for) for cause, looks_for in post.diagnosis.not_found())
    document.paragraph("Looked for in these files and not found:")
    document.table(("cause", "what would have shown it"), missing)
    document.room("Open questions:")
