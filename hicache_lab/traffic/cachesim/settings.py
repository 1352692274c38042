"""What a replay is given: one configuration of a server and its clients."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_lab.base.errors import UsageError
from hicache_lab.sglang.releases import NEWEST
from hicache_lab.traffic.cachesim.nodes import EvictionPolicy
from hicache_lab.traffic.cachesim.rules import ReplayRules, cache_rules_for
from hicache_lab.traffic.cachesim.tiers import WritePolicy


@dataclass(frozen=True)
class ReplaySettings:
    """One configuration to replay.

    Attributes:
        device_tokens: ``max_total_num_tokens``.
        host_tokens: tokens of the host pool; 0: no HiCache.
        page_size: ``--page-size``.
        write_policy: ``--hicache-write-policy``.
        eviction: ``--radix-eviction-policy``.
        release: the SGLang release whose rules count.
        concurrency: clients that wait for their answer before they send the next request.
        turnaround_steps: scheduler steps that begin between an answer and its client's next request: with the overlap
            scheduler two, because its next step has been launched when a result is looked at, and one more begins
            before the request has come (0.5.10 and 0.5.23, managers/scheduler.py, ``event_loop_overlap``); 0 is a
            client that needs no time. Means nothing to a single client.
        chunked_prefill_tokens: ``--chunked-prefill-size``, shared by a prefill batch.
    """

    device_tokens: int
    host_tokens: int
    page_size: int = 1
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: EvictionPolicy = field(default_factory=EvictionPolicy)
    release: str = NEWEST
    concurrency: int = 1
    turnaround_steps: int = 2
    chunked_prefill_tokens: int = 8192

    def check(self) -> tuple[ReplayRules, tuple[str, ...]]:
        """The rules of the release, and what a reader of the results must know.

        Raises:
            UsageError: a value that the release does not take.
        """
        rules, warning = cache_rules_for(self.release)
        for flag, value, least in (
            ("--device-tokens", self.device_tokens, 1),
            ("--host-tokens", self.host_tokens, 0),
            ("--page-size", self.page_size, 1),
            ("--concurrency", self.concurrency, 1),
            ("--turnaround-steps", self.turnaround_steps, 0),
            ("--chunked-prefill-size", self.chunked_prefill_tokens, self.page_size),
        ):
            if value < least:
                raise UsageError(f"{flag}: expected at least {least}, got {value}")
        if self.eviction.name not in rules.policies:
            raise UsageError(
                f"--radix-eviction-policy: sglang {self.release} takes {', '.join(rules.policies)}, "
                f"got {self.eviction.name!r}"
            )
        warnings = [warning] if warning else []
        if self.host_tokens and self.host_tokens <= self.device_tokens:
            policy = self.write_policy
            if policy is not WritePolicy.WRITE_BACK:
                warnings.append(
                    f"the host tier is no larger than the device tier: under {policy} it adds next to nothing"
                )
        if self.write_policy is WritePolicy.WRITE_BACK and self.eviction.name in ("lfu", "slru"):
            warnings.append(f"under write_back no hit is counted, so {self.eviction.name} acts as lru")
        return rules, tuple(warnings)
