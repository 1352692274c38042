"""Preflight of every point that starts a server: what would be refused or risk the host is never launched."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_lab.base.errors import UnknownFact
from hicache_lab.base.units import format_gb
from hicache_lab.host import HostMemory, read_host
from hicache_lab.preflight import ask, assess, headline
from hicache_lab.preflight.ask import DEVICE_FACTS
from hicache_lab.sweeps.server_side import ServerStart


@dataclass(frozen=True)
class Decision:
    """What preflight said of a point; all empty for a point that starts nothing.

    Attributes:
        verdict: preflight's word.
        reason: the arithmetic in one line, or what is missing.
        host_bytes: what all ranks of the host would ask for.
        limit_bytes: what the host can give.
    """

    verdict: str = ""
    reason: str = ""
    host_bytes: int | None = None
    limit_bytes: int | None = None

    @property
    def safe(self) -> bool:
        """Whether the point may run."""
        return self.verdict in {"", "FITS", "TIGHT"}


def judge(start: ServerStart, host: HostMemory | None = None) -> Decision:
    """Judge the server that a point would start.

    Args:
        start: with all its settings.
        host: a stated host; None measures this machine.
    """
    if not start.config.enable_hierarchical_cache:
        return Decision("FITS", "no --enable-hierarchical-cache: no host pool is built", 0)
    facts = {name: value for name, value in start.facts.items() if value is not None}
    try:
        question = ask(start.model, start.release, host=host or read_host(), config=start.config, **facts)
    except UnknownFact as error:
        return Decision("UNKNOWN", str(error))
    answer = assess(question)
    reason = headline(answer)
    if answer.missing:
        known = ", ".join(DEVICE_FACTS)
        reason += f" (missing: {'; '.join(answer.missing)}; `server: facts:` takes {known})"
    if answer.refusal is not None and answer.ranks and answer.verdict in {"REFUSED", "ASSERT"}:
        reason += f"; it would print: {answer.refusal.message}"
    limit = question.limit_bytes
    if limit is not None and answer.verdict == "OOM_RISK":
        reason += f"; the host can give {format_gb(limit)}"
    return Decision(answer.verdict, reason, answer.host_bytes, limit)
