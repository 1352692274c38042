"""Everything known about an incident in one place: runs, kernel lines, memory samples, what people said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hicache_lab.base.errors import UsageError
from hicache_lab.base.units import format_gb
from hicache_lab.forensics.incident.folder import Files, sort_files
from hicache_lab.forensics.incident.kernel import KernelLog, read_kernel_log
from hicache_lab.forensics.incident.kills import same_kill, server_like
from hicache_lab.forensics.incident.memory import MemoryReading, lowest, read_memory
from hicache_lab.forensics.incident.oom_reports import once
from hicache_lab.forensics.incident.question import Stated
from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.collect import Log, read_log
from hicache_lab.preflight.ask import HOST_FACTS, host_from_facts
from hicache_lab.sglang.releases import rules_for


@dataclass(frozen=True, slots=True)
class Evidence:
    """A line that shows something; its text is untrusted."""

    file: str
    line: int
    text: str

    @classmethod
    def of(cls, event: ev.Event | MemoryReading) -> Evidence:
        """The line an event or a sample stands in."""
        prefix = event.prefix if isinstance(event, ev.Event) else ""
        return cls(event.where.file, event.where.line, f"{prefix}{event.text}"[:400])


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes with where it comes from."""

    bytes: int
    source: str
    evidence: tuple[Evidence, ...] = ()

    def __str__(self) -> str:
        return f"{format_gb(self.bytes)} ({self.source})"


@dataclass(frozen=True)
class Facts:
    """What a diagnosis may use: the files of an incident, and what the user says beside them."""

    log: Log
    kernel: tuple[KernelLog, ...] = ()
    memory: tuple[MemoryReading, ...] = ()
    stated: Stated = field(default_factory=Stated)

    @cached_property
    def kills(self) -> list[ev.KernelOom]:
        """Kernel kills in all logs given."""
        mixed = [event for event in self.log.events() if isinstance(event, ev.KernelOom)]
        kills = [kill for log in self.kernel for kill in log.kills] + mixed
        own = [kill for kill in kills if kill.reporter is None and server_like(kill.comm)]
        kept = (kill for kill in kills if kill.reporter is None or not any(same_kill(kill, one) for one in own))
        return once(kept)

    @property
    def total(self) -> Amount | None:
        """RAM of the host."""
        if self.stated.host_ram_bytes is not None:
            return Amount(self.stated.host_ram_bytes, self.stated.by)
        for sample in self.memory:
            if sample.total_bytes is not None:
                return Amount(sample.total_bytes, "memory samples", (Evidence.of(sample),))
        for log in self.kernel:
            if log.ram_bytes is not None:
                return Amount(log.ram_bytes, "the kernel's report", (Evidence.of(log.evidence["ram"]),))
        return None

    @property
    def container_limit(self) -> Amount | None:
        """The smallest memory limit of a control group that anything here shows."""
        if self.stated.cgroup_limit_bytes is not None:
            return Amount(self.stated.cgroup_limit_bytes, self.stated.by)
        found = []
        for log in self.kernel:
            if log.cgroup_limit_bytes is not None:
                shown = (Evidence.of(log.evidence["cgroup_limit"]),)
                found.append(Amount(log.cgroup_limit_bytes, log.cgroup_limit_source, shown))
        for sample in self.memory:
            if sample.cgroup_limit_bytes is not None:
                found.append(Amount(sample.cgroup_limit_bytes, "memory samples", (Evidence.of(sample),)))
                break
        return min(found, key=lambda amount: amount.bytes, default=None)

    @property
    def hugepages(self) -> Amount | None:
        """Reserved huge pages that nobody uses: memory that is there and that MemAvailable does not count."""
        if self.stated.hugepages_bytes is not None:
            return Amount(self.stated.hugepages_bytes, self.stated.by)
        for sample in self.memory:
            if sample.hugepages_free_bytes:
                return Amount(sample.hugepages_free_bytes, "memory samples", (Evidence.of(sample),))
        for log in self.kernel:
            if log.hugepages_free_bytes:
                return Amount(
                    log.hugepages_free_bytes, "the kernel's report", (Evidence.of(log.evidence["hugepages"]),)
                )
        return None

    def lowest_left(self) -> MemoryReading | None:
        """The sample with the least memory left."""
        return lowest(self.memory, lambda sample: sample.left_bytes)


def gather(logs: Iterable[str], *, kernel_logs: Iterable[str] = (), memory: Iterable[str] = (), **stated: Any) -> Facts:
    """Read everything that belongs to an incident.

    Args:
        logs: server logs; kernel logs and memory series among them are told apart by their content.
        kernel_logs: dmesg, journald, syslog.
        memory: memory series.
        **stated: what the user says beside the files, by the fields of ``Stated``, e.g. ``host_ram_bytes=449 * GB,
            release="0.5.8"``; without a release the wording of the lines says which it can be.

    Raises:
        InputError: a file cannot be read or has no known form.
        UnknownFact: a release that is none.
        UsageError: stated facts that contradict each other.
    """
    user = Stated(**stated)
    if user.release is not None:
        rules_for(user.release)
    _check_stated(user)
    files = sort_files(logs)
    # a kernel log alone is diagnosed too
    sorted_files = files if files.logs else Files(logs=(*files.kernel_logs, *files.memory))
    log = read_log(sorted_files.logs)
    year = next((run.first.year for run in log.runs if run.first is not None), None)
    kernel_paths = dict.fromkeys((*kernel_logs, *sorted_files.kernel_logs))
    facts = Facts(
        log=log,
        kernel=tuple(read_kernel_log(path, year=year) for path in kernel_paths),
        memory=tuple(s for path in dict.fromkeys((*memory, *sorted_files.memory)) for s in read_memory(path)),
        stated=user,
    )
    if user.cgroup_usage_bytes is not None and facts.container_limit is None:
        raise UsageError("--cgroup-usage says nothing without --cgroup-limit")
    return facts


def _check_stated(user: Stated) -> None:
    """What is stated is held to itself as ``plan`` holds it; only what files tell may disagree a little."""
    stated = {name: getattr(user, f"{name}_bytes") for name in HOST_FACTS}
    if user.cgroup_limit_bytes is None:
        del stated["cgroup_usage"]
    if user.host_ram_bytes is not None or user.available_bytes is not None:
        host_from_facts(stated)
