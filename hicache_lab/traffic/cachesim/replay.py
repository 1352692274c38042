"""Replay a trace by HiCache's own rules: per request, cached tokens by tier.

Modelled (with the release's ``ReplayRules``): page alignment, the token that is always computed again, node-granular
leaf-first eviction by each policy, paths locked by running requests, device slots of running requests (prompt and
output), insertion after each prefill chunk, after prefill and at the end, copy thresholds of the three write policies,
pinned host copies, all-or-nothing load back with its threshold, how much each release evicts at a time, admission.

Not modelled: time (copies and loads are finished before the next step), retraction (admission reserves a request's
whole output), schedule policies other than fcfs, speculative decoding, LoRA name spaces, storage backends (L3),
sub-pools of hybrid models, data-parallel ranks with their own trees.

Requests come in trace order from ``concurrency`` clients, each sending its next request ``turnaround_steps`` scheduler
steps after an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hicache_lab.base.display import Displayed, one_line
from hicache_lab.traffic.cachesim.nodes import MovedTokens
from hicache_lab.traffic.cachesim.scheduler import Scheduler
from hicache_lab.traffic.cachesim.settings import ReplaySettings
from hicache_lab.traffic.cachesim.tiers import TierHits
from hicache_lab.traffic.traces import Trace

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ReplayResult(TierHits, Displayed):
    """What a replay found: cached tokens by tier, and

    Attributes:
        settings: the configuration.
        host_left_tokens: tokens found on the host and computed again all the same, shape (requests,).
        refused: requests that can never fit into the device pool (left out, no hit).
        moved: tokens moved and lost.
        warnings: what the settings mean beyond the numbers.
        origin: the trace's origin.
    """

    settings: ReplaySettings
    host_left_tokens: Ints
    refused: tuple[int, ...]
    moved: MovedTokens
    warnings: tuple[str, ...]
    origin: str

    def __repr__(self) -> str:
        tiers = f"{self.device_rate:.2%} on the device, {self.host_rate:.2%} from the host"
        return f"ReplayResult({one_line(self.origin)} on {self.settings.release}: {tiers})"


def replay(trace: Trace, settings: ReplaySettings) -> ReplayResult:
    """Replay a trace request by request.

    Raises:
        InputError: the trace holds lengths only.
        UsageError: settings that the release does not take, or a page that does not fit the trace's blocks.
    """
    trace.require_prefixes("a replay")
    rules, warnings = settings.check()
    if trace.block_tokens % settings.page_size:
        trace = trace.coarse(settings.page_size)
    run = Scheduler(trace, settings, rules)
    run.all()
    if run.refused:
        warnings = (
            *warnings,
            f"{len(run.refused)} requests can never fit into {settings.device_tokens} device tokens",
        )
    if run.tree.moved.assertions:
        warnings = (
            *warnings,
            f"sglang {settings.release} would have died {run.tree.moved.assertions} times: write_back found no host "
            "space (assert node.backuped); the replay drops the node and goes on",
        )
    return ReplayResult(
        settings=settings,
        device_tokens=run.device,
        host_tokens=run.host,
        host_left_tokens=run.host_left,
        input_tokens=trace.input_tokens,
        refused=tuple(run.refused),
        moved=replace(run.tree.moved),
        warnings=warnings,
        origin=trace.origin,
    )
