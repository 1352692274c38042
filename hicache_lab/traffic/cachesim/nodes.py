"""The parts of the prefix tree: a node, the order in which nodes are evicted, and what was moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_lab.base.errors import UsageError

Key = tuple[int, ...]
_POLICIES = ("lru", "lfu", "slru", "priority", "tlru")


@dataclass(slots=True, eq=False)
class TreeNode:
    """A run of blocks of one path, ``start`` blocks below the root."""

    parent: TreeNode
    at: int  # where the node's blocks stand in the trace's ids; -1: content unknown, never matched
    start: int  # depth of its first block
    stop: int  # and of the one after its last
    tokens: int
    first: int  # the id (or a unique negative number) under which the parent knows it
    children: dict[int, TreeNode] = field(default_factory=dict)
    device: bool = False
    host: bool = False
    detached: bool = False
    device_children: int = 0
    lock: int = 0
    hits: int = 0
    priority: int = 0
    time: int = 0
    path_tokens: int = 0  # depth in tokens
    history: int = 0  # tlru: the deepest its branch has ever been, in tokens
    entry: int = 0  # the newest heap entry of this node

    @classmethod
    def root(cls) -> TreeNode:
        """The root has no parent: every walk upwards ends at it."""
        return cls(None, -1, 0, 0, 0, -1)  # type: ignore[arg-type]

    @property
    def is_device_leaf(self) -> bool:
        """Evictable from the device now."""
        return self.device and not self.lock and not self.device_children

    @property
    def is_host_leaf(self) -> bool:
        """Evictable from the host now: host-only, nothing hangs below it."""
        return self.host and not self.device and not self.lock and not self.children


@dataclass(frozen=True)
class EvictionPolicy:
    """``--radix-eviction-policy`` as a sort key: the smallest is evicted first.

    ``--radix-eviction-policy-config`` sets ``slru_threshold`` (hits from which a node is protected) and the two
    numbers of ``tlru``, in tokens; with both at 0 it is ``lru``.
    """

    name: str = "lru"
    slru_threshold: int = 2
    tlru_threshold: int = 0
    tlru_next_prompt: int = 0

    @classmethod
    def named(cls, name: str, config: object = None) -> EvictionPolicy:
        """Read ``--radix-eviction-policy`` and its config (a JSON object).

        Raises:
            UsageError: an unknown policy or a config that is not such an object.
        """
        if name not in _POLICIES:
            raise UsageError(f"--radix-eviction-policy: expected one of {', '.join(_POLICIES)}, got {name!r}")
        if config is None:
            return cls(name)
        try:
            values = json.loads(str(config))
            return cls(
                name,
                slru_threshold=int(values.get("protected_threshold", 2)),
                tlru_threshold=int(values.get("threshold", 0)),
                tlru_next_prompt=int(values.get("next_prompt_estimate", 0)),
            )
        except (ValueError, AttributeError, TypeError):
            raise UsageError(
                f'--radix-eviction-policy-config: expected JSON such as {{"threshold": 2048}}, got {config!r}'
            ) from None

    def key(self) -> Callable[[TreeNode], Key]:
        """The function from a node to its key (``mem_cache/evict_policy.py``, 0.5.3 … 0.5.23)."""
        return {
            "lru": lambda node: (node.time,),
            "lfu": lambda node: (node.hits, node.time),
            "slru": lambda node: (int(node.hits >= self.slru_threshold), node.time),
            "priority": lambda node: (node.priority, node.time),
            "tlru": self._tlru,
        }[self.name]

    def _tlru(self, node: TreeNode) -> Key:
        budget = max(node.history + self.tlru_next_prompt - self.tlru_threshold, 0)
        return (-1 if node.path_tokens - node.tokens >= budget else 0, node.time)


@dataclass
class MovedTokens:
    """What moved and what was lost, in tokens (and one count)."""

    backed_up: int = 0
    loaded_back: int = 0
    dropped: int = 0
    host_evicted: int = 0
    reclaimed: int = 0
    assertions: int = 0
