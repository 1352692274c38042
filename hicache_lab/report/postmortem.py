"""An incident written up: what happened, why, what shows it, what would have caught it, what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hicache_lab import __version__
from hicache_lab.casefile import Case, audit, levers, load_case
from hicache_lab.errors import HostError, InputError, UnknownFact, UsageError
from hicache_lab.figures.incident import incident_figure
from hicache_lab.geometry import load_geometry
from hicache_lab.host import HostMemory
from hicache_lab.incident import Diagnosis, Facts, diagnose, gather
from hicache_lab.incident.facts import Evidence, RunFacts, run_facts
from hicache_lab.incident.findings import Finding
from hicache_lab.incident.timeline import Moment, timeline
from hicache_lab.launch import parse_launch, parse_server_args, render
from hicache_lab.logs import events as ev
from hicache_lab.preflight import Advice, Answer, Question, advise, assess, corrected_line, explain
from hicache_lab.releases import first_release_with, rules_for
from hicache_lab.report.document import Bullets, Code, Document, FigureBlock, Heading, Paragraph, Room, Table
from hicache_lab.sizing.rank import DeviceFacts
from hicache_lab.units import GB, format_both, format_gb

_EXCERPT = 12
_SPARKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Postmortem:
    """Everything a postmortem is written from.

    Attributes:
        title: of the document.
        timezone: the zone of the logs' clock; the times are shown as printed.
        origin: measured, or reconstructed where the files were rebuilt.
        facts: what was gathered.
        diagnosis: ranked findings.
        moments: the timeline.
        case: the incident folder's own facts, if there is one.
        answer: what ``preflight`` says about the launch, if model, release and host are known.
        advice: what would have fitted.
        line: the launch line, for pasting.
        why_no_answer: what was missing for it.
    """

    title: str
    timezone: str
    origin: str
    facts: Facts
    diagnosis: Diagnosis
    moments: tuple[Moment, ...]
    case: Case | None = None
    answer: Answer | None = None
    advice: Advice | None = None
    line: str | None = None
    why_no_answer: str = ""
    files: tuple[tuple[str, str], ...] = field(default=())

    def document(self) -> Document:
        """The document, ready to edit."""
        document = Document(self.title)
        for part in (_head, _summary, _impact, _timeline, _cause, _evidence, _factors, _caught, _actions, _unknown):
            part(self, document)
        return document


def postmortem(
    paths: str | Path | Sequence[str | Path],
    *,
    kernel_logs: Iterable[str] = (),
    memory: Iterable[str] = (),
    title: str = "",
    timezone: str = "UTC",
    host_ram_bytes: int | None = None,
    available_bytes: int | None = None,
    release: str | None = None,
) -> Postmortem:
    """Gather, diagnose and judge an incident.

    Args:
        paths: an incident folder (with incident.json, or with logs whose names tell what they are), the name of one
            that ships, or server logs.
        kernel_logs: dmesg, journald, syslog; added to those of the folder.
        memory: memory series; added to those of the folder.
        title: of the document; by default the folder's or the first finding's.
        timezone: IANA name of the zone of the logs' clock.
        host_ram_bytes: RAM of the host, if the files do not tell.
        available_bytes: memory available before the launch, if the files do not tell.
        release: the SGLang release, if it is known.

    Raises:
        InputError: a file is missing or not what it should be, or nothing in the logs comes from SGLang.
        UsageError: an unknown time zone.
    """
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise UsageError(f"timezone: expected an IANA name such as UTC or Europe/Berlin, got {timezone!r}") from error
    given = [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]
    case = _case(given)
    logs, kernels, series = _files(given, case)
    facts = gather(
        logs,
        kernel_logs=[*kernels, *kernel_logs],
        memory=[*series, *memory],
        host_ram_bytes=host_ram_bytes or _stated(case, "host_ram_gb"),
        available_bytes=available_bytes,
        release=release or (str(case.facts["sglang_version"].value) if case and "sglang_version" in case.facts else None),
        stated_by="incident.json" if case and host_ram_bytes is None else "stated",
    )
    diagnosis = diagnose(facts)
    first = diagnosis.first
    question, line, why = _question(facts, case, diagnosis)
    answer = assess(question) if question is not None else None
    return Postmortem(
        title=title or (case.title if case else first.cause.replace("_", " ") if first else "no finding"),
        timezone=timezone,
        origin=case.files_origin if case else "measured",
        facts=facts,
        diagnosis=diagnosis,
        moments=tuple(timeline(facts)),
        case=case,
        answer=answer,
        advice=advise(question) if question is not None else None,
        line=line,
        why_no_answer=why,
        files=tuple(
            (Path(path).name, what)
            for what, paths_of in (("server log", logs), ("kernel log", [*kernels, *kernel_logs]), ("memory series", [*series, *memory]))
            for path in paths_of
        ),
    )


def _case(given: list[str]) -> Case | None:
    if len(given) != 1:
        return None
    path = Path(given[0])
    if (path / "incident.json").exists() or not path.exists():
        return load_case(given[0])
    return None


def _stated(case: Case | None, name: str) -> int | None:
    return round(float(case.facts[name].value) * GB) if case is not None and name in case.facts else None


def _files(given: list[str], case: Case | None) -> tuple[list[str], list[str], list[str]]:
    if case is not None:
        found = {kind: str(path) for kind, path in case.files.items() if path.exists()}
        if "server_log" not in found:
            raise InputError(f"{case.folder}: the incident has no server log; files.server_log in incident.json names it")
        return [found["server_log"]], *([found[kind]] if kind in found else [] for kind in ("kernel_log", "memory"))
    if len(given) == 1 and Path(given[0]).is_dir():
        names = sorted(path for path in Path(given[0]).iterdir() if path.is_file() and not path.name.startswith("."))
        kernels = [str(p) for p in names if any(word in p.name.lower() for word in ("kernel", "dmesg", "kern.log", "journal"))]
        series = [str(p) for p in names if any(word in p.name.lower() for word in ("memory", "meminfo", "vmstat", "free", "watch")) or p.suffix == ".csv"]
        logs = [str(p) for p in names if str(p) not in (*kernels, *series) and any(s in p.name for s in (".log", ".txt", ".out"))]
        if not logs:
            raise InputError(f"{given[0]}: no server log in this folder; name the log file itself")
        return logs, kernels, series
    return given, [], []


def _question(facts: Facts, case: Case | None, diagnosis: Diagnosis) -> tuple[Question | None, str | None, str]:
    """What preflight would have been asked, the launch line, and what is missing for it."""
    if case is not None:
        return case.question(with_overhead="overhead_gb" in case.facts), case.launch, ""
    index = diagnosis.first.run if diagnosis.first else 1
    seen = next((one for one in run_facts(facts) if one.run.index == index), None)
    args = next(seen.run.of(ev.ServerArgs), None) if seen is not None else None
    if seen is None or args is None:
        return None, None, "the log does not show the server's arguments"
    try:
        config = parse_server_args(args.text)
    except InputError as error:
        return None, None, str(error)
    release = facts.stated_release or (seen.run.releases.last if seen.run.releases else None)
    line = render(config)
    if release is None:
        return None, line, "the log's wording does not tell the release (--sglang-version states it)"
    host = _host(seen)
    if host is None:
        return None, line, "the host's memory is not in the files (--host-ram and --available state it)"
    config = replace(config, sglang_version=release)
    try:
        geometry = load_geometry(str(config.model))
    except (UnknownFact, InputError) as error:
        return None, line, f"the model's shape is not known: {error}"
    question = Question(
        config=config,
        geometry=geometry,
        rules=rules_for(release),
        host=host,
        device=DeviceFacts(tokens=seen.run.device_tokens),
    )
    return question, line, ""


def _host(seen: RunFacts) -> HostMemory | None:
    total, available = seen.facts.total, seen.available
    if total is None and available is None:
        return None
    both = [amount.bytes for amount in (total, available) if amount is not None]
    return HostMemory.stated(total_bytes=max(both), available_bytes=available.bytes if available else both[0])


def _head(post: Postmortem, document: Document) -> None:
    runs = post.facts.log.runs
    times = [at for run in runs for at in (run.first, run.last) if at is not None]
    first = post.diagnosis.first
    rows = [
        ("when", f"{min(times):%Y-%m-%d %H:%M:%S} – {max(times):%H:%M:%S} ({post.timezone}, as printed)" if times else "the logs carry no time"),
        ("root cause", f"{first.cause} ({first.confidence} confidence)" if first else "none found"),
        ("release", _release(post)),
        ("files", "; ".join(f"{name} ({what}, {post.origin})" for name, what in post.files)),
        ("written by", f"hicache-lab {__version__} from these files; edit freely"),
        ("reviewed by", "…"),
    ]
    document.add(Table(("", ""), tuple(rows)))
    if post.origin != "measured":
        document.add(
            Paragraph(
                f"The files are {post.origin}: they were rebuilt from what people reported, and the figures read from them are too."
            )
        )


def _release(post: Postmortem) -> str:
    if post.case is not None and "sglang_version" in post.case.facts:
        fact = post.case.facts["sglang_version"]
        return f"{fact.value} ({fact.origin})"
    shown = next((seen.release for seen in run_facts(post.facts)), "not known")
    return shown if post.facts.stated_release else f"{shown} (from the log's wording)"


def _summary(post: Postmortem, document: Document) -> None:
    document.add(Heading("Summary"))
    first = post.diagnosis.first
    if first is None:
        document.add(
            Paragraph(
                f"No cause was found. {post.diagnosis.recognised_lines:,} statements were recognised in "
                f"{post.diagnosis.lines:,} lines; what was looked for is listed under “What is not known”."
            )
        )
    else:
        document.add(Paragraph(first.explanation), Paragraph(f"What to do: {first.remedy}.{_comfortable(post)}"))
    document.add(Room("In two sentences for readers who do not run inference servers:"))


def _comfortable(post: Postmortem) -> str:
    advice = post.advice
    if advice is None or advice.size_gb is None or post.answer is None or post.answer.verdict == "FITS":
        return ""
    ratio = f" or --hicache-ratio {advice.ratio:g}" if advice.ratio is not None else ""
    return f" With room to spare besides (as hicache-lab max advises): --hicache-size {advice.size_gb}{ratio}."


def _impact(post: Postmortem, document: Document) -> None:
    document.add(Heading("Impact"))
    rows = []
    for seen in run_facts(post.facts):
        run = seen.run
        ready = run.milestone("ready")
        state = f"ready at {ready.at:%H:%M:%S}" if ready and ready.at else "never ready"
        if run.batches.prefill or run.batches.decode:
            state = f"served {run.batches.prefill:,} prefill and {run.batches.decode:,} decode batches"
        ended = len(seen.kills) or len(seen.deaths)
        rows.append((str(run.index), state, f"{ended} killed" if ended else "none killed", f"{run.counts['retraction']}"))
    document.add(Table(("launch", "state", "processes", "retractions"), tuple(rows)))
    low = post.facts.lowest_left()
    if low is not None and low.left_bytes is not None:
        used = f", {format_gb(low.in_use_bytes)} in use" if low.in_use_bytes is not None else ""
        document.add(Paragraph(f"Least memory left: {format_gb(low.left_bytes)}{used} ({post.origin}, {Path(low.where.file).name}:{low.where.line})."))
    document.add(Room("Who was affected, for how long, and what it cost:"))


def _timeline(post: Postmortem, document: Document) -> None:
    document.add(Heading("Timeline"))
    figure = incident_figure(post.facts, post.moments, source=post.origin)
    if figure is not None:
        document.add(FigureBlock(figure, f"Times in {post.timezone}, as printed; {post.origin}.", _sketch(post.facts)))
    rows = []
    for moment in post.moments:
        when = f"{moment.at:%H:%M:%S}" if moment.at else "no time"
        quote = f": {moment.quote}" if moment.quote else ""
        rows.append((when, moment.source, f"{moment.what}{quote}", _place(moment.evidence)))
    document.add(Table((f"time ({post.timezone})", "who says so", "what", "where"), tuple(rows)))
    if post.case is not None and post.case.timeline:
        document.add(Heading("As people told it", 3))
        steps = tuple((str(moment.step), moment.what, moment.origin) for moment in post.case.timeline)
        document.add(Table(("step", "what", "origin"), steps))
    document.add(Room("Decisions and hand-overs that no log shows:"))


def _sketch(facts: Facts) -> str:
    used = [s.in_use_bytes for s in facts.memory if s.in_use_bytes is not None]
    total = facts.total
    if len(used) < 2 or total is None:
        return ""
    step = max(len(used) // 60, 1)
    picked = used[::step]
    bars = "".join(_SPARKS[min(round(value / total.bytes * (len(_SPARKS) - 1)), len(_SPARKS) - 1)] for value in picked)
    return f"memory in use, 0 … {format_gb(total.bytes, 0)}\n{bars}\n{format_gb(used[0], 0)} at first, {format_gb(max(used), 0)} at most"


def _place(evidence: Evidence) -> str:
    return f"{Path(evidence.file).name}:{evidence.line}"


def _cause(post: Postmortem, document: Document) -> None:
    document.add(Heading("Root cause"))
    first = post.diagnosis.first
    if first is None:
        document.add(Paragraph("Not shown by these files."))
        return
    document.add(Paragraph(f"{first.cause} ({first.confidence} confidence). {first.explanation}"))
    seen = next(one for one in run_facts(post.facts) if one.run.index == first.run)
    rows = _arithmetic(seen, post.origin)
    if rows:
        document.add(Heading("The arithmetic", 3), Table(("what", "amount", "from"), rows))
    if post.answer is not None:
        document.add(
            Paragraph("What the check and the host see, computed from the launch line by the same rules as hicache-lab preflight:"),
            Code(explain(post.answer, post.advice)),
        )


def _arithmetic(seen: RunFacts, origin: str) -> tuple[tuple[str, str, str], ...]:
    rows: list[tuple[str, str, str]] = []
    ranks = seen.run.ranks
    if seen.size_gb and ranks:
        total = round(seen.size_gb * GB * ranks)
        rows.append(("asked by one rank", f"{seen.size_gb:g} GB", "--hicache-size"))
        rows.append(("asked by all", f"{ranks} × {seen.size_gb:g} GB = {format_both(total)}", "computed"))
    elif seen.run.host_pools:
        rows.append(("asked by all ranks shown", format_both(seen.run.host_bytes), f"log, {origin}"))
        if seen.run.projected_host_bytes != seen.run.host_bytes:
            rows.append(("asked by all", format_both(seen.run.projected_host_bytes), "computed: ranks not shown taken alike"))
    for refusal in list(seen.run.of(ev.HostRefusal))[:1]:
        if refusal.requested_bytes is not None and refusal.free_bytes is not None:
            text = f"{format_gb(refusal.requested_bytes)} asked, {format_gb(refusal.free_bytes)} free"
            rows.append(("refused", text, f"log, {origin}"))
    if seen.available is not None:
        rows.append(("available when the pools were asked for", format_gb(seen.available.bytes), seen.available.source))
        rows.append(("less the reserve of 10 GiB", format_gb(seen.available.bytes - seen.reserve_bytes), "computed"))
    for name, amount in (("RAM of the host", seen.facts.total), ("the container's limit", seen.facts.container_limit)):
        if amount is not None:
            rows.append((name, format_gb(amount.bytes), amount.source))
    if seen.run.device_tokens:
        rows.append(("device tokens of one rank", f"{seen.run.device_tokens:,}", f"log, {origin}"))
    return tuple(rows)


def _evidence(post: Postmortem, document: Document) -> None:
    document.add(Heading("Evidence"))
    for finding in post.diagnosis.findings:
        document.add(Heading(f"{finding.cause} ({finding.role}, {finding.confidence} confidence)", 3))
        lines = [f"{_place(evidence)}  {evidence.text}" for evidence in finding.evidence[:_EXCERPT]]
        more = len(finding.evidence) - _EXCERPT
        document.add(Code("\n".join([*lines, *([f"… and {more} more lines"] if more > 0 else [])])))
    if not post.diagnosis.findings:
        document.add(Paragraph("None."))


def _factors(post: Postmortem, document: Document) -> None:
    document.add(Heading("Contributing factors and consequences"))
    rest = [finding for finding in post.diagnosis.findings[1:]]
    if rest:
        document.add(Table(("what", "role", "explanation"), tuple((f.cause, f.role, f.explanation) for f in rest)))
    document.add(Room("How the people involved came to believe what they believed (documentation, help texts, habits):"))


def _caught(post: Postmortem, document: Document) -> None:
    document.add(Heading("What would have caught it"))
    if post.answer is None:
        document.add(Paragraph(f"hicache-lab preflight, before the launch. It cannot be shown here: {post.why_no_answer}."))
        return
    question, config = post.answer.question, post.answer.question.config
    words = ["hicache-lab", "preflight", "--sglang-version", str(config.sglang_version)]
    if question.host is not None:
        words += ["--host-ram", f"{question.host.total_bytes / GB:g}GB", "--available", f"{question.host.available_bytes / GB:g}GB"]
    if question.overhead_bytes:
        words += ["--overhead", f"{question.overhead_bytes / GB:g}GB"]
    if question.device.tokens:
        words += ["--device-tokens", str(question.device.tokens)]
    document.add(
        Paragraph(f"One command before the launch. It answers {post.answer.verdict}; exit code 3 stops a start script:"),
        Code(" ".join(shlex.quote(word) for word in words) + f" \\\n    -- {post.line}"),
    )
    since = first_release_with("guard_divides_by_ranks", True)
    if not question.rules.guard_divides_by_ranks:
        document.add(Paragraph(f"A server of {since} or later refuses such a launch by itself: its check divides by the ranks on the host."))


def _actions(post: Postmortem, document: Document) -> None:
    document.add(Heading("Action items"))
    causes = [finding for finding in post.diagnosis.findings if finding.role != "consequence"]
    rows = [(f"{number}", remedy, "…", "…") for number, remedy in enumerate(_remedies(causes), 1)]
    rows.append((f"{len(rows) + 1}", "run hicache-lab preflight in the start script, before the server", "…", "…"))
    rows.append((f"{len(rows) + 1}", "keep a memory series for the next time: hicache-lab watch --sglang --output watch.jsonl", "…", "…"))
    document.add(Table(("", "what", "who", "until"), tuple(rows)))
    if post.answer is not None and post.advice is not None:
        config = parse_launch(post.line) if post.case is not None and post.line else post.answer.question.config
        corrected = corrected_line(post.answer, post.advice, config)
        if corrected:
            document.add(Paragraph("The launch line corrected, with room to spare:"), Code(corrected))
    if post.case is not None:
        _levers(post.case, document)


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


def _levers(case: Case, document: Document) -> None:
    """Other ways to the goal: a postmortem that only resizes the host pool has not looked at all of them."""
    rows = [(lever.flag, lever.since, f"{lever.device_tokens:,}" if lever.device_tokens else "–", lever.what) for lever in levers(case)]
    document.add(Heading("Other levers", 3), Table(("flag", "since", "device tokens", "what it does"), tuple(rows)))
    if (case.folder / "claims.json").exists():
        claims = tuple((str(result.step), result.claim, result.status, result.recomputed) for result in audit(case))
        document.add(Heading("Conclusions of the time, computed again", 3), Table(("step", "claim", "status", "recomputed"), claims))


def _unknown(post: Postmortem, document: Document) -> None:
    document.add(Heading("What is not known"))
    items = list(post.case.not_known) if post.case is not None else []
    if post.facts.total is None:
        items.append("how much RAM the host has")
    if not post.facts.memory:
        items.append("memory over time: no series was given")
    if not post.facts.kernel:
        items.append("what the kernel did: no kernel log was given")
    if post.why_no_answer:
        items.append(f"what preflight would have said: {post.why_no_answer}")
    assumed = [name for name, fact in post.case.facts.items() if fact.origin == "assumed"] if post.case else []
    if assumed:
        items.append(f"assumed, because nobody said: {', '.join(assumed)}")
    document.add(Bullets(tuple(items) or ("nothing that the rules ask for",)))
    missing = tuple((cause, looks_for) for cause, looks_for in post.diagnosis.not_found())
    document.add(Paragraph("Looked for in these files and not found:"), Table(("cause", "what would have shown it"), missing))
    document.add(Room("Open questions:"))


def write_report(document: Document, folder: Path, name: str = "postmortem") -> tuple[Path, Path]:
    """Write ``NAME.md`` and ``NAME.html``; each appears whole or not at all.

    Raises:
        HostError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in ((".md", document.to_markdown()), (".html", document.to_html())):
            path = folder / f"{name}{suffix}"
            part = path.with_name(path.name + ".part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)
            written.append(path)
    except OSError as error:
        raise HostError(f"{folder}: cannot be written: {error.strerror}; choose another --output folder") from error
    return written[0], written[1]
