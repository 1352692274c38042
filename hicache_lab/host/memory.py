"""What a host's memory really is: MemAvailable, huge pages, swap, control groups."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import KIB
from hicache_lab.host.cgroups import PROC, SYS, CgroupLevel, CgroupMemory, read_cgroup

_MEMINFO_LINE = re.compile(r"([^:]+):\s+(\d+)(?: (kB))?\s*")


@dataclass(frozen=True)
class HostMemory:
    """The memory facts of one host (or of one container on it).

    ``None`` means not known. ``available_bytes`` is MemAvailable, the number SGLang's check starts from;
    reserved huge pages are not in it. ``source`` says where the facts come from.
    """

    total_bytes: int
    available_bytes: int
    free_bytes: int | None = None
    shmem_bytes: int | None = None
    hugepages_reserved_bytes: int = 0
    hugepages_free_bytes: int = 0
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    cgroup: CgroupMemory | None = None
    notes: tuple[str, ...] = ()
    source: str = "stated"

    @classmethod
    def stated(
        cls,
        *,
        total_bytes: int,
        available_bytes: int | None = None,
        hugepages_bytes: int = 0,
        cgroup_limit_bytes: int | None = None,
        cgroup_usage_bytes: int | None = None,
    ) -> HostMemory:
        """Facts the user gave; ``available_bytes`` defaults to total − huge pages.

        Raises:
            UsageError: the facts contradict each other.
        """
        for flag, value, least in (
            ("--host-ram", total_bytes, 1),
            ("--available", available_bytes, 0),
            ("--hugepages", hugepages_bytes, 0),
            ("--cgroup-limit", cgroup_limit_bytes, 1),
            ("--cgroup-usage", cgroup_usage_bytes, 0),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag}: expected {least} bytes or more, got {value}")
        for flag, value in (("--available", available_bytes), ("--hugepages", hugepages_bytes)):
            if value is not None and value > total_bytes:
                raise UsageError(f"{flag}: {value} bytes are more than --host-ram {total_bytes}")
        if cgroup_usage_bytes is not None and cgroup_limit_bytes is None:
            raise UsageError("--cgroup-usage says nothing without --cgroup-limit")
        cgroup, notes = None, []
        if cgroup_limit_bytes is not None:
            level = CgroupLevel("stated", "limit", cgroup_limit_bytes, cgroup_usage_bytes or 0)
            cgroup = CgroupMemory((level,))
            if cgroup_usage_bytes is None:
                notes.append("the container's usage was not stated and is taken as 0")
        return cls(
            total_bytes=total_bytes,
            available_bytes=total_bytes - hugepages_bytes if available_bytes is None else available_bytes,
            hugepages_reserved_bytes=hugepages_bytes,
            hugepages_free_bytes=hugepages_bytes,
            cgroup=cgroup,
            notes=tuple(notes),
        )

    def container_headroom_bytes(self, *, credit_page_cache: bool) -> int | None:
        """Bytes until the tightest control-group limit, or None without a limit."""
        return None if self.cgroup is None else self.cgroup.headroom_bytes(credit_page_cache=credit_page_cache)

    @property
    def effective_available_bytes(self) -> int:
        """What this process can really get: MemAvailable, lowered to what its control groups still allow.

        File pages count as obtainable, as in MemAvailable itself.
        """
        headroom = self.container_headroom_bytes(credit_page_cache=True)
        return self.available_bytes if headroom is None else min(self.available_bytes, headroom)

    @property
    def effective_total_bytes(self) -> int:
        """RAM, lowered to the control-group limit that binds."""
        limit = None if self.cgroup is None else self.cgroup.limit_bytes
        return self.total_bytes if limit is None else min(self.total_bytes, limit)

    @property
    def swap_used_bytes(self) -> int | None:
        """Swap in use, or None when swap is not known."""
        if self.swap_total_bytes is None or self.swap_free_bytes is None:
            return None
        return self.swap_total_bytes - self.swap_free_bytes


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error


def read_meminfo(path: Path) -> dict[str, int]:
    """``/proc/meminfo`` as name → bytes (counts such as HugePages_Total stay counts).

    Raises:
        HostError: unreadable, a line of another form, or no MemTotal.
    """
    rows: dict[str, int] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        match = _MEMINFO_LINE.fullmatch(line)
        if match is None:
            if line.strip():
                raise HostError(f"{path}:{number}: expected 'Name:   123 kB', got {line[:80]!r}")
            continue
        rows[match[1].strip()] = int(match[2]) * (KIB if match[3] else 1)
    if not rows.get("MemTotal"):
        raise HostError(f"{path}: no MemTotal; this is not a Linux meminfo")
    return rows


def _available(rows: dict[str, int], proc_root: Path) -> tuple[int, tuple[str, ...]]:
    """MemAvailable, or the kernel's own estimate for it where the kernel (before 3.14) or LXC leaves it out.

    Source of the estimate: si_mem_available in the kernel's mm/page_alloc.c, without reserved pages.
    """
    total, stated = rows["MemTotal"], rows.get("MemAvailable")
    if stated is not None and stated <= total:
        return stated, ()
    free = rows.get("MemFree", 0)
    if stated is not None:
        # lxcfs takes MemTotal from the container and MemAvailable from the host
        return free, ("MemAvailable exceeds MemTotal (LXC); MemFree is taken instead",)
    note = ("/proc/meminfo has no MemAvailable; it is estimated from the free and the file pages",)
    try:
        words = [line.split() for line in (proc_root / "zoneinfo").read_text().splitlines()]
        pages = sum(int(row[1]) for row in words if len(row) == 2 and row[0] == "low")
    except (OSError, ValueError):
        return min(total, free + rows.get("Cached", 0)), note
    low = pages * os.sysconf("SC_PAGE_SIZE")
    cache = rows.get("Active(file)", 0) + rows.get("Inactive(file)", 0)
    slab = rows.get("SReclaimable", 0)
    estimate = free - low + cache - min(cache // 2, low) + slab - min(slab // 2, low)
    return min(total, max(0, estimate)), note


def _hugepages(rows: dict[str, int], sys_root: Path) -> tuple[int, int]:
    """Reserved and free huge pages in bytes, over all page sizes (meminfo counts only the default size)."""
    reserved = free = 0
    for folder in sorted((sys_root / "kernel/mm/hugepages").glob("hugepages-*kB")):
        size = int(folder.name.removeprefix("hugepages-").removesuffix("kB")) * KIB
        try:
            reserved += int(_read(folder / "nr_hugepages")) * size
            free += int(_read(folder / "free_hugepages")) * size
        except ValueError as error:
            raise HostError(f"{folder}: expected a whole number of pages: {error}") from error
    size = rows.get("Hugepagesize", 0)
    default = rows.get("HugePages_Total", 0) * size
    return (reserved, free) if reserved >= default else (default, rows.get("HugePages_Free", 0) * size)


def read_host(*, proc_root: Path = PROC, sys_root: Path = SYS) -> HostMemory:
    """Read this host's memory facts.

    Args:
        proc_root: stands for ``/proc``.
        sys_root: stands for ``/sys``.

    Returns:
        The facts; a control group that cannot be read leaves ``cgroup`` None and a note that says so.

    Raises:
        HostError: ``meminfo`` or a huge-page file is missing or malformed; the message names it.
    """
    if proc_root == PROC and not (proc_root / "meminfo").exists():
        memory = psutil.virtual_memory()
        note = f"{proc_root} has no meminfo: control groups, huge pages and limits are not known"
        return HostMemory(memory.total, memory.available, notes=(note,), source="psutil")
    rows = read_meminfo(proc_root / "meminfo")
    available, notes = _available(rows, proc_root)
    reserved, free_huge = _hugepages(rows, sys_root)
    try:
        cgroup = read_cgroup(proc_root, sys_root=sys_root)
    except HostError as error:
        cgroup, notes = None, (*notes, f"the container limit is not known: {error}")
    return HostMemory(
        total_bytes=rows["MemTotal"],
        available_bytes=available,
        free_bytes=rows.get("MemFree"),
        shmem_bytes=rows.get("Shmem"),
        hugepages_reserved_bytes=reserved,
        hugepages_free_bytes=free_huge,
        swap_total_bytes=rows.get("SwapTotal"),
        swap_free_bytes=rows.get("SwapFree"),
        cgroup=cgroup,
        notes=notes,
        source=f"measured ({proc_root}/meminfo)",
    )
