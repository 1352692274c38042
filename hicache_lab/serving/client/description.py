"""What a server was when it was measured, small enough to keep beside the measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from hicache_lab.base.errors import InputError
from hicache_lab.serving.client.http import Probe
from hicache_lab.serving.client.info import HicacheSettings, ServerFacts


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
            data = json.loads(path.read_text(encoding="utf-8"))
            data |= {"hicache": HicacheSettings(**data["hicache"]), "architectures": tuple(data["architectures"])}
            return cls(**data)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: expected a server's description as this package writes it; {error}") from error
