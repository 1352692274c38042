"""A verdict as figures of a run's record, each with its unit."""

from __future__ import annotations

from hicache_lab.preflight import Answer
from hicache_lab.preflight.record import answer_record
from hicache_lab.runs.recording import record

_UNITS = {
    "verdict": "",
    "sglang_version": "",
    "ranks_on_host": "ranks",
    "per_rank_tokens": "tokens",
    "per_rank_gb": "GB",
    "host_gb": "GB",
    "message": "",
}


def record_answer(answer: Answer, prefix: str = "") -> None:
    """Record the verdict and its main numbers, names led by ``prefix``."""
    numbers = answer_record(answer)
    for name, unit in _UNITS.items():
        record(prefix + name, numbers[name], unit=unit, source=answer.provenance)
