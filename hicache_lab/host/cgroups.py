"""Memory control groups: limits, usage, and the headroom SGLang 0.5.21+ computes from them.

The walk goes from the process's own group up to the root of the mount: any group on the way can kill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import HostError

PROC, SYS = Path("/proc"), Path("/sys")
# the kernel's "no limit" in v1 is the largest page-aligned int64 (PAGE_COUNTER_MAX, mm/memcontrol.c)
_V1_UNLIMITED_BYTES = 2**62


_LIMIT_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
USAGE_FILE = {1: "memory.usage_in_bytes", 2: "memory.current"}
# v1's names without total_ leave out the descendants, whose pages its usage counts
_PAGE_CACHE = {1: ("total_active_file", "total_inactive_file"), 2: ("active_file", "inactive_file")}
_VERSIONS = {"cgroup": 1, "cgroup2": 2}


@dataclass(frozen=True)
class CgroupLevel:
    """One limit of one group on the way up.

    Attributes:
        path: the group's directory as mounted.
        limit_file: the file that states the limit, e.g. ``memory.max``.
        limit_bytes: the limit.
        usage_bytes: what the group and everything below it is charged.
        file_cache_bytes: charged file pages the kernel may drop under this limit; 0 where not credited.
    """

    path: str
    limit_file: str
    limit_bytes: int
    usage_bytes: int
    file_cache_bytes: int = 0

    def headroom_bytes(self, *, credit_page_cache: bool) -> int:
        """What may still be charged before this limit binds, never below 0."""
        credit = self.file_cache_bytes if credit_page_cache else 0
        return max(0, self.limit_bytes - max(0, self.usage_bytes - credit))

    @property
    def is_unlimited(self) -> bool:
        """Whether the limit is version 1's way of saying that there is none."""
        return self.limit_bytes >= _V1_UNLIMITED_BYTES


@dataclass(frozen=True)
class CgroupMemory:
    """What the control groups allow one process; every level that states a limit is kept."""

    levels: tuple[CgroupLevel, ...] = ()

    def binding_level(self, *, credit_page_cache: bool) -> CgroupLevel | None:
        """The level with the least headroom, or None without any limit."""
        real = [level for level in self.levels if not level.is_unlimited]
        return min(real, key=lambda level: level.headroom_bytes(credit_page_cache=credit_page_cache), default=None)

    def headroom_bytes(self, *, credit_page_cache: bool) -> int | None:
        """Bytes until the tightest limit, or None when no group limits the process."""
        level = self.binding_level(credit_page_cache=credit_page_cache)
        return None if level is None else level.headroom_bytes(credit_page_cache=credit_page_cache)

    @property
    def limit_bytes(self) -> int | None:
        """The limit of the level that binds (page cache counted as used), or None."""
        level = self.binding_level(credit_page_cache=False)
        return None if level is None else level.limit_bytes

    @property
    def usage_bytes(self) -> int | None:
        """The usage of the level that binds, or None."""
        level = self.binding_level(credit_page_cache=False)
        return None if level is None else level.usage_bytes


@dataclass(frozen=True)
class MemoryController:
    """The memory controller where it is mounted, and this process's group in it."""

    version: int
    mount: Path
    own: Path

    def upwards(self, group: Path) -> list[Path]:
        """A group and its parents up to the mount, deepest first."""
        return [group, *(above for above in group.parents if above.is_relative_to(self.mount))]

    def levels(self, group: Path, *, credit_page_cache: bool) -> Iterator[CgroupLevel]:
        """The limits of a group and of those above it."""
        for directory in self.upwards(group):
            for name in _LIMIT_FILES[self.version]:
                try:
                    text = (directory / name).read_text().strip()
                except FileNotFoundError:
                    continue  # the hierarchy's root has none
                if text == "max":
                    continue
                # a limit whose usage cannot be read must not look like no limit: let the error out
                usage = int((directory / USAGE_FILE[self.version]).read_text())
                cache = self._droppable_bytes(directory) if credit_page_cache else 0
                yield CgroupLevel(str(directory), name, int(text), usage, cache)

    def _droppable_bytes(self, directory: Path) -> int:
        rows = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        pages = sum(int(rows[name]) for name in _PAGE_CACHE[self.version])
        return 0 if self.version == 2 and pages > 0 and _protects_descendants(directory) else pages


def _protects_descendants(directory: Path) -> bool:
    """Whether a group below asks for memory.min; one that cannot be read counts as asking."""
    pending = [directory]
    try:
        while pending:
            for child in pending.pop().iterdir():
                if child.is_dir():
                    if int((child / "memory.min").read_text()) != 0:
                        return True
                    pending.append(child)
    except (OSError, ValueError):
        return True
    return False


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def memory_controllers(
    proc_root: Path = PROC, sys_root: Path = SYS, *, or_mount: bool = False
) -> Iterator[MemoryController]:
    """Every mounted memory controller that this process is in, v1 and v2; nothing without procfs.

    Args:
        proc_root: where ``self/cgroup`` and ``self/mountinfo`` are.
        sys_root: stands for ``/sys`` in the mount points.
        or_mount: take the mount itself for a group that lies outside what is mounted.

    Raises:
        OSError, RuntimeError, ValueError: as SGLang's own walk, whose texts these are.
    """
    memberships = {}
    try:
        for line in (proc_root / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                memberships["cgroup" if controllers else "cgroup2"] = Path(path)
        mounts = (proc_root / "self/mountinfo").read_text()
    except FileNotFoundError:
        return
    resolved = False
    for line in mounts.splitlines():
        before, after = line.split(" - ", 1)
        filesystem, _, options = after.split()[:3]
        membership = memberships.get(filesystem)
        if membership is None or (filesystem == "cgroup" and "memory" not in options.split(",")):
            continue
        root, mount = (Path(_unescape(field)) for field in before.split()[3:5])
        if sys_root != SYS and mount.is_relative_to(SYS):
            mount = sys_root / mount.relative_to(SYS)
        # inside a cgroup namespace the membership counts from its root, the mount's root from the host's
        inside = membership.relative_to(root if membership.is_relative_to(root) else "/")
        own = mount / inside
        if or_mount and (".." in inside.parts or not own.is_dir()):
            own = mount
        elif ".." in inside.parts:
            raise ValueError(f"Cannot resolve cgroup memory path: {membership}")
        if own.is_dir():
            resolved = True
            yield MemoryController(_VERSIONS[filesystem], mount, own)
    if memberships and not resolved:
        raise RuntimeError("Cannot locate the process memory cgroup in mounted cgroup filesystems")


def memory_cgroup_headroom(proc_root: Path = PROC, *, credit_page_cache: bool, sys_root: Path = SYS) -> int | None:
    """The cgroup headroom as SGLang computes it before it sizes or checks a host pool.

    Source: ``mem_cache/host_memory.py:_cgroup_memory_headroom``; 0.5.21 without, 0.5.22 and later with
    ``credit_page_cache``. Releases up to 0.5.20 do not look.

    Args:
        proc_root: where ``self/cgroup`` and ``self/mountinfo`` are.
        credit_page_cache: take active and inactive file pages off the usage (0.5.22+), in version 2
            only where no group below asks for ``memory.min``.
        sys_root: stands for ``/sys`` in the mount points.

    Returns:
        Bytes, or None when no group states a limit (or there is no procfs). Version 1's "unlimited" is a
        number here, as it is for the release.

    Raises:
        HostError: with the text the release raises; ``__cause__`` has the type it raises (RuntimeError,
            OSError, ValueError, KeyError).
    """
    try:
        return min(
            (
                level.headroom_bytes(credit_page_cache=credit_page_cache)
                for controller in memory_controllers(proc_root, sys_root)
                for level in controller.levels(controller.own, credit_page_cache=credit_page_cache)
            ),
            default=None,
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise HostError(str(error)) from error


def read_cgroup(proc_root: Path = PROC, *, sys_root: Path = SYS) -> CgroupMemory | None:
    """The control groups of this process with their limits, or None where there is no memory controller.

    Raises:
        HostError: a group states a limit but cannot be read.
    """
    try:
        controllers = list(memory_controllers(proc_root, sys_root))
        levels = tuple(level for one in controllers for level in one.levels(one.own, credit_page_cache=True))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise HostError(f"control groups below {proc_root}: {error}") from error
    return CgroupMemory(levels) if controllers else None
