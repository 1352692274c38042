"""The prefix tree of SGLang's HiCache, node by node, with both tiers' book-keeping.

A node is a run of blocks that came in together; it is split where a later request leaves it and never merged again.
Eviction takes whole nodes, leaves first. The rules that differ between releases come as ``ReplayRules``; times are a
counter, so nothing here depends on a clock.
"""

from __future__ import annotations

from heapq import heappop, heappush

from hicache_lab.traffic.cachesim.nodes import EvictionPolicy, Key, MovedTokens, TreeNode
from hicache_lab.traffic.cachesim.rules import ReplayRules
from hicache_lab.traffic.cachesim.tiers import WritePolicy


class PrefixTree:
    """Both tiers of one rank.

    Args:
        ids: block ids of the whole trace (nodes point into it).
        device_tokens: the device pool.
        host_tokens: the host pool; 0: no HiCache.
        write_policy: ``--hicache-write-policy``.
        eviction: ``--radix-eviction-policy``.
        rules: the release's rules.
        block_tokens: tokens a block (only a request's last block may hold fewer).
    """

    def __init__(
        self,
        ids: memoryview,
        *,
        device_tokens: int,
        host_tokens: int,
        write_policy: WritePolicy,
        eviction: EvictionPolicy,
        rules: ReplayRules,
        block_tokens: int,
    ) -> None:
        self.ids = ids
        self.block_tokens = block_tokens
        self.device_free, self.host_free = device_tokens, host_tokens
        self.rules = rules
        self.write_back = write_policy is WritePolicy.WRITE_BACK and host_tokens > 0
        self.threshold = 1 if write_policy is WritePolicy.WRITE_THROUGH else 2
        self.hicache = host_tokens > 0
        self.key = eviction.key()
        self.track_history = eviction.name == "tlru"
        self.moved = MovedTokens()
        self.evictable = 0  # unlocked tokens on the device
        self.clock = 0
        self.entries = 0
        self.device_heap: list[tuple[Key, int, TreeNode]] = []
        self.host_heap: list[tuple[Key, int, TreeNode]] = []
        self.duplicates: dict[int, TreeNode] = {}
        self.root = TreeNode.root()
        self.root.device = True
        self.root.lock = 1

    # ---- looking up ----

    def match(self, at: int, blocks: int) -> TreeNode:
        """Walk down the path ``ids[at:at + blocks]``, split where it leaves a node, make it most recent; its end."""
        node = self.root
        while node.stop < blocks and (child := self._step(node, at, blocks)) is not None:
            node = child
        path = [node]
        while path[-1] is not self.root:
            path.append(path[-1].parent)
        for passed in reversed(path[:-1]):
            self._touch(passed)
        return node

    def _step(self, node: TreeNode, at: int, blocks: int) -> TreeNode | None:
        """The next node of a path below ``node``, cut where the path leaves it and made most recent; None: no more."""
        child = node.children.get(self.ids[at + node.stop])
        if child is None:
            return None
        common = self._common(child, at, blocks)
        self._touch(child)
        if common == child.stop:
            return child
        upper = self._split(child, common)
        self._touch(upper)
        self._touch(child)
        return upper

    def _common(self, node: TreeNode, at: int, blocks: int) -> int:
        """The depth down to which ``node`` agrees with the path: chained ids agree up to a point and never again."""
        ids, shift = self.ids, at - (node.at - node.start)
        low, high = node.start + 1, min(node.stop, blocks)
        base = node.at - node.start
        if ids[base + high - 1] == ids[base + shift + high - 1]:
            return high
        while low < high:
            middle = (low + high) // 2
            if ids[base + middle] == ids[base + shift + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, node: TreeNode, depth: int) -> TreeNode:
        """Cut ``node`` at ``depth``; the upper part is new and takes its place, the lower part stays ``node``."""
        parent = node.parent
        tokens = (depth - node.start) * self.block_tokens
        upper = TreeNode(parent, node.at, node.start, depth, tokens, node.first)
        upper.device, upper.host, upper.lock = node.device, node.host, node.lock
        upper.hits, upper.priority = node.hits, node.priority
        upper.history, upper.path_tokens = node.history, parent.path_tokens + tokens
        upper.device_children = int(node.device)
        parent.children[node.first] = upper
        node.parent, node.at, node.start = upper, node.at + depth - node.start, depth
        node.tokens -= tokens
        node.first = self.ids[node.at]
        upper.children[node.first] = node
        if id(node) in self.duplicates:
            self.duplicates[id(upper)] = upper
        return upper

    def device_end(self, node: TreeNode) -> TreeNode:
        """The last node of a path that is on the device."""
        while not node.device:
            node = node.parent
        return node

    # ---- locks ----

    def lock(self, node: TreeNode) -> None:
        """Keep a path from eviction."""
        while node is not self.root:
            if not node.lock and node.device:
                self.evictable -= node.tokens
            node.lock += 1
            node = node.parent

    def unlock(self, node: TreeNode) -> None:
        """Undo one ``lock``."""
        while node is not self.root:
            node.lock -= 1
            if not node.lock:
                if node.device:
                    self.evictable += node.tokens
                self._offer(node)
            node = node.parent

    # ---- inserting ----

    def insert(
        self, at: int, blocks: int, tokens: int, *, counts: bool, counted: int = 0, priority: int = 0
    ) -> tuple[TreeNode, int]:
        """Put a computed path into the tree.

        Args:
            at: where the path's ids begin.
            blocks: how many of them.
            tokens: their tokens (the last block may be partial).
            counts: the insert counts as a hit of the nodes it passes.
            counted: depth (in tokens) up to which this request has counted already.
            priority: the request's.

        Returns:
            The path's last node, and how many of its tokens took slots of the request (new or restored nodes).
        """
        node = self.root
        taken = 0
        while node.stop < blocks and (child := self._step(node, at, blocks)) is not None:
            child.priority = max(child.priority, priority)
            restored = not child.device
            if restored:
                self._restore(child)
                taken += child.tokens
            if (not restored or self.rules.counts_restored) and counts and child.path_tokens > counted:
                self._count(child)
            self._offer(child)
            node = child
        if node.stop < blocks:
            length = tokens - node.path_tokens
            node = self._add(node, at + node.stop, blocks, length, self.ids[at + node.stop], priority)
            taken += length
            if counts:
                self._count(node)
            self._offer(node)
        return node, taken

    def append_unknown(self, node: TreeNode, tokens: int, *, counts: bool, priority: int = 0) -> TreeNode:
        """Hang generated tokens whose content the trace does not tell below a prompt: cached, never asked for."""
        self.entries += 1
        leaf = self._add(node, -1, node.stop, tokens, -1 - self.entries, priority)
        if counts:
            self._count(leaf)
        self._offer(leaf)
        return leaf

    def _add(self, parent: TreeNode, at: int, stop: int, tokens: int, first: int, priority: int) -> TreeNode:
        node = TreeNode(parent, at, parent.stop, stop, tokens, first)
        node.device, node.priority, node.time = True, priority, self._now()
        node.path_tokens = node.history = parent.path_tokens + tokens
        parent.children[first] = node
        parent.device_children += 1
        self.evictable += tokens
        if self.track_history:
            above = parent
            while above is not self.root and above.history < node.history:
                above.history = node.history
                above = above.parent
        return node

    def _restore(self, node: TreeNode) -> None:
        """A node computed again gets device slots again; its host copy stays."""
        node.device = True
        node.parent.device_children += 1
        if not node.lock:
            self.evictable += node.tokens
        self._note_duplicate(node)

    def _count(self, node: TreeNode) -> None:
        """Count a hit and copy the node to the host when it has enough of them."""
        if self.write_back:
            return  # under write_back nothing counts hits: lfu and slru become lru
        node.hits += 1
        if not self.hicache or node.host or node.hits < self.threshold:
            return
        chain = [node]
        if self.rules.backs_up_ancestors:
            above = node.parent
            while above is not self.root and not above.host:
                chain.insert(0, above)
                above = above.parent
        for member in chain:
            if not self.back_up(member):
                return

    # ---- copying and evicting ----

    def back_up(self, node: TreeNode, *, write_back: bool = False) -> bool:
        """Copy a node to the host, making room first; False: no room, no copy."""
        parent = node.parent
        contiguous = not self.rules.gaps_allowed and not write_back
        if contiguous and parent is not self.root and not parent.host:
            return False
        if self.host_free < node.tokens:
            short = node.tokens - self.host_free
            self._evict_host(node.tokens if self.rules.backup_evicts_need else short)
            if self.host_free < node.tokens:
                return False
        self.host_free -= node.tokens
        node.host = True
        self.moved.backed_up += node.tokens
        return True

    def make_room(self, tokens: int, *, for_load_back: bool = False) -> bool:
        """Evict from the device until ``tokens`` are free, by the release's own measure of how much to evict."""
        if self.device_free >= tokens:
            return True
        over = self.rules.load_back_evicts_need if for_load_back else self.rules.alloc_evicts_need
        freed, needed = 0, tokens
        while (freed < needed) if over else (self.device_free < tokens):
            node = self._pop(self.device_heap, device=True)
            if node is None:
                break
            freed += self._evict(node)
        return self.device_free >= tokens

    def _evict(self, node: TreeNode) -> int:
        if not node.host and self.write_back and not self.back_up(node, write_back=True):
            if self.rules.failed_write_back_asserts:
                self.moved.assertions += 1
            self._drop_below(node)
        self.device_free += node.tokens
        self.evictable -= node.tokens
        parent = node.parent
        parent.device_children -= 1
        node.device = False
        if node.host:
            self._offer(node)
        else:
            self.moved.dropped += node.tokens
            del parent.children[node.first]
            node.detached = True
        self.duplicates.pop(id(node), None)
        self._offer(parent)
        return node.tokens

    def _drop_below(self, node: TreeNode) -> None:
        """Give up the host copies that hang below a node which leaves the device without one."""
        below = list(node.children.values())
        while below:
            child = below.pop()
            below += child.children.values()
            self.host_free += child.tokens
            child.host, child.detached = False, True
            self.moved.dropped += child.tokens
        node.children.clear()

    def _evict_host(self, tokens: int) -> None:
        """Evict host-only leaves (after duplicates, where the release does so) until ``tokens`` are freed."""
        freed = 0
        if self.write_back and self.rules.reclaims_duplicates:
            freed = self._reclaim(tokens)
        while freed < tokens:
            node = self._pop(self.host_heap, device=False)
            if node is None:
                return
            node.host, node.detached = False, True
            self.host_free += node.tokens
            self.moved.host_evicted += node.tokens
            freed += node.tokens
            node.parent.children.pop(node.first, None)
            if not node.parent.detached:
                self._offer(node.parent)

    def _note_duplicate(self, node: TreeNode) -> None:
        if self.write_back and node.device and node.host:
            self.duplicates.setdefault(id(node), node)

    def _reclaim(self, tokens: int) -> int:
        """Free host copies of what the device holds, in the order they became duplicates; device leaves go last."""
        freed = 0
        for spare_leaves in (True, False):
            for marker, node in list(self.duplicates.items()):
                if freed >= tokens:
                    return freed
                if not (node.device and node.host):
                    del self.duplicates[marker]
                elif not (spare_leaves and node.is_device_leaf):
                    node.host = False
                    self.host_free += node.tokens
                    freed += node.tokens
                    self.moved.reclaimed += node.tokens
                    del self.duplicates[marker]
        return freed

    # ---- loading back ----

    def load_back(self, node: TreeNode) -> int:
        """Bring the host part of a path to the device, all or nothing; the tokens loaded."""
        missing = []
        above = node
        while not above.device:
            missing.append(above)
            above = above.parent
        tokens = sum(part.tokens for part in missing)
        if tokens < max(self.rules.load_back_threshold, 1):
            return 0
        self.lock(node)  # neither the path above nor the copies themselves may go while room is made
        enough = self.make_room(tokens, for_load_back=True)
        if enough:
            self.device_free -= tokens
            self.moved.loaded_back += tokens
            for part in missing:
                part.device = True
                part.parent.device_children += 1
                self._note_duplicate(part)
        self.unlock(node)
        return tokens if enough else 0

    # ---- order ----

    def _now(self) -> int:
        self.clock += 1
        return self.clock

    def _touch(self, node: TreeNode) -> None:
        node.time = self._now()
        self._offer(node)

    def _offer(self, node: TreeNode) -> None:
        """Enter a node among the candidates if it is one; its older entries become void."""
        if node.lock:  # is_device_leaf and is_host_leaf, spelled out: this is the hot spot
            return
        if node.device:
            if node.device_children:
                return
            heap = self.device_heap
        elif node.host and not node.children:
            heap = self.host_heap
        else:
            return
        self.entries += 1
        node.entry = self.entries
        heappush(heap, (self.key(node), self.entries, node))

    def _pop(self, heap: list[tuple[Key, int, TreeNode]], *, device: bool) -> TreeNode | None:
        while heap:
            _, entry, node = heappop(heap)
            if entry == node.entry and (node.is_device_leaf if device else node.is_host_leaf):
                return node
        return None
