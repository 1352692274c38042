"""An incident written up: what happened, why, what shows it, what would have caught it, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hicache_lab.base.errors import InputError, UnknownFact, UsageError
from hicache_lab.base.units import GB
from hicache_lab.forensics.cases import Case, load_case
from hicache_lab.forensics.incident import Diagnosis, Facts, diagnose, gather
from hicache_lab.forensics.incident.facts import RunFacts, run_facts
from hicache_lab.forensics.incident.folder import sort_files
from hicache_lab.forensics.incident.timeline import Moment, timeline
from hicache_lab.forensics.logs import events as ev
from hicache_lab.host import HostMemory
from hicache_lab.preflight import Advice, Answer, Question, advise, assess
from hicache_lab.sglang.launch import parse_server_args, render_launch
from hicache_lab.sglang.releases import rules_for
from hicache_lab.sizing.geometry import load_geometry
from hicache_lab.sizing.rank import DeviceFacts

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
        release=release
        or (str(case.facts["sglang_version"].value) if case and "sglang_version" in case.facts else None),
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
            for what, paths_of in (
                ("server log", logs),
                ("kernel log", [*kernels, *kernel_logs]),
                ("memory series", [*series, *memory]),
            )
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
            raise InputError(
                f"{case.folder}: the incident has no server log; files.server_log in incident.json names it"
            )
        kernels, series = ([found[kind]] if kind in found else [] for kind in ("kernel_log", "memory"))
        return [found["server_log"]], kernels, series
    files = sort_files(given)
    if not files.logs:
        raise InputError(f"{', '.join(given)}: no server log among these files; name the log file itself")
    return list(files.logs), list(files.kernel_logs), list(files.memory)


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
    line = render_launch(config)
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
