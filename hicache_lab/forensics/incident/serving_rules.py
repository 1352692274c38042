"""Rules about the device, the traffic, the settings and the processes."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_lab.base.units import format_gib
from hicache_lab.forensics.incident.facts import Evidence
from hicache_lab.forensics.incident.findings import AFTERMATH, Confidence, Symptom, quotes, rule
from hicache_lab.forensics.incident.launches import RunFacts
from hicache_lab.forensics.logs import events as ev

_FEW_LINES = 50
_LOW_RATIO = 0.10


@rule(110, "an out-of-memory error of the GPU", explains=AFTERMATH)
def gpu_oom(launch: RunFacts) -> Iterator[Symptom]:
    """The device allocator, graph capture, or no room for the KV pool at all."""
    events: list[ev.Event] = list(launch.run.of(ev.GpuOom))
    events += [event for event in launch.run.of(ev.TokenShortage) if event.phase == "start"]
    if not events:
        return
    first, config = events[0], launch.run.launch
    now = f" (now {config.mem_fraction_static})" if config and config.mem_fraction_static is not None else ""
    if isinstance(first, ev.TokenShortage):
        text = "After the weights no device memory is left for the KV pool."
        remedy = f"raise --mem-fraction-static{now} or spread the weights over more GPUs"
    else:
        detail = ""
        if isinstance(first, ev.GpuOom) and first.tried_bytes is not None:
            free = f" with {format_gib(first.free_bytes)} free" if first.free_bytes is not None else ""
            detail = f": {format_gib(first.tried_bytes)} were asked for{free}"
        text = f"The GPU ran out of memory{detail}."
        remedy = (
            f"lower --mem-fraction-static{now}, --chunked-prefill-size or --cuda-graph-max-bs; "
            "host settings do not help here"
        )
    yield Symptom("high", quotes(events), text, remedy)


@rule(130, "retractions, or batches without device tokens", explains=AFTERMATH)
def kv_pool_full(launch: RunFacts) -> Iterator[Symptom]:
    """Running requests had to be put back, or a batch found no tokens."""
    run = launch.run
    retractions = list(run.of(ev.Retraction))
    shortages = [event for event in run.of(ev.TokenShortage) if event.phase != "start"]
    lines = run.counts["retraction"]
    if not lines and not shortages:
        return
    peak = run.batches.peaks.get("token_usage")
    usage = f"; usage reached {peak.value:.0%} (line {peak.where.line})" if peak else ""
    tokens = f" of {run.device_tokens:,} tokens" if run.device_tokens else ""
    happened = []
    if lines:
        requests = sum(event.retracted or 0 for event in retractions)
        happened.append(
            f"{lines} time(s) running requests were retracted ({requests} in all) and must be prefilled again"
        )
    if shortages:
        happened.append(f"{len(shortages)} batch(es) found no tokens at all")
    yield Symptom(
        "high",
        quotes(shortages, 4) + quotes(retractions),
        f"The device pool{tokens} was full: {'; '.join(happened)}{usage}. "
        "A host tier does not help: running requests need device tokens.",
        "lower --max-running-requests, raise --schedule-conservativeness, enlarge the device pool "
        "(--mem-fraction-static, --kv-cache-dtype fp8_e4m3 halves the bytes per token), or add replicas",
        "failure" if any(event.phase in ("decode", "prefill") for event in shortages) else "degraded",
    )


@rule(140, "an exception of another kind", explains=frozenset({"process_died", "watchdog", "collective_timeout"}))
def unclassified_exception(launch: RunFacts) -> Iterator[Symptom]:
    """An exception none of the other rules knows; the earliest over all ranks."""
    failures = list(launch.run.of(ev.Failure))
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
    went_on = _went_on(launch, failures)
    after = (
        " No process of the server failed and it went on serving: a request's error, not the server's."
        if went_on
        else ""
    )
    yield Symptom(
        "medium" if first.exception and not went_on else "low",
        quotes([first, *(failure for failure in failures if failure is not first)]),
        f"The earliest exception is {named[:300]} ({first.rank.label or first.process or 'no rank shown'}).{after}",
        "look this message up in the issues of SGLang for the release in question",
        "note" if went_on else "failure",
    )


def _went_on(launch: RunFacts, failures: list[ev.Failure]) -> bool:
    run, first = launch.run, failures[0]
    fatal = run.counts["process_death"] or run.counts["defunct"] or launch.kills or any(f.process for f in failures)
    quits = any(event.name == "sigquit" for event in run.of(ev.Stall))
    served = run.milestone("ready") is not None or run.batches.prefill or run.batches.decode
    later = first.at is None or (run.last is not None and run.last >= first.at)
    return bool(served and later and not fatal and not quits)


@rule(150, "a process that died otherwise", explains=frozenset({"watchdog", "collective_timeout"}))
def process_died(launch: RunFacts) -> Iterator[Symptom]:
    """A process ended with a code that is not a kill."""
    deaths = [death for death in launch.run.of(ev.ProcessDeath) if not death.killed]
    zombies = list(launch.run.of(ev.Defunct))
    quits = [event for event in launch.run.of(ev.Stall) if event.name == "sigquit"]
    if not deaths and not zombies and not quits:
        return
    codes = sorted({str(death.exit_code) for death in deaths if death.exit_code is not None})
    with_code = f" with exit code {', '.join(codes)}" if codes else ""
    yield Symptom(
        "low",
        quotes(deaths) + quotes(zombies, 4) + quotes(quits, 4),
        f"A process of the server died{with_code}. This says that something failed, not what.",
        "find the earliest exception over all ranks, and the kernel log of that minute (--kernel-log)",
    )


@rule(170, "watchdog or health-check timeouts")
def watchdog(launch: RunFacts) -> Iterator[Symptom]:
    """A watchdog or health check gave up waiting."""
    events = [event for event in launch.run.of(ev.Stall) if event.name in ("watchdog", "health_check")]
    if not events:
        return
    yield Symptom(
        "low",
        quotes(events),
        "A watchdog or the health check stopped waiting. It shows that a process hung or was slow, not why.",
        "find what happened in the minutes before; raising --watchdog-timeout only hides it",
        "failure" if any(event.name == "watchdog" for event in events) else "degraded",
    )


@rule(180, "timeouts of collective operations (NCCL)")
def collective_timeout(launch: RunFacts) -> Iterator[Symptom]:
    """A rank waited for another in a collective operation."""
    events = [event for event in launch.run.of(ev.Stall) if event.name == "nccl"]
    if not events:
        return
    waiting = sorted({event.index for event in events if event.index is not None})
    yield Symptom(
        "low",
        quotes(events),
        f"Rank(s) {', '.join(map(str, waiting))} waited in a collective operation until the timeout: "
        "another rank had stopped.",
        "look at the rank that is not among those waiting",
    )


@rule(190, "tokens the host tier dropped or could not load back")
def host_pool_pressure(launch: RunFacts) -> Iterator[Symptom]:
    """The host tier could not take tokens, or not give them back."""
    events = list(launch.run.of(ev.HostPressure))
    if not events:
        return
    names = sorted({event.name for event in events})
    yield Symptom(
        "high",
        quotes(events),
        f"{launch.run.counts['host_pressure']} time(s) the host tier was too full ({', '.join(names)}): "
        "tokens were dropped or could not be loaded back, and are computed again.",
        "a larger host tier if the host has room (hicache-lab max), or --hicache-write-policy write_through",
        "degraded",
    )


@rule(200, "pages the storage backend lost")
def storage_failure(launch: RunFacts) -> Iterator[Symptom]:
    """The third tier failed to read or write pages."""
    events = [event for event in launch.run.of(ev.Storage) if event.name in ("prefetch_failed", "write_failed")]
    if not events:
        return
    yield Symptom(
        "high",
        quotes(events),
        f"{len(events)} statement(s) that the storage backend lost or refused pages; "
        "those prefixes are computed again.",
        "look at the storage backend's own log and its free space",
        "degraded",
    )


@rule(210, "a hit ratio below 10 % with more tokens than the tiers hold")
def low_reuse(launch: RunFacts) -> Iterator[Symptom]:
    """Hardly any prompt token came from the cache although more passed through than it holds."""
    run, batches, ratio = launch.run, launch.run.batches, launch.run.batches.hit_ratio
    tokens = run.device_tokens
    tier = bool(run.host_pools or (run.launch and run.launch.enable_hierarchical_cache))
    if not tier or ratio is None or batches.prefill < _FEW_LINES or ratio >= _LOW_RATIO or not tokens:
        return
    capacity = max(tokens, run.host_tokens or 0)
    known = run.host_tokens is not None
    if batches.new_tokens <= 2 * capacity:
        return
    confidence: Confidence = "medium" if known else "low"
    size = (
        f"{capacity:,} tokens"
        if known
        else f"{tokens:,} device tokens and a host pool whose tokens the log does not print"
    )
    yield Symptom(
        confidence,
        tuple(Evidence(p.where.file, p.where.line, f"{name} {p.value:g}") for name, p in batches.peaks.items())[:3],
        f"{ratio:.1%} of the prompt tokens came from the cache ({batches.cached_tokens:,} of "
        f"{batches.cached_tokens + batches.new_tokens:,}), "
        f"while {batches.new_tokens:,} new tokens passed through tiers of {size}. "
        "Either the prompts do not repeat, or what repeats is evicted before it comes again; "
        "the log cannot tell which.",
        "replay the traffic: hicache-lab curve TRACE shows the hit rate for every size; "
        "if the curve is flat, no tier helps",
        "degraded",
    )


@rule(220, "layout, I/O backend or page size changed by the server")
def settings_rewritten(launch: RunFacts) -> Iterator[Symptom]:
    """The server changed layout, I/O backend or page size."""
    events = list(launch.run.of(ev.SettingChanged))
    if not events:
        return
    changes = sorted({f"{event.setting} → {event.value or 'another value'}" for event in events})
    yield Symptom(
        "high",
        quotes(events),
        f"The server changed what was asked for: {', '.join(changes)}. "
        "Sizes follow the page size in force, not the one typed.",
        "write the values in force into the launch line, so that the next reader sees them",
        "note",
    )
