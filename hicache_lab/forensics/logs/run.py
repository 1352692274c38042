"""One launch of a server as a log shows it: its events, and sums over its batch lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hicache_lab.forensics.logs import events as ev
from hicache_lab.forensics.logs.fingerprints import ReleaseRange, release_range

if TYPE_CHECKING:
    from hicache_lab.forensics.logs.rows import BatchRows
    from hicache_lab.sglang.launch.config import LaunchConfig

# events of one kind kept with their text; the rest is only counted
KEEP = 1000
_USAGES = ("token_usage", "full_token_usage", "swa_token_usage", "gpu_token_usage", "mamba_usage")
_E = TypeVar("_E", bound=ev.Event)


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest value of a column and the first line that shows it."""

    value: float
    where: ev.SourceLine


@dataclass
class BatchStats:
    """Sums over the batch lines of a run. Decode lines that come first after idling are left out of the throughput:
    SGLang averages since the previous decode line, so theirs includes the pause."""

    prefill: int = 0
    decode: int = 0
    fresh: int = 0
    cached_by_rank: Counter[str] = field(default_factory=Counter)
    new_by_rank: Counter[str] = field(default_factory=Counter)
    throughput_sum: float = 0.0
    throughput_max: float = 0.0
    throughput_lines: int = 0
    peaks: dict[str, Peak] = field(default_factory=dict)
    by_rank: Counter[str] = field(default_factory=Counter)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the cache; a batch that several TP ranks print is counted once."""
        return _once(self.cached_by_rank)

    @property
    def new_tokens(self) -> int:
        """Prompt tokens computed; a batch that several TP ranks print is counted once."""
        return _once(self.new_by_rank)

    @property
    def hit_ratio(self) -> float | None:
        """Cached tokens over all prompt tokens of the prefill lines (weighted by tokens)."""
        total = self.cached_tokens + self.new_tokens
        return self.cached_tokens / total if total else None

    @property
    def mean_throughput(self) -> float | None:
        """Mean of the decode lines' token/s, first lines after idling left out."""
        return self.throughput_sum / self.throughput_lines if self.throughput_lines else None

    def peak(self, name: str, value: float, where: ev.SourceLine) -> None:
        """Take a candidate for the largest value of a column."""
        known = self.peaks.get(name)
        # rows come by phase, so a line that stands earlier may come later
        earlier = known is not None and value == known.value and where.file == known.where.file and where < known.where
        if known is None or value > known.value or earlier:
            self.peaks[name] = Peak(value, where)

    def add_rows(self, rows: BatchRows, path: str) -> None:
        """Take batch lines, ``path`` being the file they stand in."""
        counted = np.bincount(rows.tag)
        labels = {int(tag): rows.ranks[tag].label for tag in np.flatnonzero(counted)}
        for tag, label in labels.items():
            self.by_rank[label] += int(counted[tag])
        for name in ("running_req", "queue_req", *_USAGES):
            if name in rows.values:
                column = rows.values[name]
                # argmax stops at the first NaN
                best = int(column.argmax())
                if not math.isfinite(column[best]):
                    best = int(np.where(np.isfinite(column), column, -np.inf).argmax())
                value = float(column[best])
                if math.isfinite(value):
                    where = ev.SourceLine(path, rows.line(best))
                    if name in _USAGES:
                        self.peak("token_usage", value, where)
                    else:
                        self.peak(name, int(value), where)
        if rows.phase == "prefill":
            self.prefill += len(rows)
            for name, by_rank in (("cached_token", self.cached_by_rank), ("new_token", self.new_by_rank)):
                if name in rows.values:
                    sums = np.nan_to_num(np.bincount(rows.tag, weights=np.nan_to_num(rows.values[name])))
                    for tag, label in labels.items():
                        by_rank[label] += int(sums[tag])
            return
        self.decode += len(rows)
        self.fresh += int(rows.fresh.sum())
        if "gen_throughput" in rows.values:
            steady = rows.values["gen_throughput"][~rows.fresh]
            steady = steady[np.isfinite(steady)]
            self.throughput_lines += len(steady)
            # one after the other: the sum does not depend on how a log was cut into parts
            self.throughput_sum = float(np.cumsum(np.append(self.throughput_sum, steady))[-1])
            self.throughput_max = max(self.throughput_max, float(steady.max(initial=0.0)))


def _once(by_rank: Counter[str]) -> int:
    # with --enable-metrics-for-all-schedulers every TP rank prints the batches of its DP rank
    groups: dict[tuple[str, ...], int] = {}
    for label, tokens in by_rank.items():
        group = tuple(tag for tag in label.split() if tag.startswith(("DP", "PP")))
        groups[group] = max(groups.get(group, 0), tokens)
    return sum(groups.values())


@dataclass
class Run:
    """One launch. ``index`` counts from 1 over all streams; ``stream`` names the log it stands in."""

    index: int
    stream: str
    start: ev.SourceLine
    events: list[ev.Event] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    batches: BatchStats = field(default_factory=BatchStats)
    labels: dict[str, None] = field(default_factory=dict)
    first: datetime | None = None
    last: datetime | None = None
    lines: dict[str, str] = field(default_factory=dict)

    def add(self, event: ev.Event) -> None:
        """Take an event that is not a batch line."""
        self.counts[event.kind] += 1
        if self.counts[event.kind] <= KEEP:
            self.events.append(event)
        if event.rank.tags and event.is_per_rank:
            self.labels.setdefault(event.rank.label)
        if len(self.lines) < KEEP:
            self.lines.setdefault(event.variant + ":" + event.text[:60], event.text[:4000])
        self.saw(event.at)

    def saw(self, at: datetime | None) -> None:
        """Widen the run's time to include ``at``."""
        if at is not None:
            self.first = at if self.first is None or at < self.first else self.first
            self.last = at if self.last is None or at > self.last else self.last

    def of(self, kind: type[_E]) -> Iterator[_E]:
        """The kept events of one class, in the order of the log."""
        return (event for event in self.events if isinstance(event, kind))

    @property
    def args(self) -> Mapping[str, Any]:
        """The server arguments as printed, for quoting; empty if the log does not show them."""
        return next((event.args for event in self.of(ev.ServerArgs)), {})

    @property
    def launch(self) -> LaunchConfig | None:
        """The launch that the server arguments describe; its ``notes`` say what could not be read of it."""
        return next((event.launch for event in self.of(ev.ServerArgs)), None)

    @property
    def releases(self) -> ReleaseRange | None:
        """The releases whose wording fits all lines of the run (None: no single one does)."""
        return release_range((key.partition(":")[0], text) for key, text in self.lines.items())

    @property
    def expected_ranks(self) -> int | None:
        """Scheduler processes of the launch on the host of this log."""
        return self.launch.processes_per_host if self.launch and self.launch.tp_size else None

    @property
    def ranks_seen(self) -> list[str]:
        """Labels of the ranks that spoke; ``""`` alone stands for the one scheduler of an untagged log."""
        labels = {*self.labels, *self.batches.by_rank} - {""}
        if labels:
            return sorted(labels, key=lambda label: [(len(part), part) for part in label.split()])
        alone = any(event.is_per_rank for event in self.events) or self.batches.by_rank
        return [""] if alone else []

    @property
    def ranks(self) -> int | None:
        """Processes that hold a host pool: as launched if known, else the tagged ranks in the log."""
        return self.expected_ranks or (len(self.ranks_seen) or None)

    def milestone(self, name: str) -> ev.Milestone | None:
        """The first milestone of a name."""
        return next((event for event in self.of(ev.Milestone) if event.name == name), None)

    @property
    def host_pools(self) -> list[ev.HostPool]:
        """Host pools in the order of the log."""
        return list(self.of(ev.HostPool))

    def host_bytes_by_rank(self) -> dict[str, int]:
        """Bytes of all host pools of each rank that said so."""
        found: dict[str, int] = {}
        for pool in self.host_pools:
            found[pool.rank.label] = found.get(pool.rank.label, 0) + pool.bytes
        return found

    @property
    def host_bytes(self) -> int:
        """Host pools of all ranks seen, together."""
        return sum(self.host_bytes_by_rank().values())

    @property
    def projected_host_bytes(self) -> int:
        """Host pools of all ranks of the launch: ranks that did not say take the largest that did."""
        by_rank = self.host_bytes_by_rank()
        if not by_rank:
            return 0
        missing = max((self.ranks or 0) - len(by_rank), 0)
        return sum(by_rank.values()) + missing * max(by_rank.values())

    @property
    def device_tokens(self) -> int | None:
        """Device tokens of one rank: the capacity line, else the largest final pool."""
        for capacity in self.of(ev.Capacity):
            if capacity.max_total_num_tokens is not None:
                return capacity.max_total_num_tokens
        return max((p.tokens for p in self.of(ev.DevicePool) if p.final and p.tokens is not None), default=None)

    @property
    def host_tokens(self) -> int | None:
        """Tokens of one rank's host KV pool where the log prints them."""
        return max((p.tokens for p in self.host_pools if p.tokens is not None), default=None)
