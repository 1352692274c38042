"""Rules about the device, the traffic, the settings and the processes."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_lab.base.units import format_gib
from hicache_lab.forensics.incident.facts import Evidence, RunFacts
from hicache_lab.forensics.incident.findings import Confidence, Finding
from hicache_lab.forensics.logs import events as ev

_FEW_LINES = 50
_LOW_RATIO = 0.10


def gpu_oom(seen: RunFacts) -> Iterator[Finding]:
    """The device allocator, graph capture, or no room for the KV pool at all."""
    events: list[ev.Event] = list(seen.run.of(ev.GpuOom))
    events += [event for event in seen.run.of(ev.TokenShortage) if event.phase == "start"]
    if not events:
        return
    first = events[0]
    detail = ""
    if isinstance(first, ev.GpuOom) and first.tried_bytes is not None:
        free = f" with {format_gib(first.free_bytes)} free" if first.free_bytes is not None else ""
        detail = f": {format_gib(first.tried_bytes)} were asked for{free}"
    launch = seen.run.launch
    now = f" (now {launch.mem_fraction_static})" if launch and launch.mem_fraction_static is not None else ""
    start = isinstance(first, ev.TokenShortage)
    yield Finding(
        "gpu_oom",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in events[:8]),
        "After the weights no device memory is left for the KV pool." if start else f"The GPU ran out of "
        f"memory{detail}.",
        f"raise --mem-fraction-static{now} or spread the weights over more GPUs" if start
        else f"lower --mem-fraction-static{now}, --chunked-prefill-size or --cuda-graph-max-bs; host settings do "
        f"not help here",
    )  # fmt: skip


def kv_pool_full(seen: RunFacts) -> Iterator[Finding]:
    """Running requests had to be put back, or a batch found no tokens."""
    retractions = list(seen.run.of(ev.Retraction))
    shortages = [event for event in seen.run.of(ev.TokenShortage) if event.phase != "start"]
    lines = seen.run.counts["retraction"]
    if not lines and not shortages:
        return
    peak = seen.run.batches.peaks.get("token_usage")
    usage = f"; usage reached {peak.value:.0%} (line {peak.where.line})" if peak else ""
    requests = sum(event.retracted or 0 for event in retractions)
    tokens = f" of {seen.run.device_tokens:,} tokens" if seen.run.device_tokens else ""
    fatal = any(event.phase in ("decode", "prefill") for event in shortages)
    again = (
        f"{lines} time(s) running requests were retracted ({requests} in all) and must be prefilled again"
        if lines
        else ""
    )
    ended = f"{len(shortages)} batch(es) found no tokens at all" if shortages else ""
    yield Finding(
        "kv_pool_full",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in (*shortages[:4], *retractions[:8])),
        f"The device pool{tokens} was full: {'; '.join(part for part in (again, ended) if part)}{usage}. A host "
        f"tier does not "
        "help: running requests need device tokens.",
        "lower --max-running-requests, raise --schedule-conservativeness, enlarge the device pool "
        "(--mem-fraction-static, "
        "--kv-cache-dtype fp8_e4m3 halves the bytes per token), or add replicas",
        "failure" if fatal else "degraded",
    )


def low_reuse(seen: RunFacts) -> Iterator[Finding]:
    """Hardly any prompt token came from the cache although more passed through than it holds."""
    batches, ratio = seen.run.batches, seen.run.batches.hit_ratio
    tokens = seen.run.device_tokens
    tier = bool(seen.run.host_pools or (seen.run.launch and seen.run.launch.enable_hierarchical_cache))
    if not tier or ratio is None or batches.prefill < _FEW_LINES or ratio >= _LOW_RATIO or not tokens:
        return
    capacity = max(tokens, seen.run.host_tokens or 0)
    known = seen.run.host_tokens is not None
    if batches.new_tokens <= 2 * capacity:
        return
    confidence: Confidence = "medium" if known else "low"
    size = (
        f"{capacity:,} tokens"
        if known
        else f"{tokens:,} device tokens and a host pool whose tokens the log does not print"
    )
    yield Finding(
        "low_reuse",
        seen.run.index,
        confidence,
        tuple(Evidence(p.where.file, p.where.line, f"{name} {p.value:g}") for name, p in batches.peaks.items())[:3],
        f"{ratio:.1%} of the prompt tokens came from the cache ({batches.cached_tokens:,} of "
        f"{batches.cached_tokens + batches.new_tokens:,}), while {batches.new_tokens:,} new tokens passed through "
        f"tiers of {size}. "
        "Either the prompts do not repeat, or what repeats is evicted before it comes again; the log cannot tell "
        "which.",
        "replay the traffic: hicache-lab curve TRACE shows the hit rate for every size; if the curve is flat, no "
        "tier helps",
        "degraded",
    )


def settings_rewritten(seen: RunFacts) -> Iterator[Finding]:
    """The server changed layout, I/O backend or page size."""
    events = list(seen.run.of(ev.SettingChanged))
    if not events:
        return
    changes = sorted({f"{event.setting} → {event.value or 'another value'}" for event in events})
    yield Finding(
        "settings_rewritten",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in events[:8]),
        f"The server changed what was asked for: {', '.join(changes)}. Sizes follow the page size in force, not "
        f"the one typed.",
        "write the values in force into the launch line, so that the next reader sees them",
        "note",
    )


def host_pool_pressure(seen: RunFacts) -> Iterator[Finding]:
    """The host tier could not take tokens, or not give them back."""
    events = list(seen.run.of(ev.HostPressure))
    if not events:
        return
    names = sorted({event.name for event in events})
    yield Finding(
        "host_pool_pressure",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in events[:8]),
        f"{seen.run.counts['host_pressure']} time(s) the host tier was too full ({', '.join(names)}): tokens were "
        f"dropped or "
        "could not be loaded back, and are computed again.",
        "a larger host tier if the host has room (hicache-lab max), or --hicache-write-policy write_through",
        "degraded",
    )


def storage_failure(seen: RunFacts) -> Iterator[Finding]:
    """The third tier failed to read or write pages."""
    events = [e for e in seen.run.of(ev.Storage) if e.name in ("prefetch_failed", "write_failed")]
    if not events:
        return
    yield Finding(
        "storage_failure",
        seen.run.index,
        "high",
        tuple(Evidence.of(event) for event in events[:8]),
        f"{len(events)} statement(s) that the storage backend lost or refused pages; those prefixes are computed "
        f"again.",
        "look at the storage backend's own log and its free space",
        "degraded",
    )


def unclassified_exception(seen: RunFacts) -> Iterator[Finding]:
    """An exception none of the other rules knows; the earliest over all ranks."""
    failures = list(seen.run.of(ev.Failure))
    if not failures:
        return
    first = min(
        failures,
        key=lambda event: (
            (event.at is None, event.at, event.where.line) if event.at else (True, None, event.where.line)
        ),
    )
    named = (
        f"{first.exception}: {first.message}"
        if first.exception
        else f"{first.process} hit an exception; its text is missing"
    )
    went_on = _went_on(seen, failures)
    after = (
        " No process of the server failed and it went on serving: a request's error, not the server's."
        if went_on
        else ""
    )
    yield Finding(
        "unclassified_exception",
        seen.run.index,
        "medium" if first.exception and not went_on else "low",
        tuple(Evidence.of(event) for event in (first, *(f for f in failures if f is not first))[:8]),
        f"The earliest exception is {named[:300]} ({first.rank.label or first.process or 'no rank shown'}).{after}",
        "look this message up in the issues of SGLang for the release in question",
        "note" if went_on else "failure",
    )


def _went_on(seen: RunFacts, failures: list[ev.Failure]) -> bool:
    run, first = seen.run, failures[0]
    fatal = run.counts["process_death"] or run.counts["defunct"] or seen.kills or any(f.process for f in failures)
    quits = any(event.name == "sigquit" for event in run.of(ev.Stall))
    served = run.milestone("ready") is not None or run.batches.prefill or run.batches.decode
    later = first.at is None or (run.last is not None and run.last >= first.at)
    return bool(served and later and not fatal and not quits)


def process_died(seen: RunFacts) -> Iterator[Finding]:
    """A process ended with a code that is not a kill."""
    deaths = [death for death in seen.run.of(ev.ProcessDeath) if not death.killed]
    zombies = list(seen.run.of(ev.Defunct))
    quits = [event for event in seen.run.of(ev.Stall) if event.name == "sigquit"]
    if not deaths and not zombies and not quits:
        return
    codes = sorted({str(death.exit_code) for death in deaths if death.exit_code is not None})
    said = f" with exit code {', '.join(codes)}" if codes else ""
    yield Finding(
        "process_died",
        seen.run.index,
        "low",
        tuple(Evidence.of(event) for event in (*deaths[:8], *zombies[:4], *quits[:4])),
        f"A process of the server died{said}. This says that something failed, not what.",
        "find the earliest exception over all ranks, and the kernel log of that minute (--kernel-log)",
    )


def watchdog(seen: RunFacts) -> Iterator[Finding]:
    """A watchdog or health check gave up waiting."""
    events = [event for event in seen.run.of(ev.Stall) if event.name in ("watchdog", "health_check")]
    if not events:
        return
    yield Finding(
        "watchdog",
        seen.run.index,
        "low",
        tuple(Evidence.of(event) for event in events[:8]),
        "A watchdog or the health check stopped waiting. It shows that a process hung or was slow, not why.",
        "find what happened in the minutes before; raising --watchdog-timeout only hides it",
        "failure" if any(event.name == "watchdog" for event in events) else "degraded",
    )


def collective_timeout(seen: RunFacts) -> Iterator[Finding]:
    """A rank waited for another in a collective operation."""
    events = [event for event in seen.run.of(ev.Stall) if event.name == "nccl"]
    if not events:
        return
    waiting = sorted({event.index for event in events if event.index is not None})
    yield Finding(
        "collective_timeout",
        seen.run.index,
        "low",
        tuple(Evidence.of(event) for event in events[:8]),
        f"Rank(s) {', '.join(map(str, waiting))} waited in a collective operation until the timeout: another rank "
        f"had stopped.",
        "look at the rank that is not among those waiting",
    )
