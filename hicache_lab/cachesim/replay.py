"""Replay a trace by HiCache's own rules: per request, cached tokens by tier.

Modelled (with the release's ``ReplayRules``): page alignment, the token that is always computed again, node-granular
leaf-first eviction by each policy, paths locked by running requests, device slots of running requests (prompt and
output), insertion after each prefill chunk, after prefill and at the end, copy thresholds of the three write policies,
pinned host copies, all-or-nothing load back with its threshold, how much each release evicts at a time, admission.

Not modelled: time (copies and loads are finished before the next step), retraction (admission reserves a request's
whole output), schedule policies other than fcfs, speculative decoding, LoRA name spaces, storage backends (L3),
sub-pools of hybrid models, data-parallel ranks with their own trees.

Requests come in trace order from ``concurrency`` clients, each sending its next request when one ends.
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from hicache_lab.cachesim.nodes import EvictionPolicy, Node, Traffic
from hicache_lab.cachesim.rules import ReplayRules, rules_for
from hicache_lab.cachesim.tiers import WritePolicy
from hicache_lab.cachesim.tree import PrefixTree
from hicache_lab.errors import UsageError
from hicache_lab.traces import Trace

Ints = npt.NDArray[np.int64]
_LONG_REQUESTS = 20_000


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
        chunked_prefill_tokens: ``--chunked-prefill-size``, shared by a prefill batch.
    """

    device_tokens: int
    host_tokens: int
    page_size: int = 1
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    eviction: EvictionPolicy = field(default_factory=EvictionPolicy)
    release: str = "0.5.23"
    concurrency: int = 1
    chunked_prefill_tokens: int = 8192

    def check(self) -> tuple[ReplayRules, tuple[str, ...]]:
        """The rules of the release, and what a reader of the results must know.

        Raises:
            UsageError: a value that the release does not take.
        """
        rules, warning = rules_for(self.release)
        for flag, value, least in (
            ("--device-tokens", self.device_tokens, 1),
            ("--host-tokens", self.host_tokens, 0),
            ("--page-size", self.page_size, 1),
            ("--concurrency", self.concurrency, 1),
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


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found.

    Attributes:
        settings: the configuration.
        device_tokens: cached prompt tokens found on the device, shape (requests,).
        host_tokens: cached prompt tokens loaded back from the host, shape (requests,).
        host_left_tokens: tokens found on the host and computed again all the same, shape (requests,).
        input_tokens: prompt tokens, shape (requests,).
        refused: requests that can never fit into the device pool (left out, no hit).
        traffic: tokens moved and lost.
        warnings: what the settings mean beyond the numbers.
        origin: the trace's origin.
    """

    settings: ReplaySettings
    device_tokens: Ints
    host_tokens: Ints
    host_left_tokens: Ints
    input_tokens: Ints
    refused: tuple[int, ...]
    traffic: Traffic
    warnings: tuple[str, ...]
    origin: str

    @property
    def cached_tokens(self) -> Ints:
        """Prompt tokens not computed, shape (requests,)."""
        return self.device_tokens + self.host_tokens

    @property
    def device_rate(self) -> float:
        """Share of all prompt tokens found on the device."""
        return float(self.device_tokens.sum()) / max(int(self.input_tokens.sum()), 1)

    @property
    def host_rate(self) -> float:
        """Share of all prompt tokens loaded back from the host."""
        return float(self.host_tokens.sum()) / max(int(self.input_tokens.sum()), 1)

    @property
    def total_rate(self) -> float:
        """Share of all prompt tokens not computed."""
        return self.device_rate + self.host_rate


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
    run = _Run(trace, settings, rules)
    run.all()
    if run.refused:
        warnings = (
            *warnings,
            f"{len(run.refused)} requests can never fit into {settings.device_tokens} device tokens",
        )
    if run.tree.traffic.assertions:
        warnings = (
            *warnings,
            f"sglang {settings.release} would have died {run.tree.traffic.assertions} times: write_back found no host "
            "space (assert node.backuped); the replay drops the node and goes on",
        )
    return ReplayResult(
        settings=settings,
        device_tokens=run.device,
        host_tokens=run.host,
        host_left_tokens=run.host_left,
        input_tokens=trace.input_tokens,
        refused=tuple(run.refused),
        traffic=replace(run.tree.traffic),
        warnings=warnings,
        origin=trace.origin,
    )


class _Request:
    """A request under way."""

    __slots__ = ("at", "computed", "counted", "end", "index", "inputs", "outputs", "private", "produced")

    def __init__(self, index: int, at: int, inputs: int, outputs: int, end: Node, prefix: int) -> None:
        self.index, self.at, self.inputs, self.outputs = index, at, inputs, max(outputs, 1)
        self.end = end  # the locked end of its path
        self.computed = prefix  # tokens whose KV exists
        self.counted = 0  # tokens inserted so far
        self.private = 0  # device slots that are not the tree's
        self.produced = 0


class _Run:
    """The scheduler's loop: prefill when something can be admitted, decode otherwise."""

    def __init__(self, trace: Trace, settings: ReplaySettings, rules: ReplayRules) -> None:
        page = settings.page_size
        self.trace, self.settings, self.rules, self.page = trace, settings, rules, page
        self.block = trace.block_tokens
        self.tree = PrefixTree(
            np.ascontiguousarray(trace.ids).data,
            device_tokens=settings.device_tokens // page * page,
            host_tokens=settings.host_tokens // page * page,
            write_policy=settings.write_policy,
            eviction=settings.eviction,
            rules=rules,
            block_tokens=trace.block_tokens,
        )
        self.offsets = trace.offsets.tolist()
        self.inputs, self.outputs = trace.input_tokens.tolist(), trace.output_tokens.tolist()
        self.prompt_blocks = trace.prompt_blocks.tolist()
        self.device = np.zeros(trace.requests, np.int64)
        self.host = np.zeros(trace.requests, np.int64)
        self.host_left = np.zeros(trace.requests, np.int64)
        self.refused: list[int] = []
        self.waiting = deque(range(trace.requests))
        self.running: list[_Request] = []
        self.chunked: _Request | None = None

    def all(self) -> None:
        """Serve every request; a long replay shows its progress on a terminal."""
        from tqdm import tqdm

        total = len(self.waiting)
        quiet = total < _LONG_REQUESTS or not sys.stderr.isatty()
        with tqdm(total=total, unit="request", desc="replaying", file=sys.stderr, leave=False, disable=quiet) as bar:
            while self.waiting or self.running or self.chunked:
                before = len(self.waiting)
                if not self._prefill() and self.running:
                    self._decode()
                bar.update(before - len(self.waiting))

    # ---- prefill ----

    def _prefill(self) -> bool:
        budget = self.settings.chunked_prefill_tokens
        batch: list[tuple[_Request, int]] = []
        promised = 0
        if self.chunked is not None:
            length = min(self.chunked.inputs - self.chunked.computed, budget)
            batch.append((self.chunked, length))
            budget -= self._pages(length)
            promised = self._pages(length) + self.page + self.chunked.outputs
        while self.waiting and budget >= self.page and len(self.running) + len(batch) < self.settings.concurrency:
            request = self._admit(self.waiting[0], promised, alone=not batch and not self.running)
            if request is None:
                break
            self.waiting.popleft()
            if request is _REFUSED:
                continue
            missing = request.inputs - request.computed
            length = missing if self._pages(missing) <= budget else budget // self.page * self.page
            batch.append((request, length))
            budget -= self._pages(length)
            promised += self._pages(length) + self.page + request.outputs
        if not batch:
            return False
        self._compute(batch)
        return True

    def _admit(self, index: int, promised: int, *, alone: bool) -> _Request | None:
        """Look a request up and lock its path; None: it must wait."""
        at, inputs, outputs = self.offsets[index], self.inputs[index], self.outputs[index]
        usable = max(inputs - 1, 0) // self.page * self.page
        found = self.tree.match(at, min(-(-usable // self.block), self.prompt_blocks[index]))
        end = self.tree.device_end(found)
        prefix = min(end.path_tokens, usable)
        self.tree.lock(end)
        left = sum(self._pages(other.outputs - other.produced) for other in self.running)
        room = self.tree.device_free + self.tree.evictable - promised - left
        if inputs - prefix + max(outputs, 1) + (self.page if self.page > 1 else 0) >= room:
            self.tree.unlock(end)
            if not alone:
                return None
            self.refused.append(index)
            return _REFUSED
        on_host = min(found.path_tokens, usable) - prefix
        self.device[index] = prefix
        if on_host > 0 or found is not end:
            loaded = self.tree.load_back(found)
            if loaded:
                self.host[index] = on_host
                self.tree.lock(found)
                self.tree.unlock(end)
                end, prefix = found, prefix + on_host
            else:
                self.host_left[index] = on_host
        return _Request(index, at, inputs, outputs, end, prefix)

    def _compute(self, batch: list[tuple[_Request, int]]) -> None:
        overhead = self.page if self.page > 1 else 0
        self.tree.make_room(sum(length + overhead for _, length in batch))
        for request, length in batch:
            before = self._pages(request.computed)
            request.computed += length
            taken = self._pages(request.computed) - before
            self.tree.device_free -= taken
            request.private += taken
        self.chunked = None
        for request, _ in batch:
            if request.computed < request.inputs:
                self._insert(request, request.computed // self.page * self.page, chunk=True)
                self.chunked = request
                continue
            request.produced = 1
            if request.outputs == 1:
                self._finish(request)
            else:
                self._insert(request, request.inputs // self.page * self.page, chunk=False)
                self.running.append(request)

    # ---- decode ----

    def _decode(self) -> None:
        """Generate until the first running request ends."""
        steps = min(request.outputs - request.produced for request in self.running)
        if self.page == 1:
            self._slots(steps)
        else:
            self._new_pages(steps)
        for request in self.running:
            request.produced += steps
            request.computed += steps
        for request in [r for r in self.running if r.produced >= r.outputs]:
            self.running.remove(request)
            self._finish(request)

    def _slots(self, steps: int) -> None:
        count = len(self.running)
        left = steps
        while left:
            fit = min(left, self.tree.device_free // count)
            if not fit:
                self.tree.make_room(count)
                fit = 1
            self.tree.device_free -= fit * count
            left -= fit
        for request in self.running:
            request.private += steps

    def _new_pages(self, steps: int) -> None:
        """A page whenever a request fills its last one; each step first makes room for a page a request."""
        count = len(self.running)
        done = 0
        while done < steps:
            self.tree.make_room(count * self.page)
            crossing = [-(request.computed + done) % self.page for request in self.running]
            jump = min(crossing)
            if done + jump >= steps:
                return
            for request, distance in zip(self.running, crossing, strict=True):
                if distance == jump:
                    if jump:
                        self.tree.make_room(count * self.page)
                    self.tree.device_free -= self.page
                    request.private += self.page
            done += jump + 1

    # ---- the tree ----

    def _insert(self, request: _Request, tokens: int, *, chunk: bool) -> None:
        """Hand computed tokens to the tree; slots that the tree has no use for are free again."""
        whole = tokens // self.block
        partial = tokens % self.block and not chunk and self.prompt_blocks[request.index] > whole
        blocks = min(whole + bool(partial), self.offsets[request.index + 1] - request.at)
        tokens = tokens if partial else blocks * self.block
        counts = self.rules.counts_once or not chunk
        counted = request.counted if self.rules.counts_once else 0
        end, taken = self.tree.insert(request.at, blocks, tokens, counts=counts, counted=counted)
        self._settle(request, end, taken, kept=self._pages(request.computed) - end.path_tokens)
        request.counted = max(request.counted, tokens)

    def _settle(self, request: _Request, end: Node, taken: int, kept: int) -> None:
        self.tree.device_free += request.private - taken - kept
        request.private = kept
        self.tree.lock(end)
        self.tree.unlock(request.end)
        request.end = end

    def _finish(self, request: _Request) -> None:
        """Insert prompt and output; the last output token has no KV."""
        stored = (request.inputs + request.outputs - 1) // self.page * self.page
        prompt = request.inputs // self.page * self.page
        if self.trace.outputs_known:
            self._insert(request, stored, chunk=False)
        else:
            self._insert(request, prompt, chunk=False)
            rest = stored - request.end.path_tokens
            if rest > 0:
                leaf = self.tree.append_unknown(request.end, rest, counts=True)
                self._settle(request, leaf, rest, kept=request.private - rest)
        if self.rules.splits_at_prompt_end and 0 < prompt < stored:
            blocks = min(-(-prompt // self.block), self.prompt_blocks[request.index])
            self.tree.insert(request.at, blocks, min(prompt, blocks * self.block), counts=False, priority=1)
        self.tree.device_free += request.private
        request.private = 0
        self.tree.unlock(request.end)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page


_REFUSED = _Request(-1, 0, 0, 0, Node(None, -1, 0, 0, 0, -1), 0)
