"""What the library computes for the flags a server runs with, before it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_lab.base.errors import HicacheLabError, UnknownFact
from hicache_lab.preflight import Answer, ask, assess
from hicache_lab.serving.client import Description
from hicache_lab.sizing.tiny_models import TINY_MODELS, tiny_config

_PATH_MOST = 4096


@dataclass(frozen=True)
class Prediction:
    """Host pools as the flags give them; every number is computed.

    Attributes:
        answer: the whole computation, or None.
        why_not: why nothing can be predicted, or None.
    """

    answer: Answer | None
    why_not: str | None

    @property
    def host_tokens(self) -> int | None:
        """Host pool of one rank in tokens."""
        return self.answer.rank.tokens if self.answer and self.answer.rank else None

    @property
    def per_rank_bytes(self) -> int | None:
        """Host bytes of one rank, all its pools."""
        return self.answer.per_rank_bytes if self.answer and self.answer.rank else None

    @property
    def host_bytes(self) -> int | None:
        """Host bytes of all ranks on this host."""
        return self.answer.host_bytes if self.answer and self.answer.rank else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a reader must know, such as a release that was not read."""
        return self.answer.warnings if self.answer else ()

    @property
    def row(self) -> dict[str, object]:
        """One row for a table."""
        rank = self.answer.rank if self.answer else None
        return {
            "device tokens a rank": rank.device_tokens if rank else None,
            "host tokens a rank": self.host_tokens,
            "host bytes a rank": self.per_rank_bytes,
            "ranks on the host": self.answer.ranks_on_host if self.answer else None,
            "host bytes, all ranks": self.host_bytes,
            "not predicted because": self.why_not or "",
            "warnings": "; ".join(self.warnings),
        }


def predict(server: Description, model: str = "") -> Prediction:
    """Predict the host pools of a described server.

    Args:
        server: what the server said it runs.
        model: a catalogue name or a config.json; empty takes the server's own model path.

    Returns:
        The prediction; a server without HiCache, an unknown model or an unknown release give the reason instead.
    """
    if not server.hicache.enabled:
        return Prediction(None, "the server runs without --enable-hierarchical-cache")
    if server.device_tokens is None:
        return Prediction(None, "the server does not tell its device pool (max_total_num_tokens)")
    if not server.release:
        return Prediction(None, "the server does not tell its release")
    flags = {
        "tp_size": server.tp_size,
        "pp_size": server.pp_size,
        "dp_size": server.dp_size,
        "page_size": server.page_size,
        "kv_cache_dtype": server.kv_cache_dtype,
        "hicache_ratio": None if server.hicache.size_gb else server.hicache.ratio,
        # servers tell whole GB as 1.0 too, which the flag does not take
        "hicache_size": int(size) if (size := server.hicache.size_gb or None) and size == int(size) else size,
        "hicache_mem_layout": server.hicache.mem_layout,
        "hicache_io_backend": server.hicache.io_backend,
    }
    try:
        given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
        question = ask(_model(model or server.model_path), server.release, device_tokens=server.device_tokens, **given)
        answer = assess(question)
    except UnknownFact as error:
        return Prediction(None, f"{error} (name the model with the parameter model)" if not model else str(error))
    except HicacheLabError as error:
        return Prediction(None, str(error))
    if answer.rank is None:
        refused = answer.refusal.message if answer.refusal else "the flags give no host pool"
        return Prediction(None, "; ".join(answer.missing) or refused)
    return Prediction(answer, None)


def _model(name: str) -> str | Path | Mapping[str, Any]:
    if name in TINY_MODELS:
        return tiny_config(name)
    # a server on this machine names a folder that is here too; any other text from a server is not a path of ours
    if name.startswith(("/", ".", "~")) and len(name) < _PATH_MOST:
        with contextlib.suppress(OSError, RuntimeError):
            if (config := Path(name).expanduser() / "config.json").is_file():
                return config
    return name
