"""A memory control group of our own, for as long as a ``with`` block: v1 and v2, delegated or root.

The group is a small host: a hard limit, no swap, the kernel's OOM killer on. Whatever ends the block, even
SIGKILL of this process, a cleanup process kills what is left in the group and removes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hicache_lab.base.errors import HostError
from hicache_lab.base.units import format_gb
from hicache_lab.host.cgroups import USAGE_FILE, CgroupMemory, MemoryController, memory_controllers
from hicache_lab.race import _cleanup

PREFIX = "hicache-lab-"


class Tree:
    """What changes the control group file system; tests put a folder of plain files in its place."""

    def make(self, group: Path) -> None:
        """Create a group."""
        group.mkdir()

    def write(self, file: Path, text: str) -> None:
        """Write a control file that the kernel must already offer."""
        with file.open("r+") as handle:
            handle.write(text)


@dataclass(frozen=True)
class Group:
    """A control group made by `memory_group`."""

    path: Path
    version: int

    def usage_bytes(self) -> int:
        """Bytes in use now."""
        return int((self.path / USAGE_FILE[self.version]).read_text())

    def peak_bytes(self) -> int | None:
        """The most bytes in use so far; None where the kernel does not keep it (v2 before Linux 5.19)."""
        file = self.path / ("memory.peak" if self.version == 2 else "memory.max_usage_in_bytes")
        return int(file.read_text()) if file.exists() else None

    def oom_kills(self) -> int:
        """Processes of this group that the kernel's OOM killer ended, by the kernel's count.

        Raises:
            HostError: a kernel before Linux 4.13, which does not count them.
        """
        file = self.path / ("memory.events" if self.version == 2 else "memory.oom_control")
        counts = dict(line.split() for line in file.read_text().splitlines())
        if "oom_kill" not in counts:
            raise HostError(
                f"{file}: this kernel does not count OOM kills (Linux 4.13 and later do); use the virtual race"
            )
        return int(counts["oom_kill"])


def find_controller(proc: Path = Path("/proc")) -> MemoryController:
    """Find the memory controller of this process, v1 before v2.

    Raises:
        HostError: there is none, or ``/proc`` cannot be read.
    """
    reason = "this machine mounts no memory controller (cgroup v1 or v2)"
    try:
        for controller in sorted(memory_controllers(proc, or_mount=True), key=lambda one: one.version):
            offers = controller.mount / "cgroup.controllers"
            if controller.version == 1 or (offers.exists() and "memory" in offers.read_text().split()):
                return controller
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error)
    raise HostError(f"a physical race needs Linux control groups: {reason}; use the virtual race")


def headroom_bytes(controller: MemoryController, group: Path) -> int | None:
    """The least that a group and those above it still grant; None when none is limited."""
    levels = tuple(controller.levels(group, credit_page_cache=False))
    return CgroupMemory(levels).headroom_bytes(credit_page_cache=False)


def _create(controller: MemoryController, tree: Tree, parents: list[Path], limit_bytes: int) -> tuple[Path, bool]:
    """A group below the first parent that allows it, and whether the controller was enabled there for it."""
    reasons = []
    for parent in parents:
        group = parent / f"{PREFIX}{os.getpid()}-{os.urandom(3).hex()}"
        enabled = made = False
        try:
            control = parent / "cgroup.subtree_control"
            if controller.version == 2 and "memory" not in control.read_text().split():
                if "memory" not in (parent / "cgroup.controllers").read_text().split():
                    raise HostError("the memory controller is not delegated to it")
                tree.write(control, "+memory")
                enabled = True
            headroom = headroom_bytes(controller, parent)
            if headroom is not None and headroom < limit_bytes:
                # a group above would run out first, and the kernel would choose among others' processes
                raise HostError(f"only {format_gb(headroom)} left below its own limit, {format_gb(limit_bytes)} wanted")
            tree.make(group)
            made = True
            _limit(controller.version, tree, group, limit_bytes)
            return group, enabled
        except (OSError, HostError) as error:
            reasons.append(f"{parent}: {error.strerror if isinstance(error, OSError) else error}")
            if made:
                group.rmdir()
            if enabled:
                _cleanup.withdraw(parent)
    raise HostError(
        "no memory control group could be made (" + "; ".join(reasons) + "). Run as root, or in a delegated group: "
        "systemd-run --user --scope -p Delegate=yes hicache-lab replay --physical; or use the virtual race"
    )


def _limit(version: int, tree: Tree, group: Path, limit_bytes: int) -> None:
    """Set the hard limit, without swap, and make sure the kernel kills rather than waits."""
    if version == 2:
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
    if "oom_kill_disable 1" in (group / "memory.oom_control").read_text():
        tree.write(group / "memory.oom_control", "0")


def remove_stale(parent: Path) -> None:
    """Remove empty groups of races whose process is gone (both it and its cleanup were killed)."""
    for group in parent.glob(f"{PREFIX}*-*"):
        owner = group.name.removeprefix(PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with suppress(OSError):  # populated, or not ours to remove
                group.rmdir()


@contextmanager
def memory_group(
    limit_bytes: int,
    *,
    parent: Path | None = None,
    controller: MemoryController | None = None,
    tree: Tree | None = None,
) -> Iterator[Group]:
    """A memory control group of our own.

    Args:
        limit_bytes: its hard limit.
        parent: make it below this group only, for example one that was delegated; else below this process's
            own group or, failing that, its parents, up to the root.
        controller: what `find_controller` said.
        tree: the file system; replaced in tests.

    Yields:
        The group; empty.

    Raises:
        HostError: no group may be made, or one above has too little left; the message gives each reason.
    """
    controller = controller or find_controller()
    tree = tree or Tree()
    parent = parent and parent.resolve()
    if parent is not None and not parent.is_relative_to(controller.mount):
        raise HostError(f"--cgroup: expected a group below {controller.mount}, got {parent}")
    parents = [parent] if parent is not None else controller.upwards(controller.own)
    path, enabled = _create(controller, tree, parents, limit_bytes)
    command = [sys.executable, "-I", "-S", _cleanup.__file__, str(path)]
    try:
        remove_stale(path.parent)
        cleanup = subprocess.Popen(
            [*command, str(path.parent)] if enabled else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    except BaseException as error:
        path.rmdir()
        if isinstance(error, OSError):
            raise HostError(f"no process to clean up after the race could be started: {error.strerror}") from None
        raise
    try:
        yield Group(path, controller.version)
    finally:
        cleanup.communicate()
        if path.exists() and not _cleanup.sweep(path):
            raise HostError(f"the control group {path} could not be removed; processes in it do not end")


class KernelLog:
    """The kernel's messages from now on, where they may be read."""

    def __init__(self, device: Path = Path("/dev/kmsg")) -> None:
        self._fd: int | None = None
        with suppress(OSError):  # not allowed, or no such device: the race does without
            self._fd = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._fd, 0, os.SEEK_END)

    def lines(self, group_name: str) -> tuple[str, ...]:
        """What was said of this group since, oldest first; closes the log."""
        if self._fd is None:
            return ()
        lines: list[str] = []
        pid = ""
        try:
            # ends with BlockingIOError, or with another one where older messages were lost
            while record := os.read(self._fd, 8192):
                text = record.decode(errors="replace").split(";", 1)[-1].splitlines()[0]
                if text.startswith("oom-kill:") and group_name in text:
                    pid = next((word[4:] for word in text.split(",") if word.startswith("pid=")), "")
                    lines.append(text)
                elif text.startswith("Memory cgroup out of memory") and lines and f" {pid} " in text:
                    lines.append(text)
        except OSError:
            pass
        finally:
            os.close(self._fd)
        return tuple(lines)
