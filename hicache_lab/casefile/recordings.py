"""The recordings beside an incident's facts: memory samples and the moments that its server log dates."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from datetime import datetime

from hicache_lab.casefile.case import Case
from hicache_lab.errors import InputError

_RECORD = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] (.*)")
# what a reader of the memory curve wants to see on it; each marks its first line
_MARKS = (
    ("server_args=", "launch"),
    ("Load weight end", "weights loaded"),
    ("host memory for hierarchical KV cache", "host pools requested"),
    ("Received sigquit", "a worker is dead"),
)


@dataclass(frozen=True)
class MemoryRecording:
    """Memory in use over time: one moment and one number of bytes a sample, and the host's RAM."""

    times: tuple[datetime, ...]
    used_bytes: tuple[int, ...]
    total_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most memory in use at a sample."""
        return max(self.used_bytes)


def read_memory(case: Case) -> MemoryRecording:
    """The case's memory samples.

    Raises:
        InputError: no such file, a missing column, or a line of another form (named by its number).
    """
    path = case.files.get("memory")
    if path is None:
        raise InputError(f"{case.folder}: the incident names no memory file")
    times, used, total = [], [], 0
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    times.append(datetime.fromisoformat(row["time"]))
                    used.append(int(row["used_bytes"]))
                    total = int(row["total_bytes"])
                except (KeyError, ValueError, TypeError) as error:
                    raise InputError(
                        f"{path}:{number}: expected time, total_bytes and used_bytes; got {dict(row)} ({error})"
                    ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if not times:
        raise InputError(f"{path}: no samples")
    return MemoryRecording(tuple(times), tuple(used), total)


def marks(case: Case) -> list[tuple[datetime, str]]:
    """The moments of the server log that explain the memory curve, the first line of each kind."""
    path = case.files.get("server_log")
    if path is None or not path.exists():
        return []
    found: dict[str, datetime] = {}
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _RECORD.match(line)
            for words, name in _MARKS:
                if record and words in record[2] and name not in found:
                    found[name] = datetime.fromisoformat(record[1])
    return [(moment, name) for name, moment in found.items()]
