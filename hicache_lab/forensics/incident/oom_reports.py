"""Kills for memory as systemd, Kubernetes or Docker report them, for those who cannot see the kernel's own line.

What is read: ``kubectl describe pod``, ``kubectl get pod`` (also ``-o yaml`` and ``-o json``), ``kubectl get events``,
``docker inspect``, ``docker events``, ``journalctl -u UNIT``, ``systemctl status``. Only their own fields count, never
a sentence that mentions them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import yaml

from hicache_lab.base.times import in_utc, iso_time, parse_time
from hicache_lab.forensics.incident.reported_documents import MOST_CHARACTERS, Key, compose, outline, read_document
from hicache_lab.forensics.logs.events import Event, KernelOom, SourceLine

_UNIT = re.compile(
    r"^(?:(?:(?!: ).)*\bsystemd(?:\[\d+\])?: )?(\S+\.(?:service|scope|slice)): "
    r"(?:(A process of this unit has been killed by the OOM killer|The kernel OOM killer killed some processes|"
    r"systemd-oomd killed .{1,9} process\(es\))|Failed with result 'oom-kill')"
)
_STATUS = re.compile(r"^\s*Active: \w+(?: \([\w-]+\))? \(Result: oom-kill\) since \w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
# a line of describe, yaml or json, copied without what stands around it
_REASON = re.compile(r"^\s*(?:-\s+)?(?:Reason:\s+OOMKilled|\"?reason\"?:\s*\"?OOMKilled\"?)\s*(?:,\s*)?$")
# kubectl get pod, with -A and --output-watch-events: the pod and how often it was restarted
_TABLE = re.compile(r"^(?:\S+\s+){0,2}?(\S+)\s+\d+/\d+\s+(?:Init:)?OOMKilled\s+(\d+)(?:\s|$)")
# the kubelet's event about its node
_VICTIM = re.compile(r"System OOM encountered, victim process: ([^,]+), pid: (\d{1,9})")
_DOCKER = re.compile(r"^\s*\"OOMKilled\":\s*true\s*(?:,\s*)?$")
_DOCKER_EVENT = re.compile(r"^\d{4}-\d\d-\d\dT\S+ container oom [0-9a-f]{12,64} \(")
_FINISHED = re.compile(r"^\s*(?:-\s+)?(?:Finished|\"?finishedAt\"?|\"FinishedAt\"):\s*\"?([^\"]+?)\"?\s*(?:,\s*)?$")
# docker inspect -f '{{json .}}', jq -c
_IN_ONE_LINE = re.compile(r'^[{\[].*"(?:OOMKilled":\s*true|reason":\s*"OOMKilled")')
_COPIED = (("reason", _REASON, "Kubernetes"), ("docker", _DOCKER, "Docker"))
# form, what it looks like, who reports it
_LINES = (
    ("unit", _UNIT, "systemd"),
    ("status", _STATUS, "systemd"),
    ("docker_event", _DOCKER_EVENT, "Docker"),
    ("table", _TABLE, "Kubernetes"),
    ("node_event", _VICTIM, "Kubernetes"),
)
_YAML_LINE = re.compile(r"$|[ #]|- |(?!Name:)[A-Za-z][\w.]*:")
# lines between a reason and the time that belongs to it, where only these were copied
_NEAR_BEFORE, _NEAR_AFTER = 2, 8

Form = tuple[str, re.Pattern[str], str]


def reports_a_kill(line: str) -> bool:
    """Whether a line is one of those fields."""
    return _match(line, (*_LINES, *_COPIED, ("document", _IN_ONE_LINE, ""))) is not None


def once(kills: Iterable[KernelOom]) -> list[KernelOom]:
    """Kills without those that one reporter reports again in another form: in a table, in yaml, in a unit's status."""
    every, kept = list(kills), list[KernelOom]()
    for kill in every:
        others = kept if kill.at is not None else [one for one in every if one.at is not None]
        if kill.reporter is None or kill.pid is not None or not any(_is_again(kill, one) for one in others):
            kept.append(kill)
    return kept


def _is_again(kill: KernelOom, other: KernelOom) -> bool:
    if kill.reporter != other.reporter or kill.variant == other.variant or other.at is None:
        return False
    return kill.at is None or abs(kill.at - other.at) <= timedelta(seconds=2)


def _match(line: str, forms: Iterable[Form]) -> tuple[str, re.Match[str], str] | None:
    # most lines are none of these: a cheap test before the exact ones
    if "oom" not in line and "OOM" not in line:
        return None
    for form, pattern, reporter in forms:
        if match := pattern.search(line):
            return form, match, reporter
    return None


@dataclass
class OomReports:
    """Reads the lines of one file in order; then ``close`` it.

    Attributes:
        kills: what was reported, in order; a time with a zone is given in UTC.
        limit: the memory limit in bytes of the container that was killed, with its line; None where nothing says whose
            is whose.
    """

    kills: list[KernelOom] = field(default_factory=list)
    limit: tuple[int, Event] | None = None
    # the document being read: yaml, json, or a description
    _form: str = ""
    _document: list[str] = field(default_factory=list)
    _begin: SourceLine | None = None
    _size: int = 0
    _limits: list[tuple[object, int, Event]] = field(default_factory=list)
    _containers: set[object] = field(default_factory=set)
    _killed: set[object] = field(default_factory=set)
    _finished: tuple[int, datetime] | None = None
    _units: dict[str, str] = field(default_factory=dict)
    _rows: set[tuple[str, str]] = field(default_factory=set)

    def feed(self, line: str, where: SourceLine, at: datetime | None) -> None:
        """One line; ``at`` is the time it begins with, if it does."""
        self._size += len(line)
        if self._size > MOST_CHARACTERS:
            self._end_document()
        if self._form == "json" or (self._form == "yaml" and _YAML_LINE.match(line)):
            self._document.append(line)
            if self._form == "json" and line[:1] in ("}", "]"):
                self._end_document()
            return
        is_one_line = _IN_ONE_LINE.match(line) is not None
        if is_one_line or line.rstrip() in ("{", "[", "[{"):
            self._begin_document("json", line, where)
            if is_one_line:
                self._end_document()
        elif line.startswith(("apiVersion:", "- apiVersion:")):
            self._begin_document("yaml", line, where)
        elif line.startswith("Name:"):
            self._begin_document("describe", line, where)
        elif self._form == "describe":
            self._document.append(line)
            self._line(line, where, at, _LINES)
        else:
            self._end_document()
            self._line(line, where, at, (*_LINES, *_COPIED))

    def close(self) -> None:
        """The file is at its end."""
        self._end_document()
        self.kills = once(sorted(self.kills, key=lambda kill: kill.where.line))
        if not self._killed and (len(self._containers) > 1 or (self._containers and self.kills)):
            return
        limits = [(size, event) for key, size, event in self._limits if not self._killed or key in self._killed]
        self.limit = limits[0] if len({size for size, _ in limits}) == 1 else None

    def _begin_document(self, form: str, line: str, where: SourceLine) -> None:
        self._end_document()
        self._form, self._document, self._begin, self._size = form, [line], where, len(line)

    def _end_document(self) -> None:
        form, lines, begin = self._form, self._document, self._begin
        self._form, self._document = "", []
        if begin is None or not lines:
            return
        try:
            document = read_document(outline(lines) if form == "describe" else compose("\n".join(lines)))
        except yaml.YAMLError:
            # cut, or too large: its lines still say something
            for number, line in enumerate(lines, begin.line):
                self._line(line, SourceLine(begin.file, number), None, (*_LINES, *_COPIED))
            return

        def line_of(number: int, key: str) -> Event:
            text = lines[number].strip()
            return Event(where=SourceLine(begin.file, begin.line + number), text=text if len(text) < 500 else key)

        def owner(key: Key | None) -> object:
            return key and (begin.line, key)

        self._containers |= {owner(key) for key in document.containers}
        self._limits += [(owner(key), size, line_of(number, "memory")) for key, size, number in document.limits]
        for node, at, key in document.kills:
            event = line_of(node.line, "OOMKilled")
            reporter = "Docker" if key is not None and not key[1] else "Kubernetes"
            self._killed |= {owner(key)} - {None}
            self.kills.append(
                KernelOom(where=event.where, at=at, text=event.text, variant=f"reported.{form}", reporter=reporter)
            )

    def _line(self, line: str, where: SourceLine, at: datetime | None, forms: Iterable[Form]) -> None:
        if (finished := _FINISHED.match(line)) is not None and forms != _LINES:
            self._time(finished[1], where.line)
        result = _match(line, forms)
        if result is None or not self._is_first(*result[:2]):
            return
        form, match, reporter = result
        if form in ("reason", "docker") and at is None and self._finished is not None:
            at = self._finished[1] if where.line - self._finished[0] <= _NEAR_BEFORE else None
        if form == "status":
            at = iso_time(match[1])
        kill = KernelOom(where=where, at=at, text=line.strip()[:500], variant=f"reported.{form}", reporter=reporter)
        self.kills.append(replace(kill, comm=match[1], pid=int(match[2])) if form == "node_event" else kill)

    def _is_first(self, form: str, match: re.Match[str]) -> bool:
        """Whether a kill is reported for the first time: kubectl get pod -w and systemd say it again."""
        if form == "table":
            row = (match[1], match[2])
            is_new = row not in self._rows
            self._rows.add(row)
            return is_new
        if form == "status":
            # systemctl status ends with the journal's last lines
            self._units[""] = "status"
        if form != "unit":
            return True
        # when it happens, in some releases in two ways, and as the reason of the unit's failure
        unit, words = match[1], match[2]
        if words is None:
            return [self._units.pop(unit, None), self._units.pop("", None)] == [None, None]
        return self._units.setdefault(unit, words) == words and "" not in self._units

    def _time(self, text: str, number: int) -> None:
        at = parse_time(text)
        at = in_utc(at) if at is not None and at.year > 1 else None
        if at is None:
            return
        self._finished = number, at
        last = self.kills[-1] if self.kills else None
        is_copied = last is not None and last.variant in ("reported.reason", "reported.docker")
        if last is not None and is_copied and last.at is None and number - last.where.line <= _NEAR_AFTER:
            self.kills[-1] = replace(last, at=at)
