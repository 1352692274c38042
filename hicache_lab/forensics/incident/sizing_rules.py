"""Rules about how the host pools were sized."""

from __future__ import annotations

from collections.abc import Iterator

from hicache_lab.base.units import GB, format_both, format_gb
from hicache_lab.forensics.incident.findings import AFTERMATH, MEMORY_END, Symptom, quotes, rule
from hicache_lab.forensics.incident.launches import KV, NOTICEABLE, RunFacts
from hicache_lab.forensics.logs import events as ev
from hicache_lab.sglang.releases import first_release_where
from hicache_lab.sizing.guard import RESERVE_TEXT, beyond_reserve_bytes, divides_since, exact_since, pinned_since


@rule(
    10,
    "a --hicache-size that fits the host once but not once for every rank",
    explains=MEMORY_END,
    shares=frozenset({"aggregate_overcommit", "side_pools", "power_of_two_rounding", "container_limit"}),
)
def per_rank_size(launch: RunFacts) -> Iterator[Symptom]:
    """A size that fits the host once and was taken by every rank."""
    size, ranks = launch.size_gb, launch.run.ranks
    if size is None or ranks is None or ranks < 2 or launch.refusals:
        return
    one, total = round(size * GB), round(size * GB * ranks)
    limit = launch.room
    evidence = launch.size_evidence + launch.pool_evidence + launch.memory_evidence
    arithmetic = f"--hicache-size is GB (1e9 bytes) for each rank: {ranks} × {size:g} GB = {format_both(total)}"
    if limit is None:
        other = ("failure", "pin_failure", "gpu_oom", "host_smaller", "token_shortage")
        unexplained = launch.failed_early and not any(launch.run.counts[kind] for kind in other)
        if launch.was_killed or unexplained:
            yield Symptom(
                "medium" if launch.was_killed else "low",
                evidence,
                f"{arithmetic}. How much RAM the host has is not in what was given (--host-ram states it)."
                f"{launch.ending}",
                f"divide the total that was meant by {ranks}; {launch.question.remedy}",
            )
        return
    # a total may have been meant that fits the host, though not beside what else is in it
    if not limit.bytes < total or one > max(limit.bytes, launch.limit.bytes if launch.limit else 0):
        return
    once = f" {size:g} GB fit as a total and not {ranks} times." if one <= limit.bytes else ""
    yield Symptom(
        "high" if launch.was_killed or launch.exhausted is not None else "medium",
        evidence + limit.evidence,
        f"{arithmetic}; there are {limit}.{once}{_how_the_check_passed(launch, one)}{launch.ending}",
        launch.question.remedy,
    )


def _how_the_check_passed(launch: RunFacts, one: int) -> str:
    if launch.available is None:
        return ""
    budget = launch.question.budget if launch.question.questions else launch.budget(launch.available.bytes)
    if budget is None or budget.divides or one > budget.budget_bytes:
        return ""
    return (
        f" In {launch.release} each rank compares its own {format_gb(one)} with {format_gb(budget.budget_bytes)} "
        f"({budget.text}) and passes, every one of them if they look before the others' memory is taken; "
        f"from {divides_since()} the check divides by the ranks on the host."
    )


@rule(
    60,
    "indexer, Mamba, draft or other host pools that the flag does not count",
    explains=MEMORY_END,
    shares=frozenset({"aggregate_overcommit", "guard_refusal"}),
)
def side_pools(launch: RunFacts) -> Iterator[Symptom]:
    """Pools besides the KV pool, which the flag does not count in this release."""
    pools = launch.run.host_pools
    refused = [r for r in launch.refusals if r.pool not in (*KV, "all")]
    side = [pool for pool in pools if pool.pool not in KV]
    if not side and not refused:
        return
    kv_bytes = sum(pool.bytes for pool in pools if pool.pool in KV)
    side_bytes = sum(pool.bytes for pool in side)
    names = ", ".join(sorted({pool.pool for pool in side} | {r.pool for r in refused}))
    bound = launch.room
    scale = launch.run.projected_host_bytes / launch.run.host_bytes if launch.run.host_bytes else 1.0
    decisive = (
        bound is not None
        and side_bytes >= NOTICEABLE
        and kv_bytes * scale <= beyond_reserve_bytes(bound.bytes) < (kv_bytes + side_bytes) * scale
    )
    if not (refused or decisive or (side_bytes >= NOTICEABLE and launch.was_killed)):
        return
    asked = f" {format_gb(kv_bytes)} of KV pools and {format_gb(side_bytes)} of {names}"
    if refused:
        amount = refused[0].requested_bytes
        late = f"{format_gb(amount)} of {refused[0].pool}" if amount is not None else names
        before = f" {format_gb(kv_bytes)} of KV pools and then" if pools else ""
        asked = f"{before} {late}, which the check refused"
    size = f" on top of --hicache-size {launch.size_gb:g}" if launch.size_gb else ""
    bounded = f"; without the latter it would have fitted {bound}" if decisive else ""
    larger = "" if decisive or refused else " Their share made the shortage larger."
    yield Symptom(
        "high" if refused or decisive else "medium",
        quotes(refused) + quotes(side, 16) + launch.size_evidence,
        f"Host pools of several kinds were asked for:{asked}{size}{bounded}.{larger}{'' if refused else launch.ending}",
        launch.question.remedy,
    )


@rule(
    70,
    f"pinned buffers rounded up to a power of two (releases from {pinned_since()}, before {exact_since()})",
    explains=MEMORY_END,
)
def power_of_two_rounding(launch: RunFacts) -> Iterator[Symptom]:
    """Torch's pinned allocator took the next power of two for each buffer."""
    run, bound = launch.run, launch.room
    pools = [pool for pool in run.host_pools if pool.bytes >= NOTICEABLE]
    rules = next((rules for rules in launch.rules if rules.pinned_power_of_two), None)
    certain = launch.rule("pinned_power_of_two") is True
    if not pools or rules is None or (bound is None and not certain):
        return
    scale = run.projected_host_bytes / run.host_bytes
    plain = round(sum(pool.bytes for pool in pools) * scale)
    taken = round(sum(rules.resident_bytes(pool.bytes) for pool in pools) * scale)
    failed = launch.was_killed or launch.failed_early or run.counts["pin_failure"]
    if taken < 1.05 * plain or not failed or (bound is not None and not plain <= bound.bytes < taken):
        return
    one = pools[0].bytes
    there = f"; there are {bound}" if bound is not None else ""
    yield Symptom(
        "medium" if certain and bound is not None else "low",
        quotes(pools) + launch.memory_evidence,
        f"From {pinned_since()} and before {exact_since()} host buffers come from "
        "torch's pinned allocator, which takes the next power of two: "
        f"{format_both(one)} become {format_both(rules.resident_bytes(one))} a rank, "
        f"{format_both(taken)} in all instead of {format_gb(plain)}{there}. The log says {launch.release}.",
        f"{launch.question.remedy}; or a release from {exact_since()} on, which registers the exact size",
    )


@rule(80, "host pools that passed one by one and exceed the memory together", explains=MEMORY_END)
def aggregate_overcommit(launch: RunFacts) -> Iterator[Symptom]:
    """Every pool passed its own check; together they take more than the check would have left."""
    pools, ranks = launch.run.host_pools, launch.run.ranks or 1
    # what was available tells it exactly; more than the whole host has is too much in any case
    bound = launch.room
    budget = launch.budget(bound.bytes) if bound is not None else None
    if not pools or bound is None or (budget is not None and budget.divides):
        return
    total, allowed = launch.run.projected_host_bytes, beyond_reserve_bytes(bound.bytes)
    largest = max(pool.bytes for pool in pools)
    if total <= allowed or largest > allowed or len(pools) < 2 or total < NOTICEABLE:
        return
    if launch.available is None and total <= bound.bytes:
        return
    # a container that the release does not look at is not what its check went by
    checked = launch.question.budget
    shown = len(launch.run.host_bytes_by_rank())
    projected = "" if shown >= ranks else f" ({shown} of {ranks} ranks shown, the rest taken alike)"
    together = f"Together they take {format_both(total)}{projected}"
    check = (
        f"Each of {ranks} ranks checked its own pool ({format_gb(largest)} at most) against {format_gb(allowed)} = "
        f"{bound} − {RESERVE_TEXT} reserve, and passed. {together}, "
        f"{format_gb(total - allowed)} more than that check leaves for all."
        if launch.available is not None and (checked is None or checked.available_bytes == bound.bytes)
        else f"Each of {ranks} ranks asked for its own pool ({format_gb(largest)} at most). {together}; "
        f"there are {bound} in all."
    )
    yield Symptom(
        "high" if launch.was_killed or launch.exhausted is not None else "medium",
        launch.pool_evidence + bound.evidence + launch.memory_evidence,
        f"{check} {launch.release} has no check across ranks.{launch.ending}",
        f"{launch.question.remedy}; or a release from {divides_since()} on, whose check divides by the ranks",
    )


@rule(
    90,
    "a host pool not larger than the device pool (assertion or warning)",
    explains=AFTERMATH | {"low_reuse"},
)
def host_smaller_than_device(launch: RunFacts) -> Iterator[Symptom]:
    """The host tier is not larger than the device pool, so it adds nothing or stops the server."""
    events = list(launch.run.of(ev.HostSmaller))
    if not events:
        return
    first, device_tokens = events[0], launch.run.device_tokens
    if first.fatal:
        tokens = f" of {device_tokens:,} tokens" if device_tokens else ""
        warns_since = first_release_where(lambda rules: rules.not_larger == "warn")
        releases = launch.release if launch.rules else f"releases before {warns_since}"
        text = (
            f"The server stops: in {releases} the host pool must be larger than the device pool{tokens}, and it is not."
        )
    else:
        counts = ""
        if first.host_tokens is not None and first.device_tokens is not None:
            counts = f" ({first.host_tokens:,} tokens in the host pool, {first.device_tokens:,} on the device)"
        text = (
            f"The host pool is not larger than the device pool{counts}: with write-through every token on the device "
            "is held by the host too, so a tier of this size keeps nothing that the device does not."
        )
    yield Symptom(
        "high",
        quotes(events) + launch.size_evidence,
        text,
        "a ratio above 1, or a size larger than the device pool of one rank, as far as the host has room: "
        f"{launch.question.remedy}",
        "failure" if first.fatal else "degraded",
    )
