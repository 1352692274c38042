"""What the replay simulator says about the very prompts that were sent, request by request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hicache_lab.base.errors import HicacheLabError
from hicache_lab.serving import load
from hicache_lab.serving.load import RequestRecord
from hicache_lab.serving.load.plans import Tokens
from hicache_lab.serving.measurement.run import ServerRun
from hicache_lab.traffic.cachesim import ReplaySettings, WritePolicy, replay
from hicache_lab.traffic.traces import Trace


@dataclass(frozen=True)
class Simulation:
    """Simulated hits of each measured request, in sending order, from an empty cache.

    Attributes:
        records: the requests.
        device_tokens, host_tokens: simulated hits of each.
        warnings: what a reader must know.
        why_not: why nothing could be simulated, or None.
    """

    records: tuple[RequestRecord, ...] = ()
    device_tokens: tuple[int, ...] = ()
    host_tokens: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    why_not: str | None = None

    @property
    def agreeing(self) -> int:
        """Requests whose simulated and measured hits are the same on both tiers."""
        simulated = zip(self.records, self.device_tokens, self.host_tokens, strict=True)
        return sum((r.cached_device, r.cached_host) == (device, host) for r, device, host in simulated)

    @property
    def rows(self) -> list[dict[str, object]]:
        """Simulated beside measured, phase by phase."""
        rows: list[dict[str, object]] = []
        simulated = list(zip(self.records, self.device_tokens, self.host_tokens, strict=True))
        for phase in dict.fromkeys(record.phase for record in self.records):
            requests = [request for request in simulated if request[0].phase == phase]
            rows.append(
                {
                    "phase": phase,
                    "requests": len(requests),
                    "on the device, simulated": sum(device for _, device, _ in requests),
                    "measured": sum(record.cached_device or 0 for record, _, _ in requests),
                    "on the host, simulated": sum(host for _, _, host in requests),
                    "measured ": sum(record.cached_host or 0 for record, _, _ in requests),
                }
            )
        return rows


def simulate_run(run: ServerRun) -> Simulation:
    """Replay the prompts of a run through the simulator, with the server's own pools and flags.

    The prompts are made again from the plan's seed, the answers are the ones that were received; requests that failed
    are left out. What the cache held before the load is not known and taken as nothing.
    """
    server, result = run.server, run.result
    if result.parameters.get("form") != "ids" or result.parameters["target"]["api"] != "generate":
        return Simulation(why_not="only prompts sent as token ids to /generate can be made again token by token")
    if server.device_tokens is None or (server.hicache.enabled and server.host_tokens is None):
        return Simulation(why_not="the server does not tell the sizes of its pools")
    try:
        sent = list(_sent(run))
        trace = Trace.from_tokens(
            [(prompt, record.output_ids) for record, prompt in sent], origin="measured: this load"
        )
        settings = ReplaySettings(
            device_tokens=server.device_tokens,
            host_tokens=server.host_tokens or 0,
            page_size=server.page_size or 1,
            write_policy=WritePolicy.parse(server.hicache.write_policy or "write_through"),
            release=server.release,
            concurrency=result.parameters["pace"]["concurrency"] or 1,
            chunked_prefill_tokens=server.chunked_prefill_tokens or 8192,
        )
        replayed = replay(trace, settings)
    except HicacheLabError as error:
        return Simulation(why_not=str(error))
    measured = [place for place, (record, _) in enumerate(sent) if not record.warmup]
    return Simulation(
        tuple(sent[place][0] for place in measured),
        tuple(int(replayed.device_tokens[place]) for place in measured),
        tuple(int(replayed.host_tokens[place]) for place in measured),
        replayed.warnings,
    )


def _sent(run: ServerRun) -> Iterator[tuple[RequestRecord, Tokens]]:
    """Every answered request with its prompt, in the order in which they were sent."""
    result = run.result
    plan = load.plan_of(result.plan, result.seed, result.parameters)
    phases = {phase.name: phase for phase in plan.phases}
    if result.parameters["warmup"]:
        phases["warm-up"] = load.warmup_plan(plan, result.parameters["warmup"]).phases[0]
    answered = [record for record in result.records if record.error is None]
    answers = {(record.phase, record.session, record.turn): record.output_ids for record in answered}
    # warm-up requests count downwards from -1, measured ones upwards
    for record in sorted(answered, key=lambda record: (not record.warmup, abs(record.index))):
        # what was said before, answers included, and the turn's own tokens
        turns = phases[record.phase].sessions[record.session].turns
        prompt: Tokens = ()
        for place in range(record.turn):
            prompt += turns[place].tokens + answers[record.phase, record.session, place]
        yield record, prompt + turns[record.turn].tokens
