"""Kills for memory as systemd, Kubernetes or Docker tell of them, for those who cannot see the kernel's own line.

What is read: ``kubectl describe pod``, ``kubectl get pod`` (also ``-o yaml`` and ``-o json``), ``kubectl get events``,
``docker inspect``, ``journalctl -u UNIT``. Only their own fields count, never a sentence that mentions them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from hicache_lab.base.times import in_utc, iso_time, parse_time
from hicache_lab.base.units import kubernetes_bytes
from hicache_lab.forensics.incident.document_outline import OUTLINED, Container, Level, Outline
from hicache_lab.forensics.logs.events import Event, KernelOom, SourceLine

_UNIT = re.compile(
    r"^(?:(?:(?!: ).)*\bsystemd(?:\[\d+\])?: )?(\S+\.(?:service|scope|slice)): "
    r"(?:(A process of this unit has been killed by the OOM killer|The kernel OOM killer killed some processes|"
    r"systemd-oomd killed .{1,9} process\(es\))|Failed with result 'oom-kill')"
)
_STATUS = re.compile(r"^\s*Active: \w+(?: \([\w-]+\))? \(Result: oom-kill\) since \w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_REASON = re.compile(
    r"^\s*(?:-\s+)?(?:Reason:\s+OOMKilled|\"?reason\"?:\s*\"?OOMKilled\"?)\s*(?:,\s*)?$"
)  # describe; yaml, json
# kubectl get pod, with -A and --output-watch-events: the pod and how often it was restarted
_TABLE = re.compile(r"^(?:\S+\s+){0,2}?(\S+)\s+\d+/\d+\s+(?:Init:)?OOMKilled\s+(\d+)\s")
# the kubelet's event about its node
_VICTIM = re.compile(r"System OOM encountered, victim process: (?P<comm>[^,]+), pid: (?P<pid>\d+)")
_DOCKER = re.compile(r"^\s*\"OOMKilled\":\s*true\s*(?:,\s*)?$")
_DOCKER_EVENT = re.compile(r"^\d{4}-\d\d-\d\dT\S+ container oom [0-9a-f]{12,64} \(")
_FINISHED = re.compile(r"^\s*(?:-\s+)?(?:Finished|\"?finishedAt\"?|\"FinishedAt\"):\s*\"?([^\"]+?)\"?\s*(?:,\s*)?$")
_MEMORY = re.compile(r"^\s*\"?memory\"?:\s*\"?(\d+(?:\.\d+)?)(|m|[kMGTPE]|[KMGTPE]i|[eE]\d{1,2})\"?\s*(?:,\s*)?$")
_HOST_MEMORY = re.compile(r"^\s*\"Memory\":\s*([1-9]\d*)\s*(?:,\s*)?$")
_ENDED = ("terminated", "State", "Last State")
_NAMES = {"systemd": "systemd", "kubernetes": "Kubernetes", "docker": "Docker"}
# lines between a reason and the time that belongs to it, where only these were copied
_NEAR_BEFORE, _NEAR_AFTER = 2, 8


def concerns(line: str) -> bool:
    """Whether a line can matter here at all: most of a kernel log cannot."""
    return "oom" in line or "OOM" in line or OUTLINED.match(line) is not None or line[1:8] == "inished"


def tells_of_a_kill(line: str) -> bool:
    """Whether a line is one of those fields."""
    return any(_teller(one) is not None for one in _lines(line))


def teller_of(kill: KernelOom) -> str | None:
    """``"Kubernetes"``, ``"systemd"`` or ``"Docker"``; None: the kernel's own line."""
    return _NAMES.get(kill.variant.rpartition(".")[2])


def once(kills: Iterable[KernelOom]) -> list[KernelOom]:
    """Kills without those that one teller tells of again in other words: in a table, in yaml, in a unit's status."""
    every, kept = list(kills), list[KernelOom]()
    for kill in every:
        others = kept if kill.at is not None else [one for one in every if one.at is not None]
        if teller_of(kill) is None or kill.pid is not None or not any(_says_again(kill, one) for one in others):
            kept.append(kill)
    return kept


def _says_again(kill: KernelOom, other: KernelOom) -> bool:
    if teller_of(kill) != teller_of(other) or _wording(kill) == _wording(other) or other.at is None:
        return False
    return kill.at is None or abs(kill.at - other.at) <= timedelta(seconds=2)


def _wording(kill: KernelOom) -> str:
    named = (_UNIT, _STATUS, _DOCKER_EVENT, _TABLE)
    return next((pattern.pattern for pattern in named if pattern.match(kill.text + " ")), kill.text)


@dataclass
class Told:
    """Reads the lines of one file in order.

    Attributes:
        limits: the containers' memory limits in bytes, with their lines and whose they are.
    """

    limits: list[tuple[int, Event, Container | None]] = field(default_factory=list)
    _kills: list[tuple[KernelOom, Container | None, Level | None]] = field(default_factory=list)
    _outline: Outline = field(default_factory=Outline)
    _finished: tuple[int, datetime, Level | None] | None = None
    _units: dict[str, str] = field(default_factory=dict)
    _rows: set[tuple[str, str]] = field(default_factory=set)

    def feed(self, line: str, where: SourceLine, at: datetime | None) -> None:
        """One line; ``at`` is the time it begins with, if it does."""
        for one in _lines(line):
            self._feed(one, where, at)

    @property
    def kills(self) -> list[KernelOom]:
        """What was told, in order; a time with a zone is given in UTC."""
        return once(kill for kill, _, _ in self._kills)

    @property
    def limit(self) -> tuple[int, Event] | None:
        """The limit of the container that was killed; None where nothing says whose is whose."""
        killed = {owner.key for _, owner, _ in self._kills if owner is not None}
        known = {one.key for one in self._outline.containers}
        if not killed and (len(known) > 1 or (known and self._kills)):
            return None
        found = [
            (size, event)
            for size, event, owner in self.limits
            if not killed or (owner is not None and owner.key in killed)
        ]
        return found[0] if len({size for size, _ in found}) == 1 else None

    def _feed(self, line: str, where: SourceLine, at: datetime | None) -> None:
        self._outline.feed(line)
        parent = self._outline.parent()
        self._limit(line, where, parent)
        if (match := _FINISHED.match(line)) is not None:
            self._time(match[1], where.line, parent)
        teller = _teller(line)
        if teller is None or not self._first_word(line):
            return
        if _REASON.match(line) and parent is not None and parent.key not in _ENDED:
            return
        if at is None and self._finished is not None:
            number, finished, scope = self._finished
            if scope is parent and (scope is not None or where.line - number <= _NEAR_BEFORE):
                at = finished
        if (status := _STATUS.match(line)) is not None:
            at = iso_time(status[1])
        if parent is None or not (_REASON.match(line) or _DOCKER.match(line)):
            owner = parent = None
        else:
            owner = self._outline.container
        victim = _VICTIM.search(line)
        kill = KernelOom(
            where=where,
            at=at,
            text=line.strip()[:500],
            variant=f"kernel_oom.{teller}",
            comm=victim["comm"] if victim else None,
            pid=int(victim["pid"]) if victim else None,
        )
        self._kills.append((kill, owner, parent))

    def _first_word(self, line: str) -> bool:
        if (row := _TABLE.match(line)) is not None:
            # kubectl get pod -w says it again
            again = (row[1], row[2]) in self._rows
            self._rows.add((row[1], row[2]))
            return not again
        if (match := _UNIT.search(line)) is None:
            # systemctl status ends with the journal's last lines
            self._units |= {"": "status"} if _STATUS.match(line) else {}
            return True
        # systemd says it when it happens, some releases in two ways, and as the reason of the unit's failure
        unit, words = match[1], match[2]
        if words is None:
            return [self._units.pop(unit, None), self._units.pop("", None)] == [None, None]
        said = self._units.setdefault(unit, words)
        return said == words and "" not in self._units

    def _time(self, text: str, number: int, scope: Level | None) -> None:
        at = _moment(text)
        # a container that runs has finished before
        if at is None or (scope is not None and scope.running):
            return
        self._finished = number, at, scope
        last, owner, killed = self._kills[-1] if self._kills else (None, None, None)
        if last is None or last.at is not None or killed is not scope:
            return
        if scope is not None or (_copied(last.text) and number - last.where.line <= _NEAR_AFTER):
            self._kills[-1] = replace(last, at=at), owner, killed

    def _limit(self, line: str, where: SourceLine, parent: Level | None) -> None:
        if parent is None:
            return
        size = None
        if parent.key in ("Limits", "limits") and (match := _MEMORY.match(line)) is not None:
            size = kubernetes_bytes(match[1] + match[2], "memory")
        elif parent.key == "HostConfig" and (match := _HOST_MEMORY.match(line)) is not None:
            size = int(match[1])
        if size is not None:
            self.limits.append((size, Event(where=where, text=line.strip()), self._outline.container))


def _copied(text: str) -> bool:
    return _REASON.match(text) is not None or _DOCKER.match(text) is not None


def _lines(line: str) -> list[str]:
    """json on one line (docker inspect -f '{{json .}}', jq -c) as the lines it has when printed with indents."""
    if line[:1] not in ("{", "[") or line[1:2] not in ("{", '"') or "OOMKilled" not in line:
        return [line]
    try:
        return json.dumps(json.loads(line), indent=4).split("\n")
    except (ValueError, RecursionError):
        return [line]


def _teller(line: str) -> str | None:
    # most lines are none of these: cheap tests before the exact ones
    if "oom" not in line and "OOM" not in line:
        return None
    if _UNIT.search(line) or _STATUS.match(line):
        return "systemd"
    if _DOCKER.match(line) or _DOCKER_EVENT.match(line):
        return "docker"
    return "kubernetes" if _REASON.match(line) or _TABLE.match(line + " ") or _VICTIM.search(line) else None


def _moment(text: str) -> datetime | None:
    """RFC 1123 (describe) or RFC 3339 (yaml, json, docker) → UTC without a zone; the year 1 stands for never."""
    at = parse_time(text)
    return in_utc(at) if at is not None and at.year > 1 else None
