"""The recordings beside an incident's facts, read as any incident's are: server log, kernel log, memory samples."""

from __future__ import annotations

from hicache_lab.forensics.cases.case import Case
from hicache_lab.forensics.incident import Facts, gather


def recordings(case: Case) -> Facts:
    """What the case's files say, the reported host and release beside it.

    Raises:
        InputError: a file is missing, or of no known form.
    """
    files = case.files
    return gather(
        [str(files["server_log"])] if "server_log" in files else [],
        kernel_logs=[str(files["kernel_log"])] if "kernel_log" in files else [],
        memory=[str(files["memory"])] if "memory" in files else [],
        release=str(case.value("sglang_version")),
        by=f"incident {case.id}",
    )


def peak_used_bytes(facts: Facts) -> int | None:
    """Most memory in use at a sample, or None without samples."""
    return max((used for sample in facts.memory if (used := sample.in_use_bytes) is not None), default=None)
