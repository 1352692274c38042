"""All rules over all launches, causes before their consequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hicache_lab.base.display import Displayed
from hicache_lab.base.errors import InputError
from hicache_lab.forensics.incident import guard_rules, serving_rules, sizing_rules
from hicache_lab.forensics.incident.facts import Facts
from hicache_lab.forensics.incident.findings import REGISTERED, Finding, Rule
from hicache_lab.forensics.incident.launches import RunFacts, run_facts
from hicache_lab.sglang.releases import VERIFIED, rules_for

# a rule registers where it is written; the modules are imported for that
_MODULES = (guard_rules, sizing_rules, serving_rules)
RULES: tuple[Rule, ...] = tuple(sorted(REGISTERED, key=lambda rule: rule.order))
_ORDER = {rule.cause: rule.order for rule in RULES}
_ROLES = ("cause", "contributing", "consequence")
_WEIGHTS = ("failure", "degraded", "note")
_CONFIDENCE = ("high", "medium", "low")


@dataclass(frozen=True)
class Diagnosis(Displayed):
    """What was found, first the earliest cause, and what was looked for.

    Attributes:
        findings: ranked.
        checked: every rule's name with what it looks for.
        recognised_lines: statements the diagnosis rests on.
    """

    findings: tuple[Finding, ...]
    checked: tuple[tuple[str, str], ...]
    recognised_lines: int
    lines: int
    facts: Facts

    def __repr__(self) -> str:
        first = f"{self.first.cause}, {self.first.confidence} confidence; " if self.first else ""
        return f"Diagnosis({first}{len(self.findings)} findings in {self.lines:,} lines)"

    @property
    def first(self) -> Finding | None:
        """The root cause, as far as it is shown."""
        return self.findings[0] if self.findings else None

    @property
    def first_launch(self) -> RunFacts | None:
        """The launch of the root cause; without one, the first of the log."""
        launches = list(run_facts(self.facts))
        index = self.first.run if self.first else None
        return next((one for one in launches if index in (None, one.run.index)), None)

    @property
    def only_risks(self) -> bool:
        """Something was found and the server it was found in did not fail."""
        return self.first is not None and self.first_launch is not None and self.first_launch.nothing_failed

    def grouped(self) -> list[tuple[Finding, tuple[int, ...]]]:
        """Findings as they are told: the first of each cause, with the numbers of the other launches that show it too.

        A container that restarts for hours says the same a hundred times; ``findings`` keeps every one.
        """
        others: dict[tuple[str, str, str, str], list[int]] = {}
        firsts: dict[tuple[str, str, str, str], Finding] = {}
        for one in self.findings:
            key = (one.cause, one.role, one.weight, one.confidence)
            if firsts.setdefault(key, one) is not one and one.run != firsts[key].run:
                others.setdefault(key, []).append(one.run)
        return [(one, tuple(others.get(key, ()))) for key, one in firsts.items()]

    @property
    def warning(self) -> str | None:
        """Said when the release that was stated was not examined."""
        stated = self.facts.stated.release
        return rules_for(stated).warning if stated is not None else None

    def not_found(self) -> list[tuple[str, str]]:
        """Rules that found nothing."""
        found = {finding.cause for finding in self.findings}
        return [(cause, looks_for) for cause, looks_for in self.checked if cause not in found]

    def to_json(self) -> dict[str, Any]:
        """The contract of ``diagnose --json``; ``looked_for`` says what each name in ``checked`` means."""
        return {
            "findings": [asdict(finding) for finding in self.findings],
            "checked": [cause for cause, _ in self.checked],
            "recognised_lines": self.recognised_lines,
            "looked_for": dict(self.checked),
            "warning": self.warning,
            "lines": self.lines,
        }


def also_in(others: tuple[int, ...]) -> str:
    """``", and in 3 more: 2, 5, 7"``; nothing for none."""
    shown = ", ".join(map(str, others[:12])) + (" …" if len(others) > 12 else "")
    return f", and in {len(others)} more: {shown}" if others else ""


def diagnose(facts: Facts) -> Diagnosis:
    """Apply every rule to every launch.

    Raises:
        InputError: the logs hold nothing that SGLang, its runtime or the kernel says about a failure; a diagnosis of
            them would be a false all-clear.
    """
    log = facts.log
    failed = any(event.kind in ("gpu_oom", "kernel_oom", "stall") for event in log.events())
    if not log.is_sglang and not failed and not (log.mentions_sglang and log.recognised_lines):
        names = ", ".join(source.name for source in log.sources)
        raise InputError(
            f"{names}: {log.lines:,} lines and none of them is known from an SGLang server "
            f"(releases {VERIFIED[0]} … {VERIFIED[-1]}); nothing can be said about it. "
            "Give the server's own log (standard output and standard error)"
        )
    findings: list[Finding] = []
    for seen in run_facts(facts):
        findings += _with_roles([finding for rule in RULES for finding in rule.findings(seen)])
    return Diagnosis(
        findings=tuple(sorted(findings, key=_rank)),
        checked=tuple((rule.cause, rule.looks_for) for rule in RULES),
        recognised_lines=log.recognised_lines,
        lines=log.lines,
        facts=facts,
    )


def _with_roles(findings: list[Finding]) -> list[Finding]:
    present = [rule for rule in RULES if any(finding.cause == rule.cause for finding in findings)]
    consequences = {cause for rule in present for cause in rule.explains}
    shared = {cause for rule in present for cause in rule.shares}
    # a slow-down or a note explains no failure
    out = []
    for finding in findings:
        if finding.cause in consequences and _explained(finding, present, findings):
            out.append(replace(finding, role="consequence"))
        elif finding.cause in shared:
            out.append(replace(finding, role="contributing"))
        else:
            out.append(finding)
    return out


def _explained(finding: Finding, present: Iterable[Rule], findings: Iterable[Finding]) -> bool:
    weights = {one.cause: one.weight for one in findings}
    return any(
        finding.cause in rule.explains and _WEIGHTS.index(weights[rule.cause]) <= _WEIGHTS.index(finding.weight)
        for rule in present
    )


def _rank(finding: Finding) -> tuple[int, int, int, int, int]:
    return (
        _ROLES.index(finding.role),
        _WEIGHTS.index(finding.weight),
        finding.run,
        _ORDER[finding.cause],
        _CONFIDENCE.index(finding.confidence),
    )
