"""A second, slow implementation of HiCache's rules for one request at a time: no heaps, no counters, no numbers of ids.

It keeps token pages in nested nodes, recounts all memory from the tree whenever it needs it, and finds each victim by
looking at every node. It shares nothing with ``hicache_lab.traffic.cachesim`` but the rows of ``ReplayRules``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_lab.traffic.cachesim.rules import ReplayRules


class Part:
    def __init__(self, pages: list[tuple[int, ...]], up: Part | None) -> None:
        self.pages, self.up = pages, up
        self.kids: list[Part] = []
        self.device = self.host = False
        self.hits = self.seen = 0


class NaiveHiCache:
    def __init__(
        self, rules: ReplayRules, *, device: int, host: int, page: int, write: str, evict: str = "lru"
    ) -> None:
        self.rules, self.page, self.write, self.evict = rules, page, write, evict
        self.device_pages, self.host_pages = device // page, host // page
        self.top = Part([], None)
        self.orphans: list[Part] = []
        self.clock = self.private = 0
        self.locked: list[Part] = []
        self.duplicates: list[Part] = []
        self.copied = 0

    # -- memory, always recounted --

    def everything(self) -> Iterator[Part]:
        todo = [*self.top.kids, *self.orphans]
        while todo:
            part = todo.pop()
            todo += part.kids
            yield part

    def device_free(self) -> int:
        return self.device_pages - self.private - sum(len(p.pages) for p in self.everything() if p.device)

    def host_free(self) -> int:
        return self.host_pages - sum(len(p.pages) for p in self.everything() if p.host)

    # -- the walk --

    def tick(self, part: Part) -> None:
        self.clock += 1
        part.seen = self.clock

    def path(self, part: Part) -> list[Part]:
        found = []
        while part.up is not None:
            found.insert(0, part)
            part = part.up
        return found

    def cut(self, part: Part, at: int) -> Part:
        upper = Part(part.pages[:at], part.up)
        upper.device, upper.host, upper.hits = part.device, part.host, part.hits
        assert part.up is not None
        part.up.kids[part.up.kids.index(part)] = upper
        upper.kids, part.up, part.pages = [part], upper, part.pages[at:]
        if part in self.locked:
            self.locked.append(upper)
        if part in self.duplicates:
            self.duplicates.append(upper)
        return upper

    def step(self, at: Part, pages: Sequence[tuple[int, ...]]) -> tuple[Part | None, int]:
        for kid in at.kids:
            common = 0
            while common < min(len(kid.pages), len(pages)) and kid.pages[common] == pages[common]:
                common += 1
            if common:
                return kid, common
        return None, 0

    def match(self, pages: Sequence[tuple[int, ...]]) -> Part:
        at, done = self.top, 0
        while done < len(pages):
            kid, common = self.step(at, pages[done:])
            if kid is None:
                break
            self.tick(kid)
            if common < len(kid.pages):
                at = self.cut(kid, common)
                break
            at, done = kid, done + common
        for part in self.path(at):
            self.tick(part)
        return at

    def insert(self, pages: Sequence[tuple[int, ...]], *, counts: bool, counted: int) -> Part:
        at, done = self.top, 0
        while done < len(pages):
            kid, common = self.step(at, pages[done:])
            if kid is None:
                kid = Part(list(pages[done:]), at)
                at.kids.append(kid)
                kid.device = True
                self.private -= len(kid.pages)
                self.tick(kid)
                if counts:
                    self.count(kid)
                return kid
            self.tick(kid)
            if common < len(kid.pages):
                upper = self.cut(kid, common)
                self.tick(upper)
                self.tick(kid)
                kid = upper
            done += len(kid.pages)
            restored = not kid.device
            if restored:
                kid.device = True
                self.private -= len(kid.pages)
                self.note_duplicate(kid)
            if counts and done > counted and (not restored or self.rules.counts_restored):
                self.count(kid)
            at = kid
        return at

    # -- copies and victims --

    def count(self, part: Part) -> None:
        if self.write == "write_back" and self.host_pages:
            return
        part.hits += 1
        wanted = 1 if self.write == "write_through" else 2
        if not self.host_pages or part.host or part.hits < wanted:
            return
        chain = [part]
        if self.rules.backs_up_ancestors:
            chain = [p for p in self.path(part) if not p.host]
        for member in chain:
            if not self.copy(member):
                return

    def copy(self, part: Part, *, write_back: bool = False) -> bool:
        parent_bare = part.up is not self.top and part.up is not None and not part.up.host
        if not write_back and not self.rules.gaps_allowed and parent_bare:
            return False
        size = len(part.pages)
        if self.host_free() < size:
            self.free_host(size if self.rules.backup_evicts_need else size - self.host_free())
        if self.host_free() < size:
            return False
        part.host = True
        self.copied += size * self.page
        return True

    def key(self, part: Part) -> tuple[int, ...]:
        return {"lru": (part.seen,), "lfu": (part.hits, part.seen), "slru": (int(part.hits >= 2), part.seen)}[
            self.evict
        ]

    def free_host(self, wanted: int) -> None:
        freed = 0
        if self.write == "write_back" and self.rules.reclaims_duplicates:
            for sparing in (True, False):
                for part in list(self.duplicates):
                    leaf = part not in self.locked and not any(kid.device for kid in part.kids)
                    if freed < wanted and part.device and part.host and not (sparing and leaf):
                        part.host = False
                        self.duplicates.remove(part)
                        freed += len(part.pages)
        while freed < wanted:
            leaves = [p for p in self.everything() if p.host and not p.device and not p.kids and p not in self.locked]
            if not leaves:
                return
            victim = min(leaves, key=self.key)
            victim.host = False
            freed += len(victim.pages)
            self.forget(victim)

    def forget(self, part: Part) -> None:
        if part in self.orphans:
            self.orphans.remove(part)
        else:
            assert part.up is not None
            part.up.kids.remove(part)

    def free_device(self, pages: int, *, evicts_need: bool) -> bool:
        if self.device_free() >= pages:
            return True
        freed = 0
        while (freed < pages) if evicts_need else (self.device_free() < pages):
            leaves = [
                p
                for p in self.everything()
                if p.device and p not in self.locked and not any(kid.device for kid in p.kids)
            ]
            if not leaves:
                break
            victim = min(leaves, key=self.key)
            freed += len(victim.pages)
            if victim.host or (self.write == "write_back" and self.host_pages and self.copy(victim, write_back=True)):
                victim.device = False
                if victim in self.duplicates:
                    self.duplicates.remove(victim)
                continue
            if self.write != "write_back":
                self.orphans += [kid for kid in victim.kids if kid.host]
            self.forget(victim)
        return self.device_free() >= pages

    def note_duplicate(self, part: Part) -> None:
        if self.write == "write_back" and part.host and part not in self.duplicates:
            self.duplicates.append(part)

    # -- one request --

    def serve(self, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
        """(tokens found on the device, tokens loaded back)."""
        page = self.page
        stored = [*prompt, *output[:-1]]

        def pages(tokens: int) -> list[tuple[int, ...]]:
            return [tuple(stored[i * page : (i + 1) * page]) for i in range(tokens // page)]

        found = self.path(self.match(pages(len(prompt) - 1)))
        here = [part for part in found if part.device]
        there = [part for part in found if not part.device]
        on_device = sum(len(part.pages) for part in here)
        waiting = sum(len(part.pages) for part in there)
        self.locked = [*found]
        loaded = 0
        if waiting * page >= self.rules.load_back_threshold and self.free_device(
            waiting, evicts_need=self.rules.load_back_evicts_need
        ):
            for part in reversed(there):  # the load is acknowledged from the end of the path upwards
                part.device = True
                self.note_duplicate(part)
            loaded = waiting
        self.locked = [*here, *(there if loaded else ())]
        extra = page if page > 1 else 0
        have = (on_device + loaded) * page
        self.free_device(-(-(len(prompt) - have + extra) // page), evicts_need=self.rules.alloc_evicts_need)
        self.private = -(-len(prompt) // page) - have // page
        counted = 0
        if len(output) > 1:
            counted = self.publish(pages(len(prompt)), -(-len(prompt) // page), counted)
            for made in range(1, len(output)):
                self.free_device(1, evicts_need=self.rules.alloc_evicts_need)
                if (len(prompt) + made - 1) % page == 0:
                    self.private += 1
        self.publish(pages(len(stored)), -(-len(stored) // page), counted)
        if self.rules.splits_at_prompt_end and 0 < len(prompt) // page < len(stored) // page:
            before = self.private
            self.insert(pages(len(prompt)), counts=False, counted=0)
            assert self.private == before
        self.private, self.locked = 0, []
        return on_device * page, loaded * page

    def publish(self, pages: list[tuple[int, ...]], total_pages: int, counted: int) -> int:
        end = self.insert(pages, counts=True, counted=counted if self.rules.counts_once else 0)
        self.private = total_pages - len(pages)
        self.locked = self.path(end)
        return len(pages)
