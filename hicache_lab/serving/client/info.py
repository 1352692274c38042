"""What a server says it runs: /server_info and /model_info in the shapes of all releases.

Field names and shapes: 0.4.4–0.4.6 answer flat; from 0.4.7 each data-parallel rank has an entry in
``internal_states``, which from 0.5.6 repeats the rank's whole server arguments; from 0.5.17
``memory_usage.graph`` is a table instead of a number (managers/scheduler.py, get_internal_state;
entrypoints/http_server.py, get_server_info).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hicache_lab.base.errors import InputError, ServerError
from hicache_lab.base.secrets import is_secret, redact
from hicache_lab.serving.client.metrics import MetricsSnapshot
from hicache_lab.serving.client.untrusted import number, printable, whole
from hicache_lab.sglang.launch import LaunchConfig

Scalar = str | int | float | bool | None

# change while the same process runs, so they say nothing about its flags
_VOLATILE = frozenset(
    "last_gen_throughput load status avg_spec_accept_length effective_max_running_requests_per_dp".split()
)


@dataclass(frozen=True)
class HicacheSettings:
    """The HiCache flags a server runs with, as it reports them (after its own adjustments).

    Attributes:
        enabled: ``--enable-hierarchical-cache``.
        ratio: host tokens over device tokens; not used when ``size_gb`` is set.
        size_gb: GB (1e9) per rank; 0 when the ratio decides.
        write_policy, io_backend, mem_layout, storage_backend: as the flags of those names; None where the
            release has no such flag.
    """

    enabled: bool
    ratio: float | None
    size_gb: float | None
    write_policy: str | None
    io_backend: str | None
    mem_layout: str | None
    storage_backend: str | None


@dataclass(frozen=True)
class ServerFacts:
    """What a prediction or a comparison needs of a server.

    Attributes:
        release: e.g. ``"0.5.23"``; empty if the server does not tell.
        model_path: as given on its command line.
        tp_size, pp_size, dp_size: ranks; ``dp_size`` is at least ``attn_dp_size`` of releases that renamed
        it.
        page_size: tokens a page.
        device_tokens: device KV pool of one rank in tokens (``max_total_num_tokens``).
        context_length: longest prompt plus answer it was told to take, None if the model decides.
        kv_cache_dtype: as the flag.
        chunked_prefill_tokens: most prompt tokens of one prefill batch; None if it is not chunked.
        hicache: the HiCache flags.
    """

    release: str
    model_path: str
    tp_size: int
    pp_size: int
    dp_size: int
    page_size: int | None
    device_tokens: int | None
    context_length: int | None
    kv_cache_dtype: str | None
    chunked_prefill_tokens: int | None
    hicache: HicacheSettings


@dataclass(frozen=True)
class ServerInfo(ServerFacts):
    """What /server_info says; ``settings``: every other scalar, by SGLang's own name; no credentials."""

    settings: Mapping[str, Scalar]

    @property
    def processes(self) -> int:
        """Scheduler processes, each with a host pool of its own (tp × pp, × dp where dp is not inside tp)."""
        inside = bool(self.settings.get("enable_dp_attention")) or "attn_dp_size" in self.settings
        return LaunchConfig(
            tp_size=self.tp_size, pp_size=self.pp_size, dp_size=self.dp_size, enable_dp_attention=inside
        ).processes

    @property
    def processes_per_replica(self) -> int:
        """Scheduler processes that hold the same logical tokens: one data-parallel replica's."""
        return max(self.processes // self.dp_size, 1)

    def changed_since(self, other: ServerInfo) -> dict[str, tuple[Scalar, Scalar]]:
        """Settings that differ, as ``{name: (then, now)}``: not the same process, or not the same flags.

        ``random_seed`` is drawn at every start, so it alone betrays a restart with the same flags.
        """
        names = (set(self.settings) | set(other.settings)) - _VOLATILE
        pairs = {name: (other.settings.get(name), self.settings.get(name)) for name in sorted(names)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Probe:
    """Everything a server tells about itself at one moment; ``metrics`` is None with the reason beside it."""

    server: ServerInfo
    architectures: tuple[str, ...]
    metrics: MetricsSnapshot | None
    metrics_missing: str | None

    @property
    def host_total_tokens(self) -> int | None:
        """Host pool of one rank in tokens, as the server counts it (releases from 0.5.10, with metrics)."""
        return self.metrics.host_total_tokens if self.metrics else None


@dataclass(frozen=True)
class Description(ServerFacts):
    """The facts of a probe that a prediction or a comparison needs; everything in it was measured.

    Attributes:
        architectures: from 0.5.10 on the server tells them.
        host_tokens: host pool of one rank as the server counts it; None before 0.5.10 or without metrics.
        metrics_missing: why there are no metrics, or None.
    """

    architectures: tuple[str, ...]
    host_tokens: int | None
    metrics_missing: str | None

    @classmethod
    def of(cls, probe: Probe) -> Description:
        """The same facts of a probe."""
        return cls(
            **{one.name: getattr(probe.server, one.name) for one in fields(ServerFacts)},
            architectures=probe.architectures,
            host_tokens=probe.host_total_tokens,
            metrics_missing=probe.metrics_missing,
        )

    @property
    def rows(self) -> list[dict[str, object]]:
        """Name and value of each fact, for a table."""
        plain = asdict(self)
        settings = plain.pop("hicache")
        plain["architectures"] = ", ".join(self.architectures)
        facts = plain | {f"hicache_{name}": value for name, value in settings.items()}
        return [{"fact": name, "value": "not told" if value is None else value} for name, value in facts.items()]

    def as_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_file(cls, path: Path) -> Description:
        """Read it back.

        Raises:
            InputError: not such a file.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data |= {"hicache": HicacheSettings(**data["hicache"]), "architectures": tuple(data["architectures"])}
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: expected a server's description as this package writes it; {error}") from error


def read_server_info(data: Any) -> ServerInfo:
    """Read the JSON of /server_info or /get_server_info.

    Raises:
        ServerError: it is not SGLang's answer.
    """
    if not isinstance(data, dict) or "model_path" not in data:
        raise ServerError("its /server_info is not SGLang's: no model_path in the answer")
    states = data.get("internal_states")
    states = [s for s in states if isinstance(s, dict)] if isinstance(states, list) else []
    # a flag adjusted by the ranks stands only in their own state; what was typed stands at the top
    first = states[0] if states else {}
    settings = {**_scalars(first), **_scalars(data)}

    get = settings.get
    adjusted = {**settings, **_scalars(first)}
    memory = first.get("memory_usage")
    names = ("write_policy", "io_backend", "mem_layout", "storage_backend")
    chunk = whole(get("chunked_prefill_size"))
    return ServerInfo(
        release=str(get("version") or ""),
        model_path=printable(str(data["model_path"])),
        tp_size=whole(get("tp_size")) or 1,
        pp_size=whole(get("pp_size")) or 1,
        dp_size=max(whole(get("dp_size")) or 1, whole(get("attn_dp_size")) or 1),
        page_size=whole(get("page_size")),
        device_tokens=whole(get("max_total_num_tokens"))
        or (whole(memory.get("token_capacity")) if isinstance(memory, dict) else None),
        context_length=whole(get("context_length")),
        kv_cache_dtype=_text(get("kv_cache_dtype")),
        chunked_prefill_tokens=chunk if chunk is not None and chunk > 0 else None,
        hicache=HicacheSettings(
            enabled=bool(adjusted.get("enable_hierarchical_cache")),
            ratio=number(adjusted.get("hicache_ratio")),
            size_gb=number(adjusted.get("hicache_size")),
            **{name: _text(adjusted.get(f"hicache_{name}")) for name in names},
        ),
        settings=MappingProxyType(settings),
    )


def _scalars(data: Mapping[str, Any]) -> dict[str, Scalar]:
    return {
        name: redact(printable(value)) if isinstance(value, str) else value
        for name, value in data.items()
        if not is_secret(name) and isinstance(value, str | int | float | bool | None)
    }


def read_architectures(data: Any) -> tuple[str, ...]:
    """The model's architectures in the JSON of /model_info or /get_model_info; none before 0.5.10.

    Raises:
        ServerError: it is not SGLang's answer.
    """
    if not isinstance(data, dict) or "model_path" not in data:
        raise ServerError("its /model_info is not SGLang's: no model_path in the answer")
    names = data.get("architectures")
    return tuple(printable(str(name)) for name in names) if isinstance(names, list) else ()


def _text(value: object) -> str | None:
    return printable(value) if isinstance(value, str) else None
