"""Memory control groups: limits, usage, and the headroom SGLang 0.5.21+ computes from them.

The walk goes from the process's own group up to the root of the mount: any group on the way can kill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hicache_lab.base.errors import HostError

PROC, SYS = Path("/proc"), Path("/sys")
# the kernel's "no limit" in v1 is the largest page-aligned int64 (PAGE_COUNTER_MAX, mm/memcontrol.c)
_V1_UNLIMITED_BYTES = 2**62


@dataclass(frozen=True)
class _Flavour:
    version: int
    limits: tuple[str, ...]
    usage: str
    # v1's names without total_ leave out the descendants, whose pages its usage counts
    page_cache: tuple[str, str]


_FLAVOURS = {
    "cgroup2": _Flavour(2, ("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file")),
    "cgroup": _Flavour(
        1, ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
    ),
}


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

    version: int
    path: str
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

    @property
    def file_cache_bytes(self) -> int:
        """The droppable file pages of the level that binds."""
        level = self.binding_level(credit_page_cache=False)
        return 0 if level is None else level.file_cache_bytes

    @property
    def binding(self) -> str | None:
        """Which file states the limit that binds, or None."""
        level = self.binding_level(credit_page_cache=False)
        return None if level is None else f"{level.path}/{level.limit_file}"


@dataclass(frozen=True)
class _Mounted:
    flavour: _Flavour
    membership: PurePosixPath
    mount: Path
    directory: Path

    def upwards(self) -> Iterator[Path]:
        directory = self.directory
        while directory != self.mount:
            yield directory
            directory = directory.parent
        yield self.mount


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _rebase(mount: str, sys_root: Path) -> Path:
    path = PurePosixPath(mount)
    if sys_root != SYS and path.is_relative_to(SYS):
        return sys_root / path.relative_to(SYS)
    return Path(mount)


def _memberships(text: str) -> dict[str, PurePosixPath]:
    found = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            found["cgroup"] = PurePosixPath(path)
    return found


def _directory_below(mount: Path, root: PurePosixPath, membership: PurePosixPath) -> Path | None:
    if membership.is_relative_to(root):
        relative = membership.relative_to(root)
    elif root != PurePosixPath("/"):
        # inside a cgroup namespace the membership counts from its root, the mount's root from the host's
        relative = membership.relative_to("/")
    else:
        return None
    if ".." in relative.parts:
        raise ValueError(f"Cannot resolve cgroup memory path: {membership}")
    return mount / relative


def _mounted(proc_root: Path, sys_root: Path) -> Iterator[_Mounted]:
    try:
        memberships = _memberships((proc_root / "self/cgroup").read_text())
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
        fields = before.split()
        mount = _rebase(_unescape(fields[4]), sys_root)
        directory = _directory_below(mount, PurePosixPath(_unescape(fields[3])), membership)
        if directory is not None and directory.is_dir():
            resolved = True
            yield _Mounted(_FLAVOURS[filesystem], membership, mount, directory)
    if memberships and not resolved:
        raise RuntimeError("Cannot locate the process memory cgroup in mounted cgroup filesystems")


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


def _droppable_bytes(directory: Path, flavour: _Flavour) -> int:
    rows = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    pages = sum(int(rows[name]) for name in flavour.page_cache)
    return 0 if flavour.version == 2 and pages > 0 and _protects_descendants(directory) else pages


def _levels(mounted: _Mounted, *, credit_page_cache: bool) -> Iterator[CgroupLevel]:
    flavour = mounted.flavour
    for directory in mounted.upwards():
        for name in flavour.limits:
            try:
                text = (directory / name).read_text().strip()
            except FileNotFoundError:
                continue  # the hierarchy's root has none
            if text == "max":
                continue
            limit = int(text)
            # a limit whose usage cannot be read must not look like no limit: let the error out
            usage = int((directory / flavour.usage).read_text())
            cache = _droppable_bytes(directory, flavour) if credit_page_cache else 0
            yield CgroupLevel(str(directory), name, limit, usage, cache)


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
                for mounted in _mounted(proc_root, sys_root)
                for level in _levels(mounted, credit_page_cache=credit_page_cache)
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
        found = list(_mounted(proc_root, sys_root))
        if not found:
            return None
        levels = tuple(level for one in found for level in _levels(one, credit_page_cache=True))
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise HostError(f"control groups below {proc_root}: {error}") from error
    # in a hybrid set-up the memory controller is mounted once, as version 1 or as version 2
    first = next((one for one in found if any(lv.path.startswith(str(one.mount)) for lv in levels)), found[0])
    return CgroupMemory(first.flavour.version, str(first.membership), levels)


def cgroup_usage_file(proc_root: Path = PROC, *, sys_root: Path = SYS) -> Path | None:
    """The file that states what this process's own group is charged, or None."""
    try:
        for mounted in _mounted(proc_root, sys_root):
            usage = mounted.directory / mounted.flavour.usage
            if usage.is_file():
                return usage
    except (OSError, RuntimeError, ValueError):
        return None
    return None
