"""The scheduler against a naive one: a token a step, no jumps, all memory recounted from a tree of nested nodes."""

import random
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_hicache import NaiveHiCache, Part
from test_cachesim_replay import RELEASES, random_requests

from hicache_lab.traffic.cachesim import EvictionPolicy, ReplaySettings, WritePolicy, cache_rules_for, replay
from hicache_lab.traffic.traces import Trace


class Job:
    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.prompt, self.stored, self.outputs = prompt, [*prompt, *output[:-1]], len(output)
        self.end: Part | None = None
        self.have = self.made = self.private = self.counted = 0
        self.hits = (0, 0)


class NaiveServer(NaiveHiCache):
    """Clients, a queue and running jobs around the naive tree."""

    jobs: Sequence[Job] = ()
    # both are recounted from the jobs, whatever the tree notes down
    locked = property(
        lambda self: [part for job in self.jobs if job.end for part in self.path(job.end)], lambda *_: None
    )
    private = property(lambda self: sum(job.private for job in self.jobs), lambda *_: None)

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def cut_up(self, job: Job, tokens: int) -> list[tuple[int, ...]]:
        return [tuple(job.stored[i * self.page : (i + 1) * self.page]) for i in range(tokens // self.page)]

    def serve_all(self, jobs: Sequence[Job], clients: int, turnaround: int, chunk: int) -> list[int]:
        self.jobs, self.chunk, self.turnaround, self.idle_clients = jobs, chunk, turnaround, [0] * clients
        self.waiting, self.running, self.chunked, self.full, self.now = [], [], None, False, 0
        unsent, self.refused = [*jobs], []
        while unsent or self.waiting or self.running or self.chunked:
            busy = bool(self.waiting or self.running or self.chunked)
            for at in [at for at in self.idle_clients if at <= self.now][: len(unsent) if busy else 1]:
                self.idle_clients.remove(at)
                self.waiting.append(unsent.pop(0))
            if batch := self.choose():
                self.now += 1
                self.prefill(batch)
            elif self.running:
                self.now += 1
                self.decode()
            elif min(self.idle_clients) > self.now:
                self.now += 1
        return self.refused

    def choose(self) -> list[tuple[Job, int]]:
        batch = []
        if self.chunked:
            batch.append((self.chunked, min(len(self.chunked.prompt) - self.chunked.have, self.chunk)))
        while self.waiting and not (self.full and not self.chunked):
            left = self.chunk - sum(self.ceil(length) * self.page for _, length in batch)
            promised = sum((self.ceil(length) + 1) * self.page + job.outputs for job, length in batch)
            if left < self.page:
                break
            job = self.waiting[0]
            if self.admit(job, promised):
                missing = len(job.prompt) - job.have
                batch.append(
                    (job, missing if self.ceil(missing) * self.page <= left else left // self.page * self.page)
                )
            elif batch or self.running:
                self.full = bool(self.running)
                break
            else:
                self.refused.append(self.jobs.index(job))
                self.idle_clients.append(self.now + self.turnaround)
            self.waiting.pop(0)
        return batch

    def admit(self, job: Job, promised: int) -> bool:
        found = self.path(self.match(self.cut_up(job, len(job.prompt) - 1)))
        here = [part for part in found if part.device]
        have, waiting = (sum(len(part.pages) for part in parts) for parts in (here, found[len(here) :]))
        job.end = here[-1] if here else None
        locked = self.locked
        spare = sum(len(part.pages) for part in self.everything() if part.device and part not in locked)
        reserved = sum(self.ceil(other.outputs - other.made) for other in self.running)
        room = (self.device_free() + spare - reserved) * self.page - promised
        if len(job.prompt) - have * self.page + job.outputs + (self.page > 1) * self.page >= room:
            job.end = None
            return False
        loaded = 0
        if waiting * self.page >= self.rules.load_back_threshold:
            job.end = found[-1]
            if self.free_device(waiting, evicts_need=self.rules.load_back_evicts_need):
                loaded = waiting
                for part in reversed(found[len(here) :]):
                    part.device = True
                    self.note_duplicate(part)
            else:
                job.end = here[-1] if here else None
        job.hits = (have * self.page, loaded * self.page)
        job.have = sum(job.hits)
        return True

    def prefill(self, batch: list[tuple[Job, int]]) -> None:
        wanted = sum(length + (self.page > 1) * self.page for _, length in batch)
        self.free_device(self.ceil(wanted), evicts_need=self.rules.alloc_evicts_need)
        for job, length in batch:
            job.private += self.ceil(job.have + length) - self.ceil(job.have)
            job.have += length
        self.chunked = None
        for job, _ in batch:
            if job.have < len(job.prompt):
                self.chunked = job
                self.hand_over(job, counts=self.rules.counts_once)
                continue
            job.made = 1
            if job.outputs > 1:
                self.hand_over(job, counts=True)
                self.running.append(job)
            else:
                self.finish(job)

    def decode(self) -> None:
        self.free_device(len(self.running), evicts_need=self.rules.alloc_evicts_need)
        for job in self.running:
            job.private += job.have % self.page == 0
            job.have, job.made = job.have + 1, job.made + 1
        for job in [job for job in self.running if job.made == job.outputs]:
            self.running.remove(job)
            self.finish(job)

    def hand_over(self, job: Job, *, counts: bool) -> None:
        pages = self.cut_up(job, job.have)
        job.end = self.insert(pages, counts=counts, counted=job.counted if self.rules.counts_once else 0)
        job.counted, job.private = len(pages), self.ceil(job.have) - len(pages)

    def finish(self, job: Job) -> None:
        self.hand_over(job, counts=True)
        if self.rules.splits_at_prompt_end and 0 < len(job.prompt) // self.page < len(job.stored) // self.page:
            self.insert(self.cut_up(job, len(job.prompt)), counts=False, counted=0)
        job.private, job.end, self.full = 0, None, False
        self.idle_clients.append(self.now + self.turnaround)


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 10**9))
@example(6)  # a full server looks again when a request ends, not when one arrives
@example(153)  # a step of decode makes room once, however many requests begin a page in it
def test_equal_to_a_naive_server_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(seed, 30)
    page, write, evict = rng.choice([1, 8]), rng.choice(list(WritePolicy)), rng.choice(["lru", "lfu"])
    setting = ReplaySettings(
        rng.randint(60, 400),
        rng.choice([0, 60, 150, 300, 900]),
        page_size=page,
        write_policy=write,
        eviction=EvictionPolicy(evict),
        release=rng.choice(RELEASES),
        concurrency=rng.randint(1, 8),
        turnaround_steps=rng.randint(0, 4),
        chunked_prefill_tokens=rng.choice([8, 16, 40, 64, 4096]),
    )
    naive = NaiveServer(
        cache_rules_for(setting.release)[0],
        device=setting.device_tokens,
        host=setting.host_tokens,
        page=page,
        write=write,
        evict=evict,
    )
    jobs = [Job(prompt, output) for prompt, output in requests]
    refused = naive.serve_all(jobs, setting.concurrency, setting.turnaround_steps, setting.chunked_prefill_tokens)
    found = replay(Trace.from_tokens(requests, block_tokens=page), setting)
    assert found.refused == tuple(refused), setting
    tiers = list(zip(found.device_tokens.tolist(), found.host_tokens.tolist(), strict=True))
    assert tiers == [job.hits for job in jobs], setting
    assert found.moved.backed_up == naive.copied, setting
