"""The scheduler of one replay: admits, prefills and decodes requests over the prefix tree."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np

from hicache_lab.traffic.cachesim.clients import Clients
from hicache_lab.traffic.cachesim.nodes import TreeNode
from hicache_lab.traffic.cachesim.rules import ReplayRules
from hicache_lab.traffic.cachesim.settings import ReplaySettings
from hicache_lab.traffic.cachesim.tree import PrefixTree
from hicache_lab.traffic.traces import Trace

_LONG_REQUESTS = 20_000


class _Request:
    """A request under way."""

    __slots__ = ("at", "computed", "counted", "end", "index", "inputs", "outputs", "private", "produced")

    def __init__(self, index: int, at: int, inputs: int, outputs: int, end: TreeNode, prefix: int) -> None:
        self.index, self.at, self.inputs, self.outputs = index, at, inputs, max(outputs, 1)
        self.end = end  # the locked end of its path
        self.computed = prefix  # tokens whose KV exists
        self.counted = 0  # tokens inserted so far
        self.private = 0  # device slots that are not the tree's
        self.produced = 0


class Scheduler:
    """The scheduler's loop: prefill when something can be admitted, decode otherwise.

    Attributes:
        device, host, host_left: the columns of ``ReplayResult``, shape (requests,).
        refused: requests that can never fit.
        tree: the prefix tree.
        full: the first waiting request did not fit beside the running ones. Nobody looks again before one of them ends,
            whoever arrives (0.5.10 and 0.5.23, managers/scheduler.py, ``batch_is_full``).
        step: steps (one prefill batch or one token of every running request) that have ended.
    """

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
        self.clients = Clients(trace.requests, settings.concurrency, settings.turnaround_steps)
        self.step = 0
        self.full = False
        self.waiting: deque[int] = deque()
        self.running: list[_Request] = []
        self.chunked: _Request | None = None

    def all(self) -> None:
        """Serve every request; a long replay shows its progress on a terminal."""
        from tqdm import tqdm

        total = self.clients.unsent
        quiet = total < _LONG_REQUESTS or not sys.stderr.isatty()
        with tqdm(total=total, unit="request", desc="replaying", file=sys.stderr, leave=False, disable=quiet) as bar:
            while True:
                idle = not (self.waiting or self.running or self.chunked)
                arrived = self.clients.sent(self.step, idle=idle)
                self.waiting.extend(arrived)
                bar.update(len(arrived))
                if self._prefill():
                    continue
                if self.running:
                    self._decode()
                elif (sending := self.clients.next_sending) is not None:
                    self.step = max(self.step, sending)
                elif not self.waiting:
                    return

    # ---- prefill ----

    def _prefill(self) -> bool:
        if self.full:  # then no prefill is under way either: beside a chunk nobody is looked at before its last one
            return False
        budget = self.settings.chunked_prefill_tokens
        batch: list[tuple[_Request, int]] = []
        promised = 0
        if self.chunked is not None:
            length = min(self.chunked.inputs - self.chunked.computed, budget)
            batch.append((self.chunked, length))
            budget -= self._pages(length)
            promised = self._pages(length) + self.page + self.chunked.outputs
        while self.waiting and budget >= self.page:
            request = self._admit(self.waiting[0], promised, alone=not batch and not self.running)
            if request is None:
                self.full = bool(self.running)  # a batch that starts on an idle server forgets it
                break
            self.waiting.popleft()
            if request is _REFUSED:
                self.clients.answered(self.step)
                continue
            missing = request.inputs - request.computed
            length = missing if self._pages(missing) <= budget else budget // self.page * self.page
            batch.append((request, length))
            budget -= self._pages(length)
            promised += self._pages(length) + self.page + request.outputs
        if not batch:
            return False
        self.step += 1
        self._compute(batch)
        return True

    def _admit(self, index: int, promised: int, *, alone: bool) -> _Request | None:
        """Look a request up and lock its path; None: it must wait."""
        at, inputs, outputs = self.offsets[index], self.inputs[index], self.outputs[index]
        usable = max(inputs - 1, 0) // self.page * self.page
        match = self.tree.match(at, min(-(-usable // self.block), self.prompt_blocks[index]))
        end = self.tree.device_end(match)
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
        on_host = min(match.path_tokens, usable) - prefix
        self.device[index] = prefix
        if on_host > 0 or match is not end:
            loaded = self.tree.load_back(match)
            if loaded:
                self.host[index] = on_host
                self.tree.lock(match)
                self.tree.unlock(end)
                end, prefix = match, prefix + on_host
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
        """Generate until the first running request ends or, unless the server is full, the next request arrives."""
        steps = min(request.outputs - request.produced for request in self.running)
        if not self.full and (sending := self.clients.next_sending) is not None:
            steps = min(steps, sending - self.step)
        self.step += steps
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
        """A page whenever a request fills its last one; each step first makes room for a page a request, once."""
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

    def _settle(self, request: _Request, end: TreeNode, taken: int, kept: int) -> None:
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
        self.full = False
        self.clients.answered(self.step)

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page


_REFUSED = _Request(-1, 0, 0, 0, TreeNode.root(), 0)
