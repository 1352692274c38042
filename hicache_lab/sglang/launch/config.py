"""The launch configuration: SGLang's own flag names, as given; ``None`` is "not given"."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args, get_type_hints

from hicache_lab.base.display import one_line
from hicache_lab.base.errors import UsageError

Value = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Container:
    """What the docker, compose or Kubernetes wrapping says that matters for memory."""

    runtime: str
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    image: str | None = None

    @property
    def image_tag(self) -> str | None:
        """The image's tag, e.g. ``v0.5.8-cu126``; a fact about the paste, not a proof of the release."""
        if self.image is None:
            return None
        name = self.image.partition("@")[0].rpartition("/")[2]
        return name.partition(":")[2] or None


def inherits_environment(container: Container | None) -> bool:
    """Whether the server gets the environment of the shell around it: a bare command, a Slurm step, a systemd scope."""
    return container is None or container.runtime in {"slurm", "systemd-scope"}


@dataclass(frozen=True)
class TypedOption:
    """One option as it was typed.

    Attributes:
        spelling: the option as written; empty for the model of ``sglang serve MODEL``.
        name: the whole option name it stands for.
        values: the values after it.
        raw: its text with values and quotes.
        lead: what stands before it: a blank, or a continued line and its indentation.
        field: the ``LaunchConfig`` field it sets, or None.
        from_file: it comes from a ``--config`` file.
    """

    spelling: str
    name: str
    values: tuple[str, ...]
    raw: str
    lead: str = " "
    field: str | None = None
    from_file: bool = False

    @property
    def value(self) -> Value:
        """Its values as ``LaunchConfig.other`` keeps them."""
        return self.values[0] if len(self.values) == 1 else self.values or None


@dataclass(frozen=True)
class LaunchSource:
    """Where a configuration came from, kept so that the corrected line looks like the pasted one."""

    kind: str
    prefix: str = ""
    options: tuple[TypedOption, ...] = ()


@dataclass(frozen=True)
class Rejection:
    """Why the server itself would refuse a flag before it loads anything."""

    flag: str
    message: str


@dataclass(frozen=True)
class LaunchConfig:
    """One SGLang server launch.

    Every flag field has the server's own name and is ``None`` when it was not given (a release's default is
    applied by the release's rules, not here). ``hicache_size`` is GB (1e9 bytes) per rank.

    Attributes:
        other: options without a field of their own, in order, each with its value, its values, or None.
        env: environment assignments seen with the launch.
        container: what the wrapping says; None for a bare command.
        notes: what a reader should know about the paste (not compared).
        source: the pasted text, for ``render`` (not compared).
    """

    model: str | None = None
    sglang_version: str | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    dp_size: int | None = None
    attn_dp_size: int | None = None
    attn_cp_size: int | None = None
    dcp_size: int | None = None
    ep_size: int | None = None
    enable_dp_attention: bool | None = None
    nnodes: int | None = None
    node_rank: int | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    mem_fraction_static: float | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    context_length: int | None = None
    disable_radix_cache: bool | None = None
    enable_hierarchical_cache: bool | None = None
    hicache_ratio: float | None = None
    hicache_size: float | int | None = None
    hicache_host_memory_fraction: float | None = None
    hicache_host_memory_mode: str | None = None
    hicache_write_policy: str | None = None
    hicache_io_backend: str | None = None
    hicache_mem_layout: str | None = None
    hicache_storage_backend: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    enable_lmcache: bool | None = None
    enable_hisparse: bool | None = None
    enable_unified_memory: bool | None = None
    enable_kv_cache_sharding: bool | None = None
    cpu_offload_gb: int | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    swa_full_tokens_ratio: float | None = None
    mamba_full_memory_ratio: float | None = None
    max_mamba_cache_size: int | None = None
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None
    disaggregation_mode: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    host: str | None = None
    port: int | None = None
    other: tuple[tuple[str, Value], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    container: Container | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    source: LaunchSource | None = field(default=None, compare=False, repr=False)

    @property
    def attention_dp_size(self) -> int:
        """Data-parallel attention groups inside the TP group: ``--attn-dp-size``, formerly ``--dp-size``.

        0.5.22+ reads ``--dp-size N --enable-dp-attention`` as ``--attn-dp-size N``
        (arg_groups/parallel_hook.py).
        """
        if self.enable_dp_attention and (self.attn_dp_size or 1) == 1:
            return self.dp_size or 1
        return self.attn_dp_size or 1

    @property
    def dp_replicas(self) -> int:
        """Whole engines side by side: ``--dp-size`` unless it means data-parallel attention."""
        return 1 if self.enable_dp_attention else self.dp_size or 1

    @property
    def ranks_per_engine(self) -> int:
        """Scheduler processes of one engine: tp × pp."""
        return (self.tp_size or 1) * (self.pp_size or 1)

    @property
    def processes(self) -> int:
        """Scheduler processes over all nodes and data-parallel replicas; each has host pools of its own."""
        return self.ranks_per_engine * self.dp_replicas

    @property
    def ranks_per_host(self) -> int:
        """Ranks of one engine on one host, as the releases count them: max(tp × pp // nnodes, 1)."""
        return max(self.ranks_per_engine // (self.nnodes or 1), 1)

    @property
    def processes_per_host(self) -> int:
        """Scheduler processes on one host, data-parallel replicas included."""
        return max(self.processes // (self.nnodes or 1), 1)

    @property
    def attn_tp_size(self) -> int:
        """Ranks that share one request's attention heads: tp // attention dp // attention cp, at least 1.

        Source: 0.5.23 runtime_context.py:derive_attn_tp_size.
        """
        return max((self.tp_size or 1) // self.attention_dp_size // (self.attn_cp_size or 1), 1)

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """What the server's own argument parser will refuse in any release that has the flag."""
        if not isinstance(self.hicache_size, float):
            return ()
        message = (
            f"the server will not start with --hicache-size {self.hicache_size}: every release takes "
            f"whole GB (1e9 bytes, per rank); write --hicache-size {int(self.hicache_size)}"
        )
        return (Rejection("--hicache-size", message),)

    def __repr__(self) -> str:
        flags = one_line(" ".join(f"{flag_of(name)} {value}" for name, value in self.given()))
        return f"LaunchConfig({flags[:100] + (' …' if len(flags) > 100 else '')})"

    def without_spelling(self) -> LaunchConfig:
        """The same flags without the text they were read from; a dump stays one, as not all its fields were typed."""
        return replace(self, source=LaunchSource(self.source.kind) if self.source is not None else None)

    def given(self) -> Iterator[tuple[str, Any]]:
        """The flag fields that were given, as (field, value)."""
        for name in FLAG_FIELDS:
            value = getattr(self, name)
            if value is not None:
                yield name, value


_NOT_FLAGS = {"sglang_version", "other", "env", "container", "notes", "source"}
FLAG_FIELDS: tuple[str, ...] = tuple(f.name for f in fields(LaunchConfig) if f.name not in _NOT_FLAGS)
_HINTS = get_type_hints(LaunchConfig)
FIELD_TYPES: dict[str, type] = {
    # bool, int, float or str; "float | int" (a size that was typed as 48 stays a whole number) counts as float
    name: next(kind for kind in get_args(_HINTS[name]) if kind is not type(None))
    for name in FLAG_FIELDS
}
_ACCEPTED: dict[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
_TYPE_TEXT = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check_type(name: str, value: object, kind: type | None = None) -> None:
    """Check that a value has the type that the command line would have read.

    Args:
        name: a field of ``LaunchConfig``, or the name of another fact together with its ``kind``.
        value: the value; None is "not given" and always accepted.
        kind: bool, int, float or str; None takes the field's own.

    Raises:
        UsageError: another type; names the option, what was expected and what came.
    """
    kind = FIELD_TYPES[name] if kind is None else kind
    is_switch = isinstance(value, bool) and kind is not bool
    if value is not None and (is_switch or not isinstance(value, _ACCEPTED[kind])):
        raise UsageError(f"--{name.replace('_', '-')}: expected {_TYPE_TEXT[kind]}, got {str(value)[:60]!r}")


def flag_of(field_name: str) -> str:
    """The option that sets a field: ``hicache_size`` → ``--hicache-size``."""
    return "--model-path" if field_name == "model" else "--" + field_name.replace("_", "-")
