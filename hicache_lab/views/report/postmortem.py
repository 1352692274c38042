"""An incident written up: what happened, why, what shows it, what would have caught it, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from hicache_lab.base.errors import InputError, UsageError
from hicache_lab.base.units import GB
from hicache_lab.forensics.cases import Case, load_case
from hicache_lab.forensics.incident import Diagnosis, Facts, diagnose, gather
from hicache_lab.forensics.incident.folder import sort_files
from hicache_lab.forensics.incident.question import LaunchQuestion
from hicache_lab.forensics.incident.timeline import Moment, timeline
from hicache_lab.preflight import Advice, Answer
from hicache_lab.sglang.launch import render_launch


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
        asked: what ``preflight`` is asked about the launch, or what is missing for that.
        line: the launch line, for pasting.
    """

    title: str
    timezone: str
    origin: str
    facts: Facts
    diagnosis: Diagnosis
    moments: tuple[Moment, ...]
    files: tuple[tuple[str, str], ...]
    asked: LaunchQuestion
    case: Case | None = None
    line: str | None = None

    @property
    def answer(self) -> Answer | None:
        """What ``preflight`` says about the launch, if model, release and host are known."""
        return self.asked.answer

    @property
    def advice(self) -> Advice | None:
        """The largest settings that would have fitted with room to spare."""
        return self.asked.comfortable if self.asked.questions else None

    @property
    def why_no_answer(self) -> str:
        """What is missing for an answer; empty where there is one."""
        return "; ".join(self.asked.missing)


def postmortem(
    paths: str | Path | Sequence[str | Path],
    *,
    kernel_logs: Iterable[str] = (),
    memory: Iterable[str] = (),
    title: str = "",
    timezone: str = "UTC",
    **stated: Any,
) -> Postmortem:
    """Gather, diagnose and judge an incident.

    Args:
        paths: an incident folder (with incident.json, or with logs whose names tell what they are), the name of one
            that ships, or server logs.
        kernel_logs: dmesg, journald, syslog; added to those of the folder.
        memory: memory series; added to those of the folder.
        title: of the document; by default the folder's or the first finding's.
        timezone: IANA name of the zone of the logs' clock.
        **stated: what the user says beside the files, by the fields of ``Stated``, e.g. ``host_ram_bytes=449 * GB``.

    Raises:
        InputError: a file is missing or not what it should be, or nothing in the logs comes from SGLang.
        UsageError: an unknown time zone.
    """
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise UsageError(f"timezone: expected an IANA name such as UTC or Europe/Berlin, got {timezone!r}") from error
    targets = [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]
    case = _case(targets)
    logs, kernels, series = _files(targets, case)
    kernels, series = [*kernels, *kernel_logs], [*series, *memory]
    if case is not None:
        stated = _stated_by(case) | {name: value for name, value in stated.items() if value is not None}
    facts = gather(logs, kernel_logs=kernels, memory=series, **stated)
    diagnosis = diagnose(facts)
    first = diagnosis.first
    launch = diagnosis.first_launch
    line = case.launch if case else render_launch(launch.run.launch) if launch and launch.run.launch else None
    return Postmortem(
        title=title or (case.title if case else first.cause.replace("_", " ") if first else "no finding"),
        timezone=timezone,
        origin=case.files_origin if case else "measured",
        facts=facts,
        diagnosis=diagnosis,
        moments=tuple(timeline(facts)),
        files=tuple(
            (Path(path).name, what)
            for what, paths_of in (("server log", logs), ("kernel log", kernels), ("memory series", series))
            for path in paths_of
        ),
        asked=launch.question if launch else LaunchQuestion(missing=("a launch in the log",)),
        case=case,
        line=line,
    )


def _stated_by(case: Case) -> dict[str, Any]:
    """What an incident's facts say beside its files, the question among it."""
    stated: dict[str, Any] = {
        "by": "incident.json",
        "question": case.question(with_overhead="overhead_gb" in case.facts),
    }
    if "host_ram_gb" in case.facts:
        stated["host_ram_bytes"] = round(float(case.facts["host_ram_gb"].value) * GB)
    if "sglang_version" in case.facts:
        stated["release"] = str(case.facts["sglang_version"].value)
    return stated


def _case(targets: list[str]) -> Case | None:
    if len(targets) != 1:
        return None
    path = Path(targets[0])
    if (path / "incident.json").exists() or not path.exists():
        return load_case(targets[0])
    return None


def _files(targets: list[str], case: Case | None) -> tuple[list[str], list[str], list[str]]:
    if case is not None:
        found = {kind: str(path) for kind, path in case.files.items() if path.exists()}
        if "server_log" not in found:
            raise InputError(
                f"{case.folder}: the incident has no server log; files.server_log in incident.json names it"
            )
        kernels, series = ([found[kind]] if kind in found else [] for kind in ("kernel_log", "memory"))
        return [found["server_log"]], kernels, series
    files = sort_files(targets)
    if not files.logs:
        raise InputError(f"{', '.join(targets)}: no server log among these files; name the log file itself")
    return list(files.logs), list(files.kernel_logs), list(files.memory)
