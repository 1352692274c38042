"""What the kernel said about memory (dmesg, ``dmesg -T``, journald, syslog), or what others report of a kill."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime

from hicache_lab.base.times import ISO, epoch_time, iso_time, month_time
from hicache_lab.base.units import KIB
from hicache_lab.forensics.incident.oom_reports import OomReports
from hicache_lab.forensics.logs.assemble import Assembler
from hicache_lab.forensics.logs.events import Event, KernelOom, SourceLine
from hicache_lab.forensics.logs.reader import chunks

_UPTIME = re.compile(r"\[ *(\d+\.\d{3,})\]")
_DMESG_T = re.compile(r"\[[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) (\d{4})\]")
_SYSLOG = re.compile(r"^(?:<\d+>)?([A-Z][a-z]{2}) +(\d+) (\d\d:\d\d:\d\d) ")
_ISO = re.compile(ISO)
_LIMIT = re.compile(r"memory: usage (\d+)kB, limit (\d+)kB")
_HUGE = re.compile(r"hugepages_total=(\d+) hugepages_free=(\d+) .*?hugepages_size=(\d+)kB")
_PAGES = re.compile(r"\b(\d+) pages RAM\b")
_GROUP = re.compile(r"oom_memcg=([^,\s]+)")
_KILL = re.compile(r"((?:Memory cgroup out of memory|Out of memory): Kill(?:ed)? process .*)")
# kernels before 4.20 say what the process held in a line of its own
_HELD = re.compile(r"(?<!memory: )Killed process (\d+)(?:, UID \d+)?,? (\([^)]*\) total-vm:.*)")
_LINE = re.compile(
    r"^(?:<\d+>)?\[ *\d+\.\d{3,}\]|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} +\d+ \d\d:\d\d:\d\d \d{4}\]|\bkernel(?:\[\d+\])?: "
)
_PAGE = 4096
_SIZES = ("total_vm_bytes", "anon_rss_bytes", "file_rss_bytes", "shmem_rss_bytes")


@dataclass(frozen=True)
class KernelLog:
    """The kernel's statements about memory in one log, in its order.

    Attributes:
        kills: processes killed for memory; without one in the kernel's words, those that systemd, Kubernetes or Docker
            report.
        cgroup_limit_bytes: the limit of the group that was full, if it was a group's limit.
        cgroup_limit_source: who says so.
        cgroup_usage_bytes: what the group was charged then.
        cgroup: the group's path.
        hugepages_total_bytes: huge pages reserved, all nodes and sizes, as the first report lists them.
        hugepages_free_bytes: those among them that nobody used.
        ram_bytes: the host's RAM as the report counts it.
        evidence: the lines these facts stand in, by fact.
    """

    path: str
    kills: tuple[KernelOom, ...] = ()
    cgroup_limit_bytes: int | None = None
    cgroup_limit_source: str = "the kernel's report"
    cgroup_usage_bytes: int | None = None
    cgroup: str | None = None
    hugepages_total_bytes: int = 0
    hugepages_free_bytes: int = 0
    ram_bytes: int | None = None
    lines: int = 0
    evidence: dict[str, Event] = field(default_factory=dict)


def read_kernel_log(path: str, *, year: int | None = None) -> KernelLog:
    """Read a kernel log.

    Args:
        path: output of ``dmesg``, ``dmesg -T``, ``journalctl -k`` or ``-u``, ``kubectl describe pod``, ``docker
            inspect``, or /var/log/kern.log; may be compressed.
        year: the year of syslog times, which carry none; without it such lines have no time.

    Returns:
        The facts; a log without an out-of-memory report has no kills. Times since boot stay ``uptime_s``.

    Raises:
        InputError: unreadable.
    """
    log = KernelLog(path)
    kills: list[KernelOom] = []
    reports = OomReports()
    seen_huge: set[str] = set()
    number = known = 0
    for chunk in chunks(path):
        for raw in chunk.removesuffix(b"\n").split(b"\n"):
            number += 1
            line = journal_line(raw.decode("utf-8", "replace").rstrip("\r"))
            where = SourceLine(path, number)
            log = _facts(log, line, where, seen_huge if not kills else None)
            known += looks_like_kernel(line)
            reports.feed(line, where, _time(line, year)[0] if "oom" in line or "OOM" in line else None)
            if (match := _KILL.search(line)) is not None:
                at, uptime = _time(line, year)
                kills += [replace(kill, at=at, uptime_s=uptime, text=line.strip()) for kill in _kills(match[1], where)]
            elif kills and kills[-1].resident_bytes is None and (match := _HELD.search(line)) is not None:
                for held in _kills(f"Out of memory: Killed process {match[1]} {match[2]}", where):
                    if held.pid == kills[-1].pid:
                        kills[-1] = replace(kills[-1], **{name: getattr(held, name) for name in _SIZES})
    reports.close()
    kills = kills or reports.kills
    if number and not known and not kills:
        print(f"{path}: no line of it looks like the kernel's; give dmesg -T or journalctl -k", file=sys.stderr)
    if log.cgroup_limit_bytes is None and (limit := reports.limit) is not None:
        limit_bytes, log.evidence["cgroup_limit"] = limit
        log = replace(log, cgroup_limit_bytes=limit_bytes, cgroup_limit_source="the container's limits")
    return replace(log, kills=tuple(kills), lines=number)


def looks_like_kernel(line: str) -> bool:
    """Whether a line has the form of dmesg, ``dmesg -T`` or a journal's kernel line."""
    return _LINE.search(line) is not None


def journal_line(line: str) -> str:
    """A line of ``journalctl -o json`` as ``-o short-iso --utc`` prints it; any other as it is."""
    if line[:2] != '{"' or '"__REALTIME_TIMESTAMP"' not in line:
        return line
    try:
        entry = json.loads(line)
        at = epoch_time(int(entry["__REALTIME_TIMESTAMP"]) / 1e6)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return line
    if at is None:
        return line
    who = f"{entry.get('_HOSTNAME', '-')} {entry.get('SYSLOG_IDENTIFIER', '-')}"
    return f"{at:%Y-%m-%dT%H:%M:%S}+0000 {who}: {entry.get('MESSAGE')}"


def _kills(message: str, where: SourceLine) -> Iterator[KernelOom]:
    assembler = Assembler()
    for event in (*assembler.feed(message, where), *assembler.close()):
        if isinstance(event, KernelOom):
            yield event


def _facts(log: KernelLog, line: str, where: SourceLine, seen_huge: set[str] | None) -> KernelLog:
    note = Event(where=where, text=line.strip()[:500])
    if match := _LIMIT.search(line):
        log.evidence.setdefault("cgroup_limit", note)
        return replace(log, cgroup_usage_bytes=int(match[1]) * KIB, cgroup_limit_bytes=int(match[2]) * KIB)
    if match := _GROUP.search(line):
        log.evidence.setdefault("cgroup", note)
        return replace(log, cgroup=match[1])
    if match := _PAGES.search(line):
        log.evidence.setdefault("ram", note)
        return replace(log, ram_bytes=int(match[1]) * _PAGE)
    if seen_huge is not None and (match := _HUGE.search(line)):
        key = line[match.start() - 12 : match.start()] + match[3]
        if key not in seen_huge and int(match[1]):
            seen_huge.add(key)
            size = int(match[3]) * KIB
            log.evidence.setdefault("hugepages", note)
            total = log.hugepages_total_bytes + int(match[1]) * size
            return replace(
                log, hugepages_total_bytes=total, hugepages_free_bytes=log.hugepages_free_bytes + int(match[2]) * size
            )
    return log


def _time(line: str, year: int | None) -> tuple[datetime | None, float | None]:
    uptime = _UPTIME.search(line)
    at = None
    if match := _ISO.match(line):
        at = iso_time(match[1])
    elif match := _DMESG_T.search(line):
        at = month_time(match[4], match[1], match[2], match[3])
    elif year is not None and (match := _SYSLOG.match(line)):
        at = month_time(year, match[1], match[2], match[3])
    return at, float(uptime[1]) if uptime else None
