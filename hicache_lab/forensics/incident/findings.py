"""What a rule finds, and how a rule is written: a function that looks for one cause, below ``@rule``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hicache_lab.forensics.incident.facts import Evidence
from hicache_lab.forensics.incident.launches import RunFacts
from hicache_lab.forensics.incident.memory import MemoryReading
from hicache_lab.forensics.logs import events as ev

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
class Symptom:
    """What a rule yields: a finding without the rule's name and the launch, which the rule adds."""

    confidence: Confidence
    evidence: tuple[Evidence, ...]
    explanation: str
    remedy: str
    weight: Weight = "failure"


LooksFor = Callable[[RunFacts], Iterator[Symptom]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is looked for, and what it explains.

    Attributes:
        cause: name of the finding.
        order: causes come before their consequences.
        looks_for: one line on what would have shown it, printed when nothing did.
        symptoms: yields at most a few symptoms for a run.
        explains: causes that are consequences when this one was found in the same run.
        shares: causes that merely contributed when this one was found in the same run.
    """

    cause: str
    order: int
    looks_for: str
    symptoms: LooksFor
    explains: frozenset[str] = frozenset()
    shares: frozenset[str] = frozenset()

    def findings(self, seen: RunFacts) -> Iterator[Finding]:
        """What the rule finds in a run."""
        for one in self.symptoms(seen):
            yield Finding(
                self.cause, seen.run.index, one.confidence, one.evidence, one.explanation, one.remedy, one.weight
            )


# what follows when a process is gone, whatever ended it
AFTERMATH = frozenset(
    {"process_died", "watchdog", "collective_timeout", "unclassified_exception", "stopped_during_allocation"}
)
MEMORY_END = AFTERMATH | {"kernel_oom_kill"}
REGISTERED: list[Rule] = []


def rule(
    order: int, looks_for: str, *, explains: frozenset[str] = frozenset(), shares: frozenset[str] = frozenset()
) -> Callable[[LooksFor], LooksFor]:
    """Make a function a rule; its name is the name of the cause, ``order`` its place among all rules."""

    def register(function: LooksFor) -> LooksFor:
        REGISTERED.append(Rule(function.__name__, order, looks_for, function, explains, shares))
        return function

    return register


def quotes(events: Sequence[ev.Event | MemoryReading], most: int = 8) -> tuple[Evidence, ...]:
    """The lines of the first events."""
    return tuple(Evidence.of(event) for event in events[:most])
