"""``hicache-lab watch``: memory samples into a file that survives the crash it is there for."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import psutil

from hicache_lab.base.errors import HostError, UsageError
from hicache_lab.base.units import KIB
from hicache_lab.host import HostMemory, read_host

SCHEMA = "hicache-lab/watch/1"
PROC, SYS = Path("/proc"), Path("/sys")


def sglang_pids() -> list[int]:
    """Processes that are an SGLang server's: by title (``sglang::scheduler_TP0``) or by command line."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline"]):
        title = f"{process.info['name'] or ''} {' '.join(process.info['cmdline'] or ())}"
        if process.info["pid"] != os.getpid() and _is_sglang(title):
            found.append(process.info["pid"])
    return sorted(found)


def _is_sglang(title: str) -> bool:
    words = title.replace("\0", " ").split()
    return any(
        word.startswith("sglang::") or word in ("sglang.launch_server", "sglang.srt.entrypoints.http_server")
        for word in words
    ) or ("sglang" in {Path(word).name for word in words[:4]} and "serve" in words)


def process_share(pid: int, proc_root: Path = PROC) -> dict[str, Any] | None:
    """Name, resident and proportional bytes of a process; None when it is gone. PSS needs the right to read it."""
    status, rollup = (_fields(proc_root / str(pid) / name) for name in ("status", "smaps_rollup"))
    if status is None:
        return None
    return {
        "pid": pid,
        "name": status.get("Name", "?").strip(),
        "rss_bytes": _kb(status.get("VmRSS")),
        "pss_bytes": _kb(rollup.get("Pss")) if rollup is not None else None,
    }


def _fields(path: Path) -> dict[str, str] | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _kb(text: str | None) -> int:
    words = (text or "0").split()
    return int(words[0]) * KIB if words and words[0].isdigit() else 0


def look(pids: Iterable[int], *, at: datetime, host: HostMemory, proc_root: Path = PROC) -> dict[str, Any]:
    """One sample as it is written: host, control group and processes, in bytes."""
    shares = [share for pid in pids if (share := process_share(pid, proc_root)) is not None]
    cgroup = host.cgroup
    return {
        "schema": SCHEMA,
        "at": at.isoformat(timespec="milliseconds"),
        "source": "measured",
        "total_bytes": host.total_bytes,
        "available_bytes": host.available_bytes,
        "free_bytes": host.free_bytes,
        "shmem_bytes": host.shmem_bytes,
        "swap_used_bytes": host.swap_used_bytes,
        "cgroup_usage_bytes": cgroup.usage_bytes if cgroup else None,
        "cgroup_limit_bytes": cgroup.limit_bytes if cgroup else None,
        "hugepages_total_bytes": host.hugepages_reserved_bytes,
        "hugepages_free_bytes": host.hugepages_free_bytes,
        "processes": shares,
    }


def samples(
    interval_s: float,
    *,
    pids: Iterable[int] = (),
    all_sglang: bool = False,
    count: int | None = None,
    now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    sleep: Callable[[float], None] = time.sleep,
    proc_root: Path = PROC,
    sys_root: Path = SYS,
) -> Iterator[dict[str, Any]]:
    """Samples for ever, or ``count`` of them, at a steady pace.

    Args:
        interval_s: seconds between two samples.
        pids: processes to look at.
        all_sglang: also every process of an SGLang server, found anew at each sample.
        count: how many samples.
        now: the clock.
        sleep: how to wait.
        proc_root: stands for ``/proc``.
        sys_root: stands for ``/sys``.

    Raises:
        UsageError: an interval that is not above 0.
        HostError: the host's memory cannot be read.
    """
    if not interval_s > 0:
        raise UsageError(f"--interval: expected seconds above 0, got {interval_s}")
    fixed = list(pids)
    taken = 0
    begun = time.monotonic()
    while count is None or taken < count:
        watched = sorted({*fixed, *(sglang_pids() if all_sglang else ())})
        host = read_host(proc_root=proc_root, sys_root=sys_root)
        yield look(watched, at=now(), host=host, proc_root=proc_root)
        taken += 1
        # the pace is kept although a sample takes time itself
        due = begun + taken * interval_s
        if count is None or taken < count:
            sleep(max(due - time.monotonic(), 0.0))


class CrashSafeFile:
    """Appends whole lines and forces each to the disk: after a kernel kill or a reset the last sample is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.stat().st_size > 0 and path.read_bytes()[-1:] != b"\n"
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise HostError(f"--output {path}: cannot be written: {error.strerror}") from error
        if torn:
            self._file.write("\n")

    def write(self, sample: dict[str, Any]) -> None:
        """Append one sample.

        Raises:
            HostError: the disk is full or gone.
        """
        try:
            self._file.write(json.dumps(sample, separators=(",", ":")) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise HostError(f"--output {self.path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """End the file."""
        self._file.close()
