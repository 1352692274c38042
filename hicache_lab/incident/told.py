"""Kills for memory as systemd, Kubernetes or Docker tell of them, for those who cannot see the kernel's own line.

What is read: ``kubectl describe pod``, ``kubectl get pod`` (also ``-o yaml`` and ``-o json``), ``kubectl get events``,
``docker inspect``, ``journalctl -u UNIT``. Only their own fields count, never a sentence that mentions them.
"""

from __future__ import annotations

import re
from bisect import bisect
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from hicache_lab.logs.events import Event, KernelOom, Where
from hicache_lab.units import GB, GIB, KB, KIB, MB, MIB, TB, TIB

_UNIT = re.compile(
    r"systemd(?:\[\d+\])?: (\S+): "
    r"(?:A process of this unit has been killed by the OOM killer|(Failed with result 'oom-kill'))"
)
_POD = re.compile(
    r"^\s*-?\s*(?:Reason:\s+OOMKilled|\"?reason\"?:\s*\"?OOMKilled\"?)\s*,?\s*$"  # describe; yaml and json
    r"|^(?:\S+\s+)?\S+\s+\d+/\d+\s+OOMKilled\s"  # the table of kubectl get pod
)
# the kubelet's event about its node
_VICTIM = re.compile(r"System OOM encountered, victim process: (?P<comm>[^,]+), pid: (?P<pid>\d+)")
_DOCKER = re.compile(r"^\s*\"OOMKilled\":\s*true\s*,?\s*$")
_FINISHED = re.compile(r"^\s*-?\s*(?:Finished|\"?finishedAt\"?|\"FinishedAt\"):\s*\"?([^\"]+?)\"?\s*,?\s*$")
_SECTION = re.compile(r"[A-Z]")
_CONTAINER = re.compile(r"^  [\w.-]+:\s*$")
_LIMITS = re.compile(r"^(\s*)-?\s*\"?[Ll]imits\"?:\s*\{?\s*$")
_MEMORY = re.compile(r"^(\s*)\"?memory\"?:\s*\"?(\d+)(|k|M|G|T|Ki|Mi|Gi|Ti)\"?\s*,?\s*$")
_FACTORS = {"": 1, "k": KB, "M": MB, "G": GB, "T": TB, "Ki": KIB, "Mi": MIB, "Gi": GIB, "Ti": TIB}
_NAMES = {"systemd": "systemd", "kubernetes": "Kubernetes", "docker": "Docker"}
# lines between a reason and the time that belongs to it: describe has three, docker inspect six
_NEAR_BEFORE, _NEAR_AFTER = 2, 8


def tells_of_a_kill(line: str) -> bool:
    """Whether a line is one of those fields."""
    return _teller(line) is not None


def teller_of(kill: KernelOom) -> str | None:
    """``"Kubernetes"``, ``"systemd"`` or ``"Docker"``; None: the kernel's own line."""
    return _NAMES.get(kill.variant.rpartition(".")[2])


@dataclass
class Told:
    """Reads the lines of one file in order.

    Attributes:
        kills: what was told, in order; a time with a zone is given in UTC.
        limits: the containers' memory limits in bytes, with their lines.
        described: the line at which ``kubectl describe`` begins each container.
    """

    kills: list[KernelOom] = field(default_factory=list)
    limits: list[tuple[int, Event]] = field(default_factory=list)
    described: list[int] = field(default_factory=list)
    _containers: bool = False
    _finished: tuple[int, datetime] | None = None
    _limits: tuple[int, int] | None = None
    _units: set[str] = field(default_factory=set)

    def feed(self, line: str, where: Where, at: datetime | None) -> None:
        """One line; ``at`` is the time it begins with, if it does."""
        if _SECTION.match(line):
            self._containers = line.rstrip() in ("Containers:", "Init Containers:")
        if self._containers and _CONTAINER.match(line):
            self.described.append(where.line)
        self._limit(line, where)
        if (match := _FINISHED.match(line)) is not None:
            self._time(match[1], where.line)
        teller = _teller(line)
        if teller is None or not self._first_word(line):
            return
        if at is None and self._finished is not None and where.line - self._finished[0] <= _NEAR_BEFORE:
            at = self._finished[1]
        victim = _VICTIM.search(line)
        self.kills.append(
            KernelOom(
                where=where,
                at=at,
                text=line.strip()[:500],
                variant=f"kernel_oom.{teller}",
                comm=victim["comm"] if victim else None,
                pid=int(victim["pid"]) if victim else None,
            )
        )

    @property
    def limit(self) -> tuple[int, Event] | None:
        """The limit of the container that was killed; None where several are listed and nothing says whose is whose."""
        if not self.described:
            return self.limits[0] if len({size for size, _ in self.limits}) == 1 else None
        killed = {self._container(kill) for kill in self.kills}
        return next((one for one in self.limits if self._container(one[1]) in killed), None)

    def _container(self, event: Event) -> int:
        return bisect(self.described, event.where.line)

    def _first_word(self, line: str) -> bool:
        # systemd says it twice: when it happens, and as the reason of the unit's failure
        match = _UNIT.search(line)
        if match is None:
            return True
        again = match[2] is not None and match[1] in self._units
        self._units.add(match[1])
        return not again

    def _time(self, text: str, number: int) -> None:
        at = _moment(text)
        if at is None:
            return
        self._finished = number, at
        last = self.kills[-1] if self.kills else None
        if last is not None and last.at is None and number - last.where.line <= _NEAR_AFTER:
            self.kills[-1] = replace(last, at=at)

    def _limit(self, line: str, where: Where) -> None:
        if (match := _LIMITS.match(line)) is not None:
            self._limits = where.line, len(match[1])
            return
        match = _MEMORY.match(line)
        if match is None or self._limits is None:
            return
        begun, depth = self._limits
        # the limits' own entries stand deeper and at once: requests have a memory too
        if where.line - begun > 6 or len(match[1]) <= depth:
            return
        self._limits = None
        self.limits.append((int(match[2]) * _FACTORS[match[3]], Event(where=where, text=line.strip())))


def _teller(line: str) -> str | None:
    if _UNIT.search(line):
        return "systemd"
    if _DOCKER.match(line):
        return "docker"
    return "kubernetes" if _POD.match(line) or _VICTIM.search(line) else None


def _moment(text: str) -> datetime | None:
    """RFC 1123 (describe) or RFC 3339 (yaml, json, docker) → UTC without a zone."""
    try:
        at = datetime.fromisoformat(text) if text[:1].isdigit() else parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo is not None and at.year > 1 else None
