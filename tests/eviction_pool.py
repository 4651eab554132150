"""Small pools for tests of eviction policies: one of unit extents, which any textbook policy can be compared with, and one with a tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import EvictionPolicy, Extent, Pool
from admission.returns import ReturnModel


def build(name: str, capacity_blocks: int) -> EvictionPolicy:
    return EVICTION_POLICIES[name].build(Pool(capacity_blocks, ReturnModel()))


@dataclass
class UnitPool:
    """Keys of one block each. `hits` has an entry an access, `victims` one an eviction."""

    policy: EvictionPolicy
    capacity_blocks: int
    resident: dict[int, Extent] = field(default_factory=dict)
    hits: list[bool] = field(default_factory=list)
    victims: list[int] = field(default_factory=list)

    def access(self, key: int, next_use: float | None = None) -> None:
        now = float(len(self.hits))
        extent = self.resident.get(key)
        self.hits.append(extent is not None)
        if extent is None:
            if len(self.resident) == self.capacity_blocks:
                self._evict(now)
            extent = Extent(len(self.hits), str(key), 1, now, now, end_block=1, next_use_seconds=next_use)
            self.resident[key] = extent
            self.policy.insert(extent, now)
        else:
            self.policy.hold(extent, now)
            extent.num_hits += 1
            extent.freed_seconds = now
            extent.next_use_seconds = next_use
            self.policy.release(extent, now)

    def _evict(self, now: float) -> None:
        victim = self.policy.to_evict(now)
        assert victim is not None
        key = int(victim.session_id)
        assert self.resident.pop(key) is victim
        self.victims.append(key)
        self.policy.forget(victim, now)


def replayed(name: str, keys: Sequence[int], capacity_blocks: int) -> UnitPool:
    """The pool after accesses to `keys` in order, with their next uses known."""
    pool = UnitPool(build(name, capacity_blocks), capacity_blocks)
    following: list[float] = [math.inf] * len(keys)
    last: dict[int, int] = {}
    for position in reversed(range(len(keys))):
        following[position] = last.get(keys[position], math.inf)
        last[keys[position]] = position
    for key, next_use in zip(keys, following, strict=True):
        pool.access(key, next_use)
    return pool


@dataclass
class Node:
    extent: Extent
    parent: Node | None
    num_children: int = 0
    num_users: int = 0
    is_known: bool = False
    """Whether the policy was told of it."""

    @property
    def is_held(self) -> bool:
        return self.num_children + self.num_users > 0


class TreePool:
    """Chains that share heads. It drives several policies in step and asserts that they choose the same victim."""

    def __init__(self, policies: Sequence[EvictionPolicy]) -> None:
        self.policies = policies
        self.nodes: dict[int, Node] = {}
        self._next_id = 0

    def add(self, parent: Node | None, extent: Extent, now: float) -> Node:
        """A new extent in use by one request, below `parent`."""
        self._next_id += 1
        depth = extent.num_blocks + (parent.extent.end_block if parent else 0)
        node = Node(replace(extent, id=self._next_id, end_block=depth), parent, num_users=1)
        self.nodes[self._next_id] = node
        if parent is not None:
            self._change(parent, now, children=1)
        return node

    def use(self, node: Node, now: float) -> None:
        """A request finds it resident, and all above it."""
        for part in self._path(node):
            self._change(part, now, users=1)
            part.extent.num_hits += 1

    def finish(self, node: Node, now: float) -> None:
        """A request that used it lets go, the deepest first."""
        for part in self._path(node):
            if part.num_users:
                part.extent.freed_seconds = now
                self._change(part, now, users=-1)

    def reconsider(self, node: Node, now: float) -> None:
        for policy in self.policies:
            policy.reconsider(node.extent, now)

    def evict(self, num_blocks: int, now: float) -> Extent | None:
        victims = [policy.to_evict(now) for policy in self.policies]
        assert all(victim is victims[0] for victim in victims)
        if victims[0] is None:
            return None
        node = self.nodes[victims[0].id]
        assert not node.is_held, "what is in use, or above something resident, is no victim"
        node.extent.num_blocks -= min(num_blocks, node.extent.num_blocks)
        if node.extent.num_blocks == 0:
            self.forget(node, now)
        return node.extent

    def forget(self, node: Node, now: float) -> None:
        del self.nodes[node.extent.id]
        for policy in self.policies:
            policy.forget(node.extent, now)
        if node.parent is not None:
            self._change(node.parent, now, children=-1)

    def free(self) -> list[Node]:
        return [node for node in self.nodes.values() if not node.is_held]

    def in_use(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.num_users]

    def _path(self, node: Node) -> list[Node]:
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path

    def _change(self, node: Node, now: float, *, users: int = 0, children: int = 0) -> None:
        was_held = node.is_held
        node.num_users += users
        node.num_children += children
        for policy in self.policies:
            if was_held and not node.is_held:
                (policy.release if node.is_known else policy.insert)(node.extent, now)
            elif node.is_held and not was_held:
                policy.hold(node.extent, now)
        node.is_known = node.is_known or not node.is_held
