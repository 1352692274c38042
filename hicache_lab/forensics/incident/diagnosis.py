"""All rules over all launches, causes before their consequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from hicache_lab.base.errors import InputError
from hicache_lab.forensics.incident import guard_rules, serving_rules, sizing_rules
from hicache_lab.forensics.incident.facts import Facts, run_facts
from hicache_lab.forensics.incident.findings import Finding, Rule
from hicache_lab.sglang.releases import rules_for

_AFTERMATH = frozenset(
    {"process_died", "watchdog", "collective_timeout", "unclassified_exception", "stopped_during_allocation"}
)
_MEMORY_END = frozenset({"kernel_oom_kill"}) | _AFTERMATH

RULES: tuple[Rule, ...] = (
    Rule(
        "per_rank_size",
        "a --hicache-size that fits the host once but not once for every rank",
        sizing_rules.per_rank_size,
        explains=_MEMORY_END,
        shares=frozenset({"aggregate_overcommit", "side_pools", "power_of_two_rounding", "container_limit"}),
    ),
    Rule(
        "staggered_refusal",
        "ranks refused after others had been given the same size",
        guard_rules.staggered_refusal,
        explains=_AFTERMATH | {"guard_refusal"},
    ),
    Rule(
        "hugepages",
        "reserved, unused huge pages beside a refusal or a kill",
        guard_rules.hugepages,
        explains=_MEMORY_END,
        shares=frozenset({"guard_refusal"}),
    ),
    Rule(
        "container_limit",
        "a kill inside a control group, or a container's limit below the host's memory",
        guard_rules.container_limit,
        explains=_MEMORY_END,
        shares=frozenset({"guard_refusal", "aggregate_overcommit"}),
    ),
    Rule(
        "guard_refusal",
        "SGLang's own refusal of a host pool",
        guard_rules.guard_refusal,
        explains=_AFTERMATH,
    ),
    Rule(
        "side_pools",
        "indexer, Mamba, draft or other host pools that the flag does not count",
        sizing_rules.side_pools,
        explains=_MEMORY_END,
        shares=frozenset({"aggregate_overcommit", "guard_refusal"}),
    ),
    Rule(
        "power_of_two_rounding",
        "pinned buffers rounded up to a power of two (0.4.5 … 0.5.4)",
        sizing_rules.power_of_two,
        explains=_MEMORY_END,
    ),
    Rule(
        "aggregate_overcommit",
        "host pools that passed one by one and exceed the memory together",
        sizing_rules.aggregate_overcommit,
        explains=_MEMORY_END,
    ),
    Rule(
        "host_smaller_than_device",
        "a host pool not larger than the device pool (assertion or warning)",
        sizing_rules.host_smaller_than_device,
        explains=_AFTERMATH | {"low_reuse"},
    ),
    Rule(
        "pinning_failure",
        "a failed cudaHostRegister or pinned allocation",
        guard_rules.pinning_failure,
        explains=_AFTERMATH,
    ),
    Rule("gpu_oom", "an out-of-memory error of the GPU", serving_rules.gpu_oom, explains=_AFTERMATH),
    Rule(
        "kernel_oom_kill", "a kernel OOM line, or exit code -9 or 137", guard_rules.kernel_oom_kill, explains=_AFTERMATH
    ),
    Rule(
        "kv_pool_full", "retractions, or batches without device tokens", serving_rules.kv_pool_full, explains=_AFTERMATH
    ),
    Rule(
        "unclassified_exception",
        "an exception of another kind",
        serving_rules.unclassified_exception,
        explains=frozenset({"process_died", "watchdog", "collective_timeout"}),
    ),
    Rule(
        "process_died",
        "a process that died otherwise",
        serving_rules.process_died,
        explains=frozenset({"watchdog", "collective_timeout"}),
    ),
    Rule(
        "stopped_during_allocation",
        "a log that ends while host pools are allocated",
        guard_rules.stopped_during_allocation,
    ),
    Rule("watchdog", "watchdog or health-check timeouts", serving_rules.watchdog),
    Rule("collective_timeout", "timeouts of collective operations (NCCL)", serving_rules.collective_timeout),
    Rule("host_pool_pressure", "tokens the host tier dropped or could not load back", serving_rules.host_pool_pressure),
    Rule("storage_failure", "pages the storage backend lost", serving_rules.storage_failure),
    Rule("low_reuse", "a hit ratio below 10 % with more tokens than the tiers hold", serving_rules.low_reuse),
    Rule(
        "settings_rewritten", "layout, I/O backend or page size changed by the server", serving_rules.settings_rewritten
    ),
)
_ORDER = {rule.cause: number for number, rule in enumerate(RULES)}
_ROLES = ("cause", "contributing", "consequence")
_WEIGHTS = ("failure", "degraded", "note")
_CONFIDENCE = ("high", "medium", "low")


@dataclass(frozen=True)
class Diagnosis:
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

    @property
    def first(self) -> Finding | None:
        """The root cause, as far as it is shown."""
        return self.findings[0] if self.findings else None

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
        stated = self.facts.stated_release
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
            f"{names}: {log.lines:,} lines and none of them is known from an SGLang server (releases 0.4.4 … "
            f"0.5.23); nothing "
            "can be said about it. Give the server's own log (standard output and standard error)"
        )
    found: list[Finding] = []
    for seen in run_facts(facts):
        of_run = [finding for rule in RULES for finding in rule.find(seen)]
        found += _with_roles(of_run)
    return Diagnosis(
        findings=tuple(sorted(found, key=_rank)),
        checked=tuple((rule.cause, rule.looks_for) for rule in RULES),
        recognised_lines=log.recognised_lines,
        lines=log.lines,
        facts=facts,
    )


def _with_roles(found: Iterable[Finding]) -> list[Finding]:
    findings = list(found)
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
