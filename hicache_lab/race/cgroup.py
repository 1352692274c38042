"""A memory control group of our own, for as long as a ``with`` block: v1 and v2, delegated or root.

The group is a small host: a hard limit, no swap, the kernel's OOM killer on. Whatever ends the block, even
SIGKILL of this process, a cleanup process kills what is left in the group and removes it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import HostError
from hicache_lab.base.units import format_gb
from hicache_lab.race import _cleanup

PREFIX = "hicache-lab-"
_UNLIMITED = 1 << 60  # v1 writes "no limit" as the largest multiple of a page


@dataclass(frozen=True)
class Layout:
    """Where the memory controller is and where this process stands in it.

    Attributes:
        version: 1 or 2.
        mount: where the hierarchy is mounted.
        own: this process's group below it (the mount itself when it lies outside what is mounted).
    """

    version: int
    mount: Path
    own: Path

    def ancestry(self, group: Path) -> list[Path]:
        """``group`` and its parents up to the mount, deepest first."""
        return [group, *[p for p in group.parents if p.is_relative_to(self.mount)]]


class Tree:
    """The control group file system; tests put a folder of plain files in its place."""

    def make(self, group: Path) -> None:
        """Create a group."""
        group.mkdir()

    def remove(self, group: Path) -> None:
        """Remove an empty group."""
        group.rmdir()

    def read(self, file: Path) -> str:
        """A control file's text."""
        return file.read_text()

    def write(self, file: Path, text: str) -> None:
        """Write a control file that the kernel must already offer."""
        with file.open("r+") as handle:
            handle.write(text)


@dataclass(frozen=True)
class Group:
    """A control group made by `memory_group`."""

    path: Path
    version: int
    limit_bytes: int
    tree: Tree

    @property
    def usage_file(self) -> str:
        """The name of the file with the bytes in use."""
        return "memory.current" if self.version == 2 else "memory.usage_in_bytes"

    def usage_bytes(self) -> int:
        """Bytes in use now."""
        return int(self.tree.read(self.path / self.usage_file))

    def peak_bytes(self) -> int | None:
        """The most bytes in use so far; None where the kernel does not keep it (v2 before Linux 5.19)."""
        file = self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")
        return int(self.tree.read(file)) if file.exists() else None

    def oom_kills(self) -> int:
        """Processes of this group that the kernel's OOM killer ended, by the kernel's count.

        Raises:
            HostError: a kernel before Linux 4.13, which does not count them.
        """
        file = self.path / ("memory.events" if self.version == 2 else "memory.oom_control")
        counts = dict(line.split() for line in self.tree.read(file).splitlines())
        if "oom_kill" not in counts:
            raise HostError(
                f"{file}: this kernel does not count OOM kills (Linux 4.13 and later do); use the virtual race"
            )
        return int(counts["oom_kill"])


def find_layout(proc: Path = Path("/proc")) -> Layout:
    """Find the memory controller of this process.

    Raises:
        HostError: there is none, or ``/proc`` cannot be read.
    """
    try:
        mounts = (proc / "self/mountinfo").read_text().splitlines()
        member = (proc / "self/cgroup").read_text().splitlines()
    except OSError as error:
        raise HostError(
            f"a physical race needs Linux control groups: {error.filename}: {error.strerror}; use the virtual race"
        ) from None
    groups = {}
    for line in member:
        hierarchy, controllers, path = line.split(":", 2)
        for name in controllers.split(",") if hierarchy != "0" else ["v2"]:
            groups[name] = path
    for version, kind, name in [(1, "cgroup", "memory"), (2, "cgroup2", "v2")]:
        for line in mounts:
            fields, _, tail = line.partition(" - ")
            root, point = (_unescape(word) for word in fields.split()[3:5])
            kind_here, _, options = tail.split(maxsplit=2)
            if kind_here != kind or name not in groups or (version == 1 and name not in options.split(",")):
                continue
            mount = Path(point)
            inside = os.path.relpath(groups[name], root)
            own = mount if inside.startswith("..") else mount / inside
            if version == 2 and "memory" not in _controllers(mount / "cgroup.controllers"):
                continue
            return Layout(version, mount, own)
    raise HostError(
        "a physical race needs a memory control group, and this machine mounts no memory controller "
        "(cgroup v1 or v2); use the virtual race"
    )


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), text)


def _controllers(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def headroom_bytes(layout: Layout, group: Path, tree: Tree) -> int:
    """The least that any group above still grants (a very large number when none is limited)."""
    least = _UNLIMITED
    limits = ["memory.max", "memory.high"] if layout.version == 2 else ["memory.limit_in_bytes"]
    usage = "memory.current" if layout.version == 2 else "memory.usage_in_bytes"
    for above in layout.ancestry(group):
        for name in limits:
            file = above / name
            if not file.exists():  # the root of v2 has neither
                continue
            text = tree.read(file).strip()
            if text != "max" and int(text) < _UNLIMITED:
                least = min(least, int(text) - int(tree.read(above / usage)))
    return least


def _offers(layout: Layout, parent: Path, tree: Tree) -> bool:
    """Make ``parent`` hand the memory controller to its children; True when that changed something."""
    if layout.version == 1:
        return False
    control = parent / "cgroup.subtree_control"
    if "memory" in tree.read(control).split():
        return False
    if "memory" not in tree.read(parent / "cgroup.controllers").split():
        raise OSError(0, "the memory controller is not delegated to it", str(parent))
    tree.write(control, "+memory")
    return True


def _create(layout: Layout, tree: Tree, parents: list[Path], limit_bytes: int) -> tuple[Path, bool]:
    """A group below the first parent that allows it, and whether the controller was enabled there for it."""
    reasons = []
    for parent in parents:
        group = parent / f"{PREFIX}{os.getpid()}-{os.urandom(3).hex()}"
        enabled = made = False
        try:
            enabled = _offers(layout, parent, tree)
            headroom = headroom_bytes(layout, parent, tree)
            if headroom < limit_bytes:
                # a group above would run out first, and the kernel would choose among others' processes
                raise HostError(f"only {format_gb(headroom)} left below its own limit, {format_gb(limit_bytes)} wanted")
            tree.make(group)
            made = True
            _limit(layout, tree, group, limit_bytes)
            return group, enabled
        except (OSError, HostError) as error:
            reasons.append(f"{parent}: {error.strerror if isinstance(error, OSError) else error}")
            if made:
                tree.remove(group)
            if enabled:
                _cleanup.withdraw(parent)
    raise HostError(
        "no memory control group could be made (" + "; ".join(reasons) + "). Run as root, or in a delegated group: "
        "systemd-run --user --scope -p Delegate=yes hicache-lab replay --physical; or use the virtual race"
    )


def _limit(layout: Layout, tree: Tree, group: Path, limit_bytes: int) -> None:
    """Set the hard limit, without swap, and make sure the kernel kills rather than waits."""
    if layout.version == 2:
        tree.write(group / "memory.max", str(limit_bytes))
        if (group / "memory.swap.max").exists():
            tree.write(group / "memory.swap.max", "0")
        tree.write(group / "memory.oom.group", "0")
        return
    tree.write(group / "memory.limit_in_bytes", str(limit_bytes))
    if (group / "memory.memsw.limit_in_bytes").exists():
        tree.write(group / "memory.memsw.limit_in_bytes", str(limit_bytes))
    if (group / "memory.swappiness").exists():
        tree.write(group / "memory.swappiness", "0")
    if "oom_kill_disable 1" in tree.read(group / "memory.oom_control"):
        tree.write(group / "memory.oom_control", "0")


def remove_stale(parent: Path, tree: Tree) -> None:
    """Remove empty groups of races whose process is gone (both it and its cleanup were killed)."""
    for group in parent.glob(f"{PREFIX}*-*"):
        owner = group.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            try:
                tree.remove(group)
            except OSError:  # populated, or not ours to remove
                continue


@contextmanager
def memory_group(
    limit_bytes: int,
    *,
    parent: Path | None = None,
    layout: Layout | None = None,
    tree: Tree | None = None,
) -> Iterator[Group]:
    """A memory control group of our own.

    Args:
        limit_bytes: its hard limit.
        parent: make it below this group only, for example one that was delegated; else below this process's
            own group or, failing that, its parents, up to the root.
        layout: what `find_layout` said.
        tree: the file system; replaced in tests.

    Yields:
        The group; empty.

    Raises:
        HostError: no group may be made, or one above has too little left; the message gives each reason.
    """
    layout = layout or find_layout()
    tree = tree or Tree()
    parent = parent and parent.resolve()
    if parent is not None and not parent.is_relative_to(layout.mount):
        raise HostError(f"--cgroup: expected a group below {layout.mount}, got {parent}")
    parents = [parent] if parent is not None else layout.ancestry(layout.own)
    path, enabled = _create(layout, tree, parents, limit_bytes)
    command = [sys.executable, "-I", "-S", _cleanup.__file__, str(path)]
    try:
        remove_stale(path.parent, tree)
        cleanup = subprocess.Popen(
            [*command, str(path.parent)] if enabled else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        tree.remove(path)
        raise HostError(f"no process to clean up after the race could be started: {error.strerror}") from None
    except BaseException:
        tree.remove(path)
        raise
    try:
        yield Group(path, layout.version, limit_bytes, tree)
    finally:
        cleanup.communicate()
        if path.exists() and not _cleanup.sweep(path):
            raise HostError(f"the control group {path} could not be removed; processes in it do not end")
