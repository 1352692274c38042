"""What a log can say: one frozen class for each kind of statement.

Every size is in bytes, whatever unit the log printed: host-pool messages count GB = 1e9, device-pool messages print
2**30 bytes under the name "GB". A field that the line does not carry is ``None``.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from hicache_lab.sglang.launch.config import LaunchConfig

T = TypeVar("T")


def _unchangeable(entries: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(entries)


# an event can be sent to another process and copied
copyreg.pickle(MappingProxyType, lambda mapping: (_unchangeable, (dict(mapping),)))
NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, order=True)
class SourceLine:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, order=True)
class Rank:
    """The rank tags of a record's prefix, in the order of the log: ``DP0 TP3`` is ``(("dp", 0), ("tp", 3))``.

    Tags are a set of names: an unknown name is kept. Processes without a rank (HTTP, tokenizer, a single GPU from
    0.4.7 on) have no tag.
    """

    tags: tuple[tuple[str, int], ...] = ()

    def get(self, name: str) -> int | None:
        """The number of one tag (``"tp"``), or None."""
        return dict(self.tags).get(name)

    @property
    def label(self) -> str:
        """The tags as SGLang prints them; empty for a process without a rank."""
        return " ".join(f"{name.upper()}{number}" for name, number in self.tags)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _event(kind: type[T]) -> type[T]:
    """Like ``dataclass``; the classes share one ``repr``, because making two dozen of them costs each start 25 ms."""
    return dataclass(frozen=True, slots=True, kw_only=True, repr=False)(kind)


@_event
class Event:
    """One recognised statement.

    Attributes:
        where: file and line of its first line.
        at: the record's own time, as printed (no zone); None if the line carries none.
        rank: the rank that printed it.
        text: the message without its prefix.
        prefix: the record's own prefix as printed, for quoting the line.
        variant: the entry of the pattern table that recognised it.

    A class says of its kind of statement:
        kind: its name in JSON and in ``Run.counts``.
        only_sglang: nobody but an SGLang server says it.
        is_error: something failed.
        is_per_rank: every rank says it, so its prefix shows which ranks there are.
        headline: what a timeline calls it; empty for what no timeline shows.
    """

    kind: ClassVar[str] = "event"
    only_sglang: ClassVar[bool] = False
    is_error: ClassVar[bool] = False
    is_per_rank: ClassVar[bool] = False
    headline: ClassVar[str] = ""
    where: SourceLine
    at: datetime | None = None
    rank: Rank = Rank()
    text: str = ""
    variant: str = ""
    prefix: str = ""

    @property
    def is_servers_own(self) -> bool:
        """Whether only an SGLang server says this: by the statement, or by a rank in the record's prefix.

        A traceback, an access log or a kernel line alone does not make an SGLang log.
        """
        return self.only_sglang or bool(self.rank.tags)

    def __repr__(self) -> str:
        values = (f"{each.name}={getattr(self, each.name)!r}" for each in fields(self))
        return f"{type(self).__name__}({', '.join(values)})"


@_event
class ServerArgs(Event):
    """The server's arguments after resolution: ``args`` as printed, for quoting; ``launch`` to compute with."""

    kind = "server_args"
    only_sglang = True
    args: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False)
    launch: LaunchConfig | None = None


_ONLY_SGLANG_MILESTONES = frozenset(
    "ready weights_begin weights_end dist_begin dist_end memory_baseline pool_end tree_init graph_begin graph_end "
    "timings".split()
)


@_event
class Milestone(Event):
    """A step of the start-up or the shut-down: ``name`` says which."""

    kind = "milestone"
    is_per_rank = True
    name: str
    label: str | None = None
    avail_bytes: int | None = None
    usage_bytes: int | None = None
    elapsed_s: float | None = None
    model_type: str | None = None
    dtype: str | None = None
    quant: str | None = None
    backend: str | None = None
    impl: str | None = None
    hicache_attached: bool | None = None
    load_weight_s: float | None = None
    kv_cache_allocation_s: float | None = None
    scheduler_e2e_s: float | None = None
    commit_s: float | None = None
    window_s: float | None = None
    total_s: float | None = None
    batch_sizes: tuple[int, ...] | None = None

    @property
    def is_servers_own(self) -> bool:
        """By its process, its name or its rank."""
        return bool(self.rank.tags) or self.name in _ONLY_SGLANG_MILESTONES


@_event
class DevicePool(Event):
    """A pool on the device. ``final`` is false for an upper bound of address space, which is not an allocation."""

    kind = "device_pool"
    only_sglang = True
    is_per_rank = True
    pool: str = "kv"
    tokens: int | None = None
    swa_tokens: int | None = None
    states: int | None = None
    k_bytes: int | None = None
    v_bytes: int | None = None
    kv_bytes: int | None = None
    conv_bytes: int | None = None
    ssm_bytes: int | None = None
    intermediate_ssm_bytes: int | None = None
    intermediate_conv_bytes: int | None = None
    avail_bytes: int | None = None
    dtype: str | None = None
    final: bool = True

    @property
    def bytes(self) -> int | None:
        """All parts together, or None where the line carries no size."""
        parts = [self.k_bytes, self.v_bytes, self.kv_bytes, self.conv_bytes, self.ssm_bytes]
        parts += [self.intermediate_ssm_bytes, self.intermediate_conv_bytes]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


@_event
class Capacity(Event):
    """The scheduler's capacity line; ``max_total_num_tokens`` is the device tokens of one rank."""

    kind = "capacity"
    only_sglang = True
    is_per_rank = True
    max_total_num_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    available_gpu_bytes: int | None = None
    available_cpu_bytes: int | None = None


@_event
class HostPool(Event):
    """One host pool of one rank: the line is printed before the memory is taken."""

    kind = "host_pool"
    only_sglang = True
    is_per_rank = True
    pool: str
    bytes: int
    tokens: int | None = None
    slots: int | None = None
    layout: str | None = None
    target_layers: int | None = None
    draft_layers: int | None = None
    total_layers: int | None = None


@_event
class HostRefusal(Event):
    """The server's own check refused a host pool; what ``free_bytes`` means depends on the release."""

    kind = "host_refusal"
    only_sglang = True
    is_error = True
    is_per_rank = True
    headline = "host pool refused"
    pool: str = "kv"
    requested_bytes: int | None = None
    free_bytes: int | None = None


@_event
class HostSmaller(Event):
    """The host pool is not larger than the device pool: an assertion up to 0.5.14, a warning later."""

    kind = "host_smaller"
    only_sglang = True
    headline = "host pool not larger than the device pool"
    pool: str = "kv"
    host_tokens: int | None = None
    device_tokens: int | None = None
    fatal: bool = False


@_event
class HostSizing(Event):
    """The server sized or adjusted the host tier itself, or printed the memory it saw."""

    kind = "host_sizing"
    only_sglang = True
    name: str
    ratio_from: float | None = None
    ratio_to: float | None = None
    budget_bytes: int | None = None
    fraction: float | None = None
    ranks: int | None = None
    pools_bytes: int | None = None
    host_bytes: int | None = None
    cgroup_bytes: int | None = None
    tokens_from: int | None = None
    tokens_to: int | None = None


@_event
class PinFailure(Event):
    """The driver refused to pin or register host memory."""

    kind = "pin_failure"
    only_sglang = True
    is_error = True
    headline = "pinning failed"
    rc: int | None = None
    offset: int | None = None
    size_bytes: int | None = None
    total_bytes: int | None = None


@_event
class SettingChanged(Event):
    """The server changed a setting that the user gave."""

    kind = "rewrite"
    only_sglang = True
    setting: str
    value: str | None = None
    io_backend: str | None = None


@_event
class HostPressure(Event):
    """The host tier could not take or give back tokens."""

    kind = "host_pressure"
    only_sglang = True
    headline = "host tier too full"
    name: str
    tokens: int | None = None
    evictable: int | None = None
    node: int | None = None
    rid: str | None = None


@_event
class Storage(Event):
    """The third tier: prefetch, backup, and their failures."""

    kind = "storage"
    only_sglang = True
    name: str
    state: str | None = None
    rid: str | None = None
    page: str | None = None
    completed: int | None = None
    matched: int | None = None
    loaded: int | None = None
    occupied: int | None = None
    requested: int | None = None
    pages: int | None = None
    tokens: int | None = None
    elapsed_s: float | None = None


@_event
class Batch(Event):
    """A prefill or decode line. ``other`` keeps every field that has no attribute of its own, by column name."""

    kind = "batch"
    only_sglang = True
    is_per_rank = True
    phase: str
    iteration: int | None = None
    running_req: int | None = None
    queue_req: int | None = None
    token: int | None = None
    new_seq: int | None = None
    new_token: int | None = None
    cached_token: int | None = None
    token_usage: float | None = None
    full_token_usage: float | None = None
    swa_token_usage: float | None = None
    gen_throughput: float | None = None
    input_throughput: float | None = None
    graph: bool | None = None
    other: Mapping[str, float] = field(default_factory=lambda: NOTHING, hash=False)


@_event
class Retraction(Event):
    """The device pool was full and running requests were put back into the queue."""

    kind = "retraction"
    only_sglang = True
    headline = "requests retracted"
    retracted: int | None = None
    aborted: int | None = None
    tokens_gained: int | None = None
    ratio_from: float | None = None
    ratio_to: float | None = None


@_event
class TokenShortage(Event):
    """The device pool could not give the tokens a batch needed (``phase``: decode, prefill, start or last)."""

    kind = "token_shortage"
    only_sglang = True
    is_error = True
    headline = "no device tokens"
    phase: str
    requested: int | None = None
    available: int | None = None


@_event
class RequestRejected(Event):
    """A request that was turned away, or a flush refused because requests were pending."""

    kind = "turned_away"
    only_sglang = True
    name: str
    input_tokens: int | None = None
    max_tokens: int | None = None
    running_req: int | None = None
    queue_req: int | None = None


@_event
class Failure(Event):
    """An exception, or the statement that a process hit one."""

    kind = "failure"
    is_error = True
    headline = "exception"
    exception: str | None = None
    message: str | None = None
    process: str | None = None

    @property
    def is_servers_own(self) -> bool:
        """By its process, its name or its rank."""
        return bool(self.rank.tags) or self.process is not None


@_event
class GpuOom(Event):
    """The device allocator had no room."""

    kind = "gpu_oom"
    is_error = True
    headline = "GPU out of memory"
    tried_bytes: int | None = None
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@_event
class ProcessDeath(Event):
    """A process of the server died; only ``exit_code`` says how, the hint in the text is printed for every code."""

    kind = "process_death"
    only_sglang = True
    is_error = True
    headline = "process died"
    index: int | None = None
    name: str | None = None
    pid: int | None = None
    exit_code: int | None = None

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it (−9 from Python, 137 from a shell or a container runtime)."""
        return self.exit_code in (-9, 137)


@_event
class Stall(Event):
    """Somebody stopped waiting: watchdog, health check, collective operation."""

    kind = "stall"
    is_error = True
    headline = "somebody stopped waiting"
    name: str
    process: str | None = None
    timeout_s: float | None = None
    soft: bool | None = None
    index: int | None = None
    op: str | None = None

    @property
    def is_servers_own(self) -> bool:
        """By its process, its name or its rank."""
        return bool(self.rank.tags) or self.name in ("sigquit", "watchdog", "health_check")


@_event
class KernelOom(Event):
    """The kernel killed a process for memory (``cgroup``: a control group's limit, not the host's).

    ``reporter`` is "systemd", "Kubernetes" or "Docker" where one of these says so; None for the kernel's own line.
    """

    kind = "kernel_oom"
    is_error = True
    reporter: str | None = None
    pid: int | None = None
    comm: str | None = None
    cgroup: bool = False
    total_vm_bytes: int | None = None
    anon_rss_bytes: int | None = None
    file_rss_bytes: int | None = None
    shmem_rss_bytes: int | None = None
    uptime_s: float | None = None

    @property
    def resident_bytes(self) -> int | None:
        """What the process held when it was killed."""
        known = [b for b in (self.anon_rss_bytes, self.file_rss_bytes, self.shmem_rss_bytes) if b is not None]
        return sum(known) if known else None


@_event
class Defunct(Event):
    """A zombie in a process listing."""

    kind = "defunct"
    is_error = True
    pid: int | None = None
    comm: str | None = None


@_event
class RequestStats(Event):
    """The times of one request."""

    kind = "request_stats"
    only_sglang = True
    rid: str | None = None
    input_len: int | None = None
    cached_input_len: int | None = None
    output_len: int | None = None
    queue_ms: float | None = None
    forward_ms: float | None = None


@_event
class Access(Event):
    """One line of the HTTP access log."""

    kind = "access"
    client: str | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None
