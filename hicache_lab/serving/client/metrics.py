"""/metrics as numbers that mean the same in every release.

Renames are followed, ``sglang_`` is read as ``sglang:`` (exporters replace the colon), and tokens are counted
once: ranks of one tensor-parallel group hold the same logical tokens, and ``cached_tokens_total`` carries a
``total`` series beside its parts in some releases.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hicache_lab.base.errors import ServerError
from hicache_lab.serving.client.untrusted import number, printable

# old name → the name of today; the release of the change is in brackets
RENAMED = {
    "num_prefill_infight_queue_reqs": "num_prefill_inflight_queue_reqs",  # 0.5.2
    "num_prefill_prealloc_queue_reqs": "num_prefill_bootstrap_queue_reqs",  # 0.5.12
    "total_retracted_reqs": "num_retracted_reqs",  # 0.5.2
    "queue_time_s": "queue_time_seconds",  # 0.5.3
    "gpu_execution_seconds_total": "forward_execution_seconds_total",  # 0.5.11
    "engine_load_weights_time": "weight_load_duration_seconds",  # 0.5.13
    "engine_startup_time": "startup_time_seconds",  # 0.5.17
}
_SUFFIX = re.compile(r"_(bucket|sum|count)$")
_RANK_LABELS = ("tp_rank", "pp_rank")


@dataclass(frozen=True)
class Sample:
    """One line of the exposition, under the name of today and without the ``sglang:`` prefix."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens found in a cache, by tier; None where the server does not tell the tier."""

    total: int
    device: int | None = None
    host: int | None = None
    storage: int | None = None


@dataclass(frozen=True)
class MetricsSnapshot:
    """All samples of one scrape that are of SGLang's own families."""

    samples: tuple[Sample, ...]

    def select(self, name: str, **labels: str) -> Iterator[Sample]:
        """Samples of a name whose labels include the given ones."""
        for sample in self.samples:
            if sample.name == name and all(sample.labels.get(k) == v for k, v in labels.items()):
                yield sample

    def has(self, name: str) -> bool:
        """Whether the server exports this name (a counter appears only after its first count)."""
        return any(sample.name == name for sample in self.samples)

    def per_rank(self, name: str) -> dict[str, float]:
        """Values by rank, e.g. ``{"tp0": 8193.0}``; other labels are summed."""
        by_rank: dict[str, float] = defaultdict(float)
        for sample in self._once(name):
            parts = [("dp", "dp_rank"), ("pp", "pp_rank"), ("tp", "tp_rank")]
            key = " ".join(f"{short}{sample.labels[label]}" for short, label in parts if sample.labels.get(label))
            by_rank[key or "all"] += sample.value
        return dict(by_rank)

    def gauge(self, name: str) -> float | None:
        """A per-rank gauge as one number, the largest (ranks agree); None if not exported."""
        values = self.per_rank(name).values()
        return max(values) if values else None

    def logical(self, name: str, processes_per_replica: int) -> float | None:
        """A token counter counted once per data-parallel replica and summed over replicas.

        With rank labels (0.5.18 on for the cache's own counters) the ranks of a replica repeat each other:
        the largest counts. Without them the processes' counters were already added up by the exporter: the
        sum is divided.

        Args:
            name: e.g. ``evicted_tokens_total``.
            processes_per_replica: ``ServerInfo.processes_per_replica``.

        Returns:
            Tokens, or None if the server has not counted any yet or does not know the name.
        """
        replicas: dict[str, list[float]] = defaultdict(list)
        unlabelled = 0.0
        ranks: dict[tuple[str, str], float] = defaultdict(float)
        for sample in self._once(name):
            if any(label in sample.labels for label in _RANK_LABELS):
                rank = " ".join(sample.labels.get(label, "") for label in _RANK_LABELS)
                ranks[sample.labels.get("dp_rank", ""), rank] += sample.value
            else:
                unlabelled += sample.value
        for (replica, _), value in ranks.items():
            replicas[replica].append(value)
        if not self.has(name):
            return None
        return sum(max(values) for values in replicas.values()) + unlabelled / max(processes_per_replica, 1)

    def counter(self, name: str) -> float | None:
        """A counter of the front end (requests, prompt tokens): one process counts, so series add up."""
        return sum(sample.value for sample in self._once(name)) if self.has(name) else None

    @property
    def cached(self) -> CachedTokens | None:
        """Prompt tokens served from a cache since the start; None before the first.

        ``total`` is used only where the parts are missing (0.5.9 on has ``cache_source``; adding its
        ``total`` series to the others would count twice).
        """
        parts: dict[str, float] = defaultdict(float)
        for sample in self.select("cached_tokens_total"):
            source = sample.labels.get("cache_source", "total")
            parts["storage" if source.startswith("storage") else source] += sample.value
        if not parts:
            return None
        tiers = {name: int(parts[name]) for name in ("device", "host", "storage") if name in parts}
        return CachedTokens(sum(tiers.values()) if tiers else int(parts["total"]), **tiers)

    @property
    def host_total_tokens(self) -> int | None:
        """Host pool of one rank in tokens (from 0.5.10); None where the release or the server has none."""
        value = self.gauge("hicache_host_total_tokens")
        return None if value is None else int(value)

    @property
    def host_used_tokens(self) -> int | None:
        """Tokens in the host pool of one rank."""
        value = self.gauge("hicache_host_used_tokens")
        return None if value is None else int(value)

    def _once(self, name: str) -> Iterator[Sample]:
        """Without the series that repeat others: every priority beside their sum (from 0.5.10)."""
        samples = list(self.select(name))
        has_sum = any(sample.labels.get("priority") == "" for sample in samples)
        for sample in samples:
            if not has_sum or sample.labels.get("priority", "") == "":
                yield sample


def parse_metrics(text: str) -> MetricsSnapshot:
    """Read a scrape, or a saved one.

    Raises:
        ServerError: not a Prometheus exposition, or none of SGLang's families in it.
    """
    from prometheus_client.parser import text_string_to_metric_families

    exposed: list[Sample] = []
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                # a gauge may be NaN, which is not a count of anything
                if sample.name.startswith(("sglang:", "sglang_")) and number(sample.value) is not None:
                    labels = MappingProxyType(dict(sample.labels))
                    exposed.append(Sample(sample.name[len("sglang:") :], labels, sample.value))
    except (ValueError, KeyError, IndexError) as error:
        raise ServerError(f"its /metrics is not a Prometheus exposition: {printable(str(error))[:120]}") from None
    if not exposed:
        raise ServerError("its /metrics has no sglang: series; is this a router or another server?")
    return MetricsSnapshot(tuple(_under_todays_names(exposed)))


def _under_todays_names(exposed: Sequence[Sample]) -> Iterator[Sample]:
    """Old names become today's, unless the release exports both (0.5.2 does for retracted requests)."""
    present = {sample.name for sample in exposed}
    for sample in exposed:
        suffix = _SUFFIX.search(sample.name)
        stem, ending = (sample.name[: suffix.start()], suffix[0]) if suffix else (sample.name, "")
        today = RENAMED.get(sample.name) or (RENAMED[stem] + ending if stem in RENAMED else None)
        if today is not None and today not in present:
            yield Sample(today, sample.labels, sample.value)
        else:
            yield sample
        if sample.name == "cache_config_info":  # 0.5.9 and 0.5.10 put the numbers into labels
            for name in ("page_size", "num_pages"):
                if sample.labels.get(name, "").isdigit():
                    yield Sample(name, MappingProxyType({}), float(sample.labels[name]))
