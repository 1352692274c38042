"""What a host tier costs and brings on one trace: hit rates over host sizes, saved prefill, knee, largest safe tier.

Brings together ``cachesim`` (what tokens buy), ``host_tiers`` (what a flag takes, in tokens and bytes, and whether it
fits) and the speeds of the server (``Rates``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hicache_lab.base.errors import UnknownFact, UsageError
from hicache_lab.base.resources import data_dir
from hicache_lab.base.units import GB, gb
from hicache_lab.preflight import Question
from hicache_lab.preflight.host_tiers import HostTier, host_tier, host_tiers, largest_safe
from hicache_lab.traffic.cachesim import (
    EvictionPolicy,
    HitCurve,
    Rates,
    ReplaySettings,
    Savings,
    WritePolicy,
    cache_rules_for,
    hit_curve,
    knee_of,
    replay,
    replay_blocks,
    savings,
    tier_rates,
)
from hicache_lab.traffic.traces import GENERATORS, READING, Trace, generate, read_trace

Row = Mapping[str, object]
_NOTHING = 0.0005  # a hit rate that rounds to 0.0 %
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # workloads of some minutes of one engine, for "what if my traffic looked like this"
    "multi_turn": {"sessions": 400, "first_tokens": 1500, "turns": 6.0},
    "agentic": {"sessions": 120, "steps": 15.0},
    "shared_system_prompt": {"requests": 3000},
    "rag": {"requests": 1500, "documents": 500},
    "cyclic_scan": {"items": 100, "item_tokens": 8192, "rounds": 4},
}


def shipped_trace(name: str) -> Path | None:
    """A trace that ships with the package, by its name, or None."""
    path = data_dir() / "traces" / f"{name}.jsonl.zst"
    return path if path.is_file() else None


def load_workload(name: str, **parameters: Any) -> Trace:
    """The trace that a name stands for.

    Args:
        name: a generator, a trace that ships with the package, or a file.
        **parameters: the generator's, or how the file is read (``read_trace``).

    Raises:
        UsageError: no such file, or parameters of the other kind.
    """
    if name in GENERATORS and not Path(name).exists():
        return generate(name, **parameters)
    if unknown := [key for key in parameters if key not in READING]:
        raise UsageError(f"{name}: a trace file takes no generator parameters ({', '.join(unknown)})")
    return read_trace(shipped_trace(name) or name, **parameters)


@dataclass(frozen=True)
class CostBenefit:
    """A trace behind one launch.

    Attributes:
        trace: the traffic.
        curve: its hit rate in tokens at every size; everything below is looked up in it.
        question: the launch with its device pool and, better, its host; ratio and size are what is varied.
        policy: the write policy.
        rates: the server's speed, or None.
    """

    trace: Trace
    curve: HitCurve
    question: Question
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    rates: Rates | None = None

    @property
    def device_tokens(self) -> int:
        """The device pool."""
        return self.question.device.tokens or 0

    @property
    def device_rate(self) -> float:
        """Hit rate without a host tier."""
        return float(self.curve.rate_at_tokens(self.device_tokens))

    @cached_property
    def safe(self) -> HostTier | None:
        """The largest tier that fits the host."""
        return largest_safe(self.question)

    @cached_property
    def host_bytes_per_token(self) -> float:
        """Bytes that one more token asks of the whole host: every rank's bytes, side pools included."""
        small, large = host_tier(self.question, ratio=2.0), host_tier(self.question, ratio=4.0)
        return (large.host_bytes - small.host_bytes) / (large.tokens - small.tokens)

    def tokens_within(self, host_bytes: float) -> int:
        """Tokens of the largest tier that really takes no more of the host than these bytes."""
        ranks = self.question.config.processes_per_host
        asked_bytes = ranks * self.question.rules.allocated_within(int(host_bytes / ranks))
        return int(asked_bytes / self.host_bytes_per_token)

    def rate(self, host_tokens: int) -> float:
        """Hit rate of both tiers."""
        return float(tier_rates(self.curve, self.device_tokens, host_tokens, self.policy))

    def savings(self, host_tokens: int) -> Savings | None:
        """Saved work and time at one size; None without rates."""
        if self.rates is None:
            return None
        hits = replay_blocks(self.trace, self.device_tokens, host_tokens, self.policy)
        return savings(hits, self.rates, self.trace.duration_s)

    def tiers(self, ratios: Sequence[float] = (), sizes_gb: Sequence[int] = ()) -> tuple[HostTier, ...]:
        """The settings to compare and the largest safe one, ascending."""
        tiers = host_tiers(self.question, ratios=ratios, sizes_gb=sizes_gb)
        if self.safe is not None and self.safe.tokens not in {tier.tokens for tier in tiers}:
            tiers = tuple(sorted((*tiers, self.safe), key=lambda tier: tier.tokens))
        return tiers

    def rows(self, tiers: Sequence[HostTier]) -> Sequence[Row]:
        """One row a setting, for a table: what it takes, whether it fits, what it buys."""
        steps = self.rate_per_gb(tiers)
        rows: list[Row] = []
        for tier, step in zip(tiers, steps, strict=True):
            row: dict[str, object] = {
                "setting": tier.label,
                "ratio": round(tier.ratio, 2),
                "tokens": tier.tokens,
                "GB a rank": round(gb(tier.per_rank_bytes), 1),
                "GB on the host": round(gb(tier.allocated_host_bytes), 1),
                "verdict": tier.verdict,
                "hit rate %": round(100 * self.rate(tier.tokens), 2),
                "host adds, points": round(100 * (self.rate(tier.tokens) - self.device_rate), 2),
                "points per extra GB": round(100 * step, 4),
            }
            saved = self.savings(tier.tokens)
            if saved is not None:
                hourly = saved.saved_tokens_per_hour
                row["prefill tokens saved an hour"] = None if hourly is None else round(hourly)
                row["TTFT saved, mean ms"] = round(1000 * saved.ttft_saved_mean_s, 1)
            rows.append(row)
        return rows

    def rate_per_gb(self, tiers: Sequence[HostTier]) -> list[float]:
        """Hit rate (a share) gained per extra GB of the whole host on the step to each setting.

        The first step is the one from no host tier at all.
        """
        rates = [self.device_rate, *(self.rate(tier.tokens) for tier in tiers)]
        sizes = [0, *(tier.allocated_host_bytes for tier in tiers)]
        gained, added = (np.diff(np.array(values, np.float64)) for values in (rates, sizes))
        per_gb: list[float] = (gained / np.maximum(added / GB, 1e-12)).tolist()
        return per_gb

    def knee(self, tiers: Sequence[HostTier]) -> HostTier | None:
        """Where an extra byte starts to buy less than the average byte; None: the curve does not bend there."""
        if len(tiers) < 2:
            return None
        bend = knee_of([self.rate(tier.tokens) for tier in tiers], [tier.allocated_host_bytes for tier in tiers])
        return None if bend is None else tiers[bend]

    def replayed_rows(self, tier: HostTier, release: str, page_size: int, *, requests: int) -> Sequence[Row]:
        """Block model beside the release's own rules, for the three write policies, on the first requests."""
        head = self.trace.head(requests)
        unread = _unread(release)
        rows: list[Row] = []
        for policy in WritePolicy:
            blocks = replay_blocks(head, self.device_tokens, tier.tokens, policy)
            row: dict[str, object] = {
                "write policy": str(policy),
                "blocks, hit rate %": round(100 * blocks.total_rate, 2),
                f"rules of {release}, hit rate %": unread,
            }
            if not unread:
                nodes = replay(
                    head, ReplaySettings(self.device_tokens, tier.tokens, page_size, policy, release=release)
                )
                row[f"rules of {release}, hit rate %"] = round(100 * nodes.total_rate, 2)
                row["on the device %"] = round(100 * nodes.device_rate, 2)
                row["from the host %"] = round(100 * nodes.host_rate, 2)
                row["copied to the host, Mtokens"] = round(nodes.moved.backed_up / 1e6, 2)
            rows.append(row | {"source": "simulated" if unread else "simulated / replayed"})
        return rows

    def eviction_rows(
        self, tier: HostTier, release: str, page_size: int, policies: Sequence[str], *, requests: int
    ) -> Sequence[Row]:
        """The release's eviction policies side by side, replayed."""
        head = self.trace.head(requests)
        unread = _unread(release)
        if unread:
            return [{"--radix-eviction-policy": name, "hit rate %": unread} for name in policies]
        rows: list[Row] = []
        for name in policies:
            settings = ReplaySettings(
                self.device_tokens, tier.tokens, page_size, self.policy, EvictionPolicy(name), release
            )
            hits = replay(head, settings)
            rows.append(
                {
                    "--radix-eviction-policy": name,
                    "hit rate %": round(100 * hits.total_rate, 2),
                    "on the device %": round(100 * hits.device_rate, 2),
                    "from the host %": round(100 * hits.host_rate, 2),
                }
            )
        return rows


def _unread(release: str) -> str:
    """Words in the place of a replay, for a release whose cache rules have not been read; "" where they have."""
    try:
        cache_rules_for(release)
    except UnknownFact:
        return f"not replayed: the rules of {release} have not been read"
    return ""


def shape_rows(
    question: Question, host_tokens: int, policy: WritePolicy, names: Iterable[str] = tuple(SHAPES)
) -> Sequence[Row]:
    """The same pools behind other kinds of traffic: what the answer depends on."""
    rows: list[Row] = []
    for name in names:
        case = _behind(generate(name, **SHAPES[name]), question, policy)
        reused = case.curve.largest_useful_blocks * case.curve.block_tokens
        working_set = {"requests": case.trace.requests, "working set, Mtokens": round(reused / 1e6, 2)}
        rows.append({"traffic": name} | working_set | _three_rates(case, host_tokens, decimals=1))
    return rows


def seed_rows(
    question: Question, host_tokens: int, policy: WritePolicy, *, seeds: int, name: str = "mooncake_like"
) -> Sequence[Row]:
    """The same description with other seeds: how much of a result is chance."""
    cases = [_behind(generate(name, seed=seed), question, policy) for seed in range(seeds)]
    return [{"seed": seed} | _three_rates(case, host_tokens, decimals=2) for seed, case in enumerate(cases)]


def _behind(trace: Trace, question: Question, policy: WritePolicy) -> CostBenefit:
    return CostBenefit(trace, hit_curve(trace, count="tokens"), question, policy)


def _three_rates(case: CostBenefit, host_tokens: int, decimals: int) -> dict[str, object]:
    return {
        "device only %": round(100 * case.device_rate, decimals),
        "with the host tier %": round(100 * case.rate(host_tokens), decimals),
        "unlimited %": round(100 * case.curve.ceiling, decimals),
    }


def rates_for(
    question: Question, prefill_tokens_per_s: float, load_back_gb_per_s: float, basis: str = "given"
) -> Rates:
    """The server's speeds, with the bytes of a token on one rank taken from the launch.

    Args:
        question: the launch.
        prefill_tokens_per_s: tokens that the engine prefills in a second.
        load_back_gb_per_s: host to device, GB (1e9) a second of one rank.
        basis: where the prefill rate comes from.
    """
    tier = host_tier(question, ratio=2.0)
    per_token = max(round(tier.per_rank_bytes / tier.tokens), 1)
    return Rates(prefill_tokens_per_s, load_back_gb_per_s * GB, per_token, basis)


def traffic_row(trace: Trace, curve: HitCurve) -> Row:
    """What a trace holds, in words a reader of a table understands; ``curve`` is the trace's, in tokens."""
    tokens = trace.total_input_tokens
    duration = trace.duration_s
    return {
        "origin": trace.origin,
        "requests": f"{trace.requests:,}",
        "minutes": "not recorded" if duration is None else f"{duration / 60:,.0f}",
        "prompt tokens": f"{tokens:,}",
        "never seen before": f"{100 * (1 - curve.ceiling):.1f} % of prompt tokens",
        "mean prompt": f"{tokens / trace.requests:,.0f} tokens",
        "mean output": f"{trace.output_tokens.mean():,.0f} tokens",
        "block": f"{trace.block_tokens} tokens",
        "left out by the reader": str(sum(trace.skipped.values())),
        "assumed": "; ".join(trace.notes) or "nothing",
    }


def figures_of(case: CostBenefit, tier: HostTier, tiers: Sequence[HostTier]) -> list[tuple[str, object, str]]:
    """(name, value, unit) of what a run records."""
    knee = case.knee(tiers)
    figures: list[tuple[str, object, str]] = [
        ("requests", case.trace.requests, "requests"),
        ("device_hit_rate", case.device_rate, "share of prompt tokens"),
        ("hit_rate", case.rate(tier.tokens), "share of prompt tokens"),
        ("ceiling", case.curve.ceiling, "share of prompt tokens"),
        ("setting", tier.label, ""),
        ("host_tokens", tier.tokens, "tokens a rank"),
        ("host_bytes", tier.allocated_host_bytes, "bytes"),
        ("verdict", tier.verdict, ""),
        ("knee", knee.label if knee else f"none up to {tiers[-1].label}", ""),
    ]
    saved = case.savings(tier.tokens)
    if saved is not None:
        figures.append(("saved_prefill_tokens", saved.saved_tokens, "tokens"))
        figures.append(("ttft_saved_mean_s", saved.ttft_saved_mean_s, "seconds"))
    return figures


def conclusion(case: CostBenefit, tier: HostTier, tiers: Sequence[HostTier] = ()) -> str:
    """What a setting brings, in some sentences with numbers, as Markdown.

    Args:
        case: the trace behind the launch.
        tier: the setting.
        tiers: the settings compared, ascending; a smaller one that does the same is named, and the knee.
    """
    rate = case.rate(tier.tokens)
    gain, possible = rate - case.device_rate, case.curve.ceiling - case.device_rate
    if possible < _NOTHING:
        share = "the device pool alone already has what an unlimited cache would have"
    else:
        share = f"{100 * gain / possible:.0f} % of the {100 * possible:.1f} that an unlimited cache would add"
    sentences = [
        *_unfit(case, tier),
        f"**{tier.label}** ({gb(tier.allocated_host_bytes):,.0f} GB on the host, {tier.verdict}) raises the hit "
        f"rate of this traffic from {100 * case.device_rate:.1f} % to {100 * rate:.1f} % under {case.policy}: "
        f"**{100 * gain:.1f} points**, {share}.",
        *_cheaper(case, tier, tiers),
        *_half(case, possible),
    ]
    saved = case.savings(tier.tokens)
    if saved is not None:
        sentences.append(
            f"It saves {saved.saved_tokens:,} prefill tokens over the trace and "
            f"{1000 * saved.ttft_saved_mean_s:.0f} ms of TTFT on average (loads subtracted, queueing not counted)."
        )
    return " ".join(sentences)


def _unfit(case: CostBenefit, tier: HostTier) -> list[str]:
    """A setting that the host cannot give is a what-if, and is called so before its numbers."""
    if case.question.host is None or tier.verdict in ("FITS", "TIGHT"):
        return []
    if case.safe is None:
        return ["**No host tier fits this host**; the numbers are those of a larger one."]
    return [f"**This host cannot give that**; the largest that fits is {case.safe.label}."]


def _cheaper(case: CostBenefit, tier: HostTier, tiers: Sequence[HostTier]) -> list[str]:
    """The smallest setting that does as much, and where the curve bends."""
    sentences = []
    least = case.rate(tier.tokens) - _NOTHING
    less = [one for one in tiers if one.allocated_host_bytes < tier.allocated_host_bytes]
    same = next((one for one in less if case.rate(one.tokens) >= least), None)
    if same is not None:
        spared_gb = gb(tier.allocated_host_bytes - same.allocated_host_bytes)
        sentences.append(f"**{same.label}** does the same with {spared_gb:,.0f} GB less.")
    if len(tiers) > 1:
        knee, last = case.knee(tiers), tiers[-1]
        sentences.append(
            f"The knee of the settings compared is {knee.label}."
            if knee
            else f"The settings compared have no knee: up to {last.label} a further byte buys at least the average."
            if case.rate(last.tokens) - case.rate(tiers[0].tokens) >= _NOTHING
            else "The settings compared all do the same."
        )
    return sentences


def _half(case: CostBenefit, possible: float) -> list[str]:
    """What half of an unlimited cache's gain would take on the host."""
    needed = case.curve.blocks_for(case.device_rate + possible / 2)
    if needed is None or possible < _NOTHING:
        return []
    tokens = needed * case.curve.block_tokens
    if case.policy is WritePolicy.WRITE_BACK:
        tokens = max(tokens - case.device_tokens, 0)  # the device pool holds a part of them
    cost = gb(host_tier(case.question, ratio=tokens / case.device_tokens).allocated_host_bytes) if tokens else 0.0
    return [f"Half of what an unlimited cache would add takes a host tier of {tokens:,} tokens, {cost:,.0f} GB."]
