"""What a log can say: one frozen class for each kind of statement.

Every size is in bytes, whatever unit the log printed: host-pool messages count GB = 1e9, device-pool messages print
2**30 bytes under the name "GB". A field that the line does not carry is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from hicache_lab.forensics.logs.event import NOTHING, event_kind
from hicache_lab.forensics.logs.event import Event as Event  # noqa: PLC0414 - a name of this module, too
from hicache_lab.forensics.logs.event import Rank as Rank  # noqa: PLC0414 - a name of this module, too
from hicache_lab.forensics.logs.event import SourceLine as SourceLine  # noqa: PLC0414 - a name of this module, too

if TYPE_CHECKING:
    from hicache_lab.sglang.launch.config import LaunchConfig


@event_kind("server_args", only_sglang=True)
class ServerArgs(Event):
    """The server's arguments after resolution: ``args`` as printed, for quoting; ``launch`` to compute with."""

    args: Mapping[str, Any] = field(default_factory=lambda: NOTHING, hash=False)
    launch: LaunchConfig | None = None


@event_kind("milestone", only_sglang=True, is_per_rank=True)
class Milestone(Event):
    """A step of the start-up or the shut-down: ``name`` says which."""

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


@event_kind("device_pool", only_sglang=True, is_per_rank=True)
class DevicePool(Event):
    """A pool on the device. ``final`` is false for an upper bound of address space, which is not an allocation."""

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
        return sum(part or 0 for part in parts) if parts != [None] * len(parts) else None


@event_kind("capacity", only_sglang=True, is_per_rank=True)
class Capacity(Event):
    """The scheduler's capacity line; ``max_total_num_tokens`` is the device tokens of one rank."""

    max_total_num_tokens: int | None = None
    chunked_prefill_size: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    context_len: int | None = None
    available_gpu_bytes: int | None = None
    available_cpu_bytes: int | None = None


@event_kind("host_pool", only_sglang=True, is_per_rank=True)
class HostPool(Event):
    """One host pool of one rank: the line is printed before the memory is taken."""

    pool: str
    bytes: int
    tokens: int | None = None
    slots: int | None = None
    layout: str | None = None
    target_layers: int | None = None
    draft_layers: int | None = None
    total_layers: int | None = None


@event_kind("host_refusal", "host pool refused", only_sglang=True, is_error=True, is_per_rank=True)
class HostRefusal(Event):
    """The server's own check refused a host pool; what ``free_bytes`` means depends on the release."""

    pool: str = "kv"
    requested_bytes: int | None = None
    free_bytes: int | None = None


@event_kind("host_smaller", "host pool not larger than the device pool", only_sglang=True)
class HostSmaller(Event):
    """The host pool is not larger than the device pool: an assertion up to 0.5.14, a warning later."""

    pool: str = "kv"
    host_tokens: int | None = None
    device_tokens: int | None = None
    fatal: bool = False


@event_kind("host_sizing", only_sglang=True)
class HostSizing(Event):
    """The server sized or adjusted the host tier itself, or printed the memory it saw."""

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


@event_kind("pin_failure", "pinning failed", only_sglang=True, is_error=True)
class PinFailure(Event):
    """The driver refused to pin or register host memory."""

    rc: int | None = None
    offset: int | None = None
    size_bytes: int | None = None
    total_bytes: int | None = None


@event_kind("rewrite", only_sglang=True)
class SettingChanged(Event):
    """The server changed a setting that the user gave."""

    setting: str
    value: str | None = None
    io_backend: str | None = None


@event_kind("host_pressure", "host tier too full", only_sglang=True)
class HostPressure(Event):
    """The host tier could not take or give back tokens."""

    name: str
    tokens: int | None = None
    evictable: int | None = None
    node: int | None = None
    rid: str | None = None


@event_kind("storage", only_sglang=True)
class Storage(Event):
    """The third tier: prefetch, backup, and their failures."""

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


@event_kind("batch", only_sglang=True, is_per_rank=True)
class Batch(Event):
    """A prefill or decode line. ``other`` keeps every field that has no attribute of its own, by column name."""

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


@event_kind("retraction", "requests retracted", only_sglang=True)
class Retraction(Event):
    """The device pool was full and running requests were put back into the queue."""

    retracted: int | None = None
    aborted: int | None = None
    tokens_gained: int | None = None
    ratio_from: float | None = None
    ratio_to: float | None = None


@event_kind("token_shortage", "no device tokens", only_sglang=True, is_error=True)
class TokenShortage(Event):
    """The device pool could not give the tokens a batch needed (``phase``: decode, prefill, start or last)."""

    phase: str
    requested: int | None = None
    available: int | None = None


@event_kind("turned_away", only_sglang=True)
class RequestRejected(Event):
    """A request that was turned away, or a flush refused because requests were pending."""

    name: str
    input_tokens: int | None = None
    max_tokens: int | None = None
    running_req: int | None = None
    queue_req: int | None = None


@event_kind("failure", "exception", is_error=True)
class Failure(Event):
    """An exception, or the statement that a process hit one."""

    exception: str | None = None
    message: str | None = None
    process: str | None = None

    @property
    def is_servers_own(self) -> bool:
        """By its process or its rank."""
        return bool(self.rank.tags) or self.process is not None


@event_kind("gpu_oom", "GPU out of memory", is_error=True)
class GpuOom(Event):
    """The device allocator had no room."""

    tried_bytes: int | None = None
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@event_kind("process_death", "process died", only_sglang=True, is_error=True)
class ProcessDeath(Event):
    """A process of the server died; only ``exit_code`` says how, the hint in the text is printed for every code."""

    index: int | None = None
    name: str | None = None
    pid: int | None = None
    exit_code: int | None = None

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it (−9 from Python, 137 from a shell or a container runtime)."""
        return self.exit_code in (-9, 137)


@event_kind("stall", "somebody stopped waiting", only_sglang=True, is_error=True)
class Stall(Event):
    """Somebody stopped waiting: watchdog, health check, collective operation."""

    name: str
    process: str | None = None
    timeout_s: float | None = None
    soft: bool | None = None
    index: int | None = None
    op: str | None = None


@event_kind("kernel_oom", is_error=True)
class KernelOom(Event):
    """The kernel killed a process for memory (``cgroup``: a control group's limit, not the host's).

    ``reporter`` is "systemd", "Kubernetes" or "Docker" where one of these says so; None for the kernel's own line.
    """

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


@event_kind("defunct", is_error=True)
class Defunct(Event):
    """A zombie in a process listing."""

    pid: int | None = None
    comm: str | None = None


@event_kind("request_stats", only_sglang=True)
class RequestStats(Event):
    """The times of one request."""

    rid: str | None = None
    input_len: int | None = None
    cached_input_len: int | None = None
    output_len: int | None = None
    queue_ms: float | None = None
    forward_ms: float | None = None


@event_kind("access")
class Access(Event):
    """One line of the HTTP access log."""

    client: str | None = None
    method: str | None = None
    path: str | None = None
    status: int | None = None
