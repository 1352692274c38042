"""What a server was when it was measured, small enough to keep beside the measurement."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.serving.client.http import Probe
from hicache_lab.serving.client.info import HicacheSettings


@dataclass(frozen=True)
class Description:
    """The facts of a probe that a prediction or a comparison needs; everything in it was measured.

    Attributes:
        release, model_path: what runs; the path as the server was given it.
        architectures: from 0.5.10 on the server tells them.
        tp_size, pp_size, dp_size, page_size: ranks and pages.
        device_tokens: device KV pool of one rank.
        context_length: longest prompt plus answer, or None.
        kv_cache_dtype: as the flag.
        chunked_prefill_tokens: most prompt tokens of one prefill batch.
        hicache: the HiCache flags.
        host_tokens: host pool of one rank as the server counts it; None before 0.5.10 or without metrics.
        metrics_missing: why there are no metrics, or None.
    """

    release: str
    model_path: str
    architectures: tuple[str, ...]
    tp_size: int
    pp_size: int
    dp_size: int
    page_size: int | None
    device_tokens: int | None
    context_length: int | None
    kv_cache_dtype: str | None
    chunked_prefill_tokens: int | None
    hicache: HicacheSettings
    host_tokens: int | None
    metrics_missing: str | None

    @classmethod
    def of(cls, probe: Probe) -> Description:
        """The same facts of a probe."""
        own = ("architectures", "host_tokens", "metrics_missing")
        return cls(
            **{one.name: getattr(probe.server, one.name) for one in fields(cls) if one.name not in own},
            architectures=probe.model.architectures,
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
            data: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            rest = {name: value for name, value in data.items() if name not in {"hicache", "architectures"}}
            return cls(**rest, hicache=HicacheSettings(**data["hicache"]), architectures=tuple(data["architectures"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: expected a server's description as this package writes it; {error}") from error
