"""A series of memory samples, in whatever form somebody saved it.

Read are: the file of ``hicache-lab watch`` (JSON lines), CSV with units in its column names, ``free -s``,
``/proc/meminfo`` dumps, ``vmstat``, and node-exporter text as Prometheus scrapes it.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.base.times import epoch_time, find_time
from hicache_lab.base.units import GIB, HUMAN_SUFFIXES, KIB, MIB, UNITS
from hicache_lab.forensics.logs.events import SourceLine
from hicache_lab.forensics.logs.reader import chunks


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """What one process held: resident, and its proportional share of what is shared."""

    pid: int
    name: str
    rss_bytes: int
    pss_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """One look at the host. Bytes; None where the form does not carry it. ``at`` has no zone, as printed."""

    where: SourceLine
    at: datetime | None = None
    total_bytes: int | None = None
    available_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    shmem_bytes: int | None = None
    swap_used_bytes: int | None = None
    cgroup_usage_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    hugepages_total_bytes: int | None = None
    hugepages_free_bytes: int | None = None
    processes: tuple[ProcessShare, ...] = ()
    text: str = field(default="", compare=False)

    @property
    def in_use_bytes(self) -> int | None:
        """Used memory: as stated, else total minus available (or minus free)."""
        if self.used_bytes is not None:
            return self.used_bytes
        left = self.available_bytes if self.available_bytes is not None else self.free_bytes
        return self.total_bytes - left if self.total_bytes is not None and left is not None else None

    @property
    def left_bytes(self) -> int | None:
        """What a new allocation could take: available, or free where that is all the form carries."""
        return self.available_bytes if self.available_bytes is not None else self.free_bytes


_SIZES = tuple(f.name for f in fields(MemoryReading) if f.name.endswith("_bytes"))
_ALIASES = {
    "mem_total": "total", "memtotal": "total", "mem_available": "available", "memavailable": "available",
    "mem_used": "used", "mem_free": "free", "memfree": "free", "shared": "shmem", "swap": "swap_used",
    "cgroup": "cgroup_usage", "cgroup_usage": "cgroup_usage", "avail": "available",
}  # fmt: skip
_MEMINFO = re.compile(r"^(?:.*\s)?(\w+(?:\(\w+\))?):\s+(\d{1,18})(?: kB)?$")
_NODE = re.compile(r"^node_memory_(\w+?)(?:_bytes)?(?:\{[^}]*\})?\s+([0-9.eE+-]+)(?:\s+(\d+))?$")
# no machine counts further
_MOST = 2.0**63
_HUMAN = re.compile(r"(\d+(?:[.,]\d+)?)(Ki|Mi|Gi|Ti|K|M|G|T|B)?$")


def read_memory(path: str) -> list[MemoryReading]:
    """Read a memory series of any known form, recognised by its content.

    Raises:
        InputError: unreadable, or no sample of a known form in it; the message lists the forms.
    """
    text = b"".join(chunks(path)).decode("utf-8", "replace")
    lines = [line.rstrip("\r") for line in text.split("\n")]
    for reader in _readers():
        samples = list(reader(path, lines))
        if samples:
            return samples
    raise InputError(
        f"{path}: no memory sample found; known forms are the file of 'hicache-lab watch', CSV with columns such as "
        "time,total_bytes,available_bytes, 'free -m -s 1', /proc/meminfo dumps, vmstat, and node-exporter text"
    )


def holds_samples(path: str, lines: list[str]) -> bool:
    """Whether lines from the beginning of a file hold a sample of a known form."""
    return any(next(reader(path, lines), None) is not None for reader in _readers())


def _readers() -> tuple[Callable[[str, list[str]], Iterator[MemoryReading]], ...]:
    return (
        _json_lines,
        _csv,
        _free,
        _vmstat,
        partial(_rows, row=_MEMINFO, begins="MemTotal"),
        partial(_rows, row=_NODE),
    )


def _json_lines(path: str, lines: list[str]) -> Iterator[MemoryReading]:
    for number, line in enumerate(lines, 1):
        if not line.startswith("{"):
            continue
        try:
            raw = json.loads(line)
        except (ValueError, RecursionError):
            # the writer was killed within its last line
            continue
        if not isinstance(raw, dict) or raw.get("schema", "hicache-lab/watch/1") != "hicache-lab/watch/1":
            continue
        sizes = {name: raw[name] for name in _SIZES if isinstance(raw.get(name), int)}
        if not sizes:
            continue
        listed = raw.get("processes")
        shares = tuple(
            ProcessShare(one["pid"], str(one.get("name", "?"))[:64], one["rss_bytes"], _whole(one.get("pss_bytes")))
            for one in (listed if isinstance(listed, list) else ())
            if isinstance(one, dict) and isinstance(one.get("pid"), int) and isinstance(one.get("rss_bytes"), int)
        )
        at = find_time(str(raw.get("at", "")))
        yield MemoryReading(where=SourceLine(path, number), at=at, processes=shares, text=line[:300], **sizes)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _csv(path: str, lines: list[str]) -> Iterator[MemoryReading]:
    start = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), None)
    if start is None:
        return
    delimiter = max(",;\t", key=lines[start].count)
    columns = [_column(name) for name in _cells(lines[start], delimiter)]
    if not any(name in _SIZES for name, _ in columns):
        return
    for number, line in enumerate(lines[start + 1 :], start + 2):
        if not line.strip():
            continue
        values: dict[str, Any] = {}
        at = None
        for (name, factor), cell in zip(columns, _cells(line, delimiter), strict=False):
            if name == "at":
                at = find_time(cell) or _epoch(cell)
            elif name in _SIZES and (number_of := _float(cell)) is not None:
                values[name] = round(number_of * factor)
        if values:
            yield MemoryReading(where=SourceLine(path, number), at=at, text=line[:300], **values)


def _cells(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:
        # a carriage return inside (a progress bar), a cell without end: not a table
        return []


def _column(name: str) -> tuple[str, int]:
    key = re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")
    if key in ("time", "timestamp", "at", "date", "datetime", "ts"):
        return "at", 1
    base, _, unit = key.rpartition("_")
    factor = 1 if unit == "bytes" else UNITS.get(unit.upper())
    if factor is not None:
        return f"{_ALIASES.get(base, base)}_bytes", factor
    # without a unit a number means nothing
    return key, 1


def _epoch(cell: str) -> datetime | None:
    value = _float(cell)
    if value is None or not 1e8 < value < 1e14:
        return None
    return epoch_time(value / (1000 if value > 1e11 else 1))


def _float(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if abs(value) < _MOST else None  # false for what is not a number, too


def free_unit(total: float) -> int:
    """The unit of ``free``'s numbers, which its output does not name: judged by the size of the total.

    GiB below 5,000, MiB below 5,000,000 (4.8 TiB), KiB below 5e10, bytes above.
    """
    for limit, factor in ((5e3, GIB), (5e6, MIB), (5e10, KIB)):
        if total < limit:
            return factor
    return 1


def _free(path: str, lines: list[str]) -> Iterator[MemoryReading]:
    header: list[str] = []
    at = None
    for number, line in enumerate(lines, 1):
        words = line.split()
        if "total" in words and "used" in words and "free" in words:
            header = words[words.index("total") :]
            at = find_time(line) or at
            continue
        if "Mem:" not in words or not header:
            at = find_time(line) or at
            continue
        cells = words[words.index("Mem:") + 1 :]
        total = _human(cells[0]) if cells else None
        if total is None:
            continue
        factor = 1 if _HUMAN.match(cells[0]) and not cells[0].isdigit() else free_unit(total)
        names = {name: f"{name}_bytes" for name in ("total", "used", "free", "available")} | {"shared": "shmem_bytes"}
        values: dict[str, Any] = {}
        for name, cell in zip(header, cells, strict=False):
            amount = _human(cell)
            if name in names and amount is not None:
                values[names[name]] = round(amount * factor)
        yield MemoryReading(where=SourceLine(path, number), at=find_time(line) or at, text=line[:300], **values)


def _human(cell: str) -> float | None:
    match = _HUMAN.match(cell)
    if match is None:
        return None
    amount = _float(match[1].replace(",", "."))
    return amount * (HUMAN_SUFFIXES[match[2]] if match[2] else 1) if amount is not None else None


def _vmstat(path: str, lines: list[str]) -> Iterator[MemoryReading]:
    header: list[str] = []
    found: list[tuple[int, str, dict[str, str]]] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if "swpd" in words and "free" in words and "buff" in words:
            header = words
        elif header and len(words) >= len(header) - 2 and words[0].isdigit():
            found.append((number, line, dict(zip(header, words, strict=False))))
    most = max(
        (sum(_float(row.get(key, "")) or 0 for key in ("free", "buff", "cache")) for *_, row in found), default=0
    )
    factor = vmstat_unit(most)
    for number, line, row in found:
        free, swap = _float(row.get("free", "")), _float(row["swpd"])
        if free is None:
            continue
        yield MemoryReading(
            where=SourceLine(path, number),
            at=find_time(line),
            free_bytes=round(free * factor),
            swap_used_bytes=round((swap or 0) * factor),
            text=line[:300],
        )


def vmstat_unit(most: float) -> int:
    """The unit of ``vmstat``'s numbers, which its output does not name: KiB, or MiB under ``-S M``.

    Judged by the most that was ever free or cached: below 2,000,000 it is MiB (2 GB in KiB would be no server's).
    """
    return MIB if 0 < most < 2e6 else KIB


def _rows(path: str, lines: list[str], row: re.Pattern[str], *, begins: str = "") -> Iterator[MemoryReading]:
    """Readings of one row a value: name, number, and the unit or the epoch time.

    The next reading begins where its first row, or any row (``begins`` is empty), comes again.
    """
    rows: dict[str, re.Match[str]] = {}
    line_of_first = 0
    at = next_at = None
    for number, line in enumerate(lines, 1):
        match = row.match(line)
        if match is None:
            next_at = find_time(line) or next_at
            continue
        if match[1] in rows and begins in ("", match[1]):
            yield from _reading(path, line_of_first, at, rows)
            rows = {}
        if not rows:
            line_of_first, at, next_at = number, next_at, None
        rows[match[1]] = match
        if row is _NODE and match[3]:
            at = _epoch(match[3])
    yield from _reading(path, line_of_first, at, rows)


def _reading(path: str, line: int, at: datetime | None, rows: dict[str, re.Match[str]]) -> Iterator[MemoryReading]:
    in_kib = any(match.re is _MEMINFO for match in rows.values())
    if not rows or (in_kib and "MemTotal" not in rows):
        return
    counts = {name: round(_float(match[2]) or 0) for name, match in rows.items()}
    sizes = {name: count * KIB if in_kib else count for name, count in counts.items()}
    page = sizes.get("Hugepagesize", 0)
    shown = ("MemTotal", "MemAvailable", "Shmem", "HugePages_Total")
    yield MemoryReading(
        where=SourceLine(path, line),
        at=at,
        total_bytes=sizes.get("MemTotal"),
        available_bytes=sizes.get("MemAvailable"),
        free_bytes=sizes.get("MemFree"),
        shmem_bytes=sizes.get("Shmem"),
        swap_used_bytes=sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0) if "SwapTotal" in sizes else None,
        hugepages_total_bytes=counts["HugePages_Total"] * page if "HugePages_Total" in counts else None,
        hugepages_free_bytes=counts["HugePages_Free"] * page if "HugePages_Free" in counts else None,
        text="  ".join(f"{name} {counts[name]}" for name in shown if name in counts),
    )


def lowest(samples: Iterable[MemoryReading], value: Callable[[MemoryReading], int | None]) -> MemoryReading | None:
    """The sample with the smallest known value."""
    known = [sample for sample in samples if value(sample) is not None]
    return min(known, key=lambda sample: value(sample) or 0, default=None)
