"""A finding, and the shape of a rule that looks for one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from hicache_lab.forensics.incident.facts import Evidence, RunFacts

Confidence = Literal["high", "medium", "low"]
Role = Literal["cause", "contributing", "consequence"]
# what a finding explains: a launch or a process that failed, a server that is slower than it could be, or a note
Weight = Literal["failure", "degraded", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause with what shows it.

    Attributes:
        cause: the rule's name, stable across releases of this package.
        run: the launch it concerns.
        confidence: high where the evidence states it, medium where it follows with one assumption, low where it is
            one explanation among others.
        evidence: the lines.
        explanation: what happened, with its arithmetic.
        remedy: what to do, with flags to paste.
        role: filled in when all findings are known.
    """

    cause: str
    run: int
    confidence: Confidence
    evidence: tuple[Evidence, ...]
    explanation: str
    remedy: str
    weight: Weight = "failure"
    role: Role = "cause"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is looked for, and what it explains.

    Attributes:
        cause: name of the finding.
        looks_for: one line on what would have shown it, printed when nothing did.
        find: yields at most a few findings for a run.
        explains: causes that are consequences when this one was found in the same run.
        shares: causes that merely contributed when this one was found in the same run.
    """

    cause: str
    looks_for: str
    find: Callable[[RunFacts], Iterator[Finding]]
    explains: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()
