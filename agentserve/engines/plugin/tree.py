"""The nodes themselves: how they are made, cut, joined and hung on each other, and when the policy may choose one.

Whoever calls it holds to the paths; what is free is read from the blocks. Nothing here scans, but for `uproot`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from admission.eviction.policy import EvictionPolicy, Extent, Fate
from agentserve.engines.plugin.nodes import Block, Branch, Node, like, rank

MAX_OWNERS: Final = 64
"""Branches remembered a node: of a head that thousands of sessions share the latest count."""


class Tree:
    """Nodes over blocks 0 to `num_blocks` − 1, whose extents `policy` ranks. `clock`: seconds, only rising."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.node_of: list[Node | None] = [None] * num_blocks
        """By block id; None: not cached, or not known to be."""
        self.nodes: dict[int, Node] = {}
        """By extent id."""
        self.waiting: dict[str, list[Node]] = {}
        """Who waits → the nodes that are protected for it."""
        self.last_freed = -math.inf
        self._clock = clock
        self._next_id = 0

    def own(self, node: Node, branch: Branch) -> None:
        """`branch` uses it, and it lives; who used it first is forgotten where there are too many. Changes state."""
        node.owners[branch] = Fate.LIVE
        branch.nodes[node] = None
        if len(node.owners) > MAX_OWNERS:
            oldest = next(iter(node.owners))
            del node.owners[oldest]
            oldest.nodes.pop(node, None)

    def grow(self, parent: Node | None, path: Sequence[Block], position: int, limit: int, branch: Branch) -> Node:
        """A node for blocks from `position` on and before `limit` that none has; or the parent grows, where nothing tells the two apart."""
        node_of, is_mine, end = self.node_of, path[position].ref_cnt == 1, position
        for block in path[position:limit]:
            if node_of[block.block_id] is not None or (block.ref_cnt == 1) is not is_mine:
                break
            end += 1
        run = list(path[position:end])
        if parent is not None and is_mine and _is_alone(parent, branch) and parent.end == position:
            self.extend(parent, run)
            return parent
        now = self._clock()
        node = self.add(run, position, parent, Extent(0, branch.session.id, len(run), now, now))
        self.own(node, branch)
        if parent is not None:
            self.rank(parent, now)
        return node

    def extend(self, node: Node, run: list[Block]) -> None:
        """It has `run` too, below its own blocks. Changes state."""
        node.blocks += run
        for block in run:
            self.node_of[block.block_id] = node
        node.extent.num_blocks = len(node.blocks)
        node.extent.end_block = node.end

    def take_in(self, node: Node, unknown: list[Block]) -> None:
        """Blocks below `node`, deepest first, that nobody uses."""
        if not node.children and node.blocks[-1].ref_cnt == 0:
            self.extend(node, unknown[::-1])
            return
        lower = self.add(unknown[::-1], node.end, node, like(node.extent))
        for branch in node.owners:
            self.own(lower, branch)
        lower.extent.fate, lower.extent.protected = lower.fate(), False
        lower.extent.freed_seconds = self.last_freed
        self.rank(lower, self._clock())

    def hang(self, node: Node, parent: Node | None) -> None:
        """`node` follows `parent` on a path. Of blocks that the engine has twice the path decides which copy the rest hangs on, so that
        the other is free to go."""
        old = node.parent
        now = self._clock()
        node.parent = parent
        if parent is not None:
            parent.children[node] = None
            self.rank(parent, now)
        if old is not None:
            del old.children[node]
            self.rank(old, now)

    def uproot(self) -> bool:
        """Let go of what is free but no leaf, which only copies of blocks in use can bring about; whether there was any. O(blocks)."""
        found = False
        for node in list(self.nodes.values()):
            num_free = next((at for at, block in enumerate(node.blocks) if block.ref_cnt), len(node.blocks))
            if num_free == 0 or node.is_ranked:
                continue
            if num_free < len(node.blocks):
                self.split(node, num_free)
            for child in node.children:
                child.parent = None
            node.children = {}
            self.rank(node, self._clock())
            found = True
        return found

    def add(self, blocks: list[Block], start: int, parent: Node | None, extent: Extent) -> Node:
        """A new node, under `parent`, whose facts `extent` holds. Changes state."""
        self._next_id += 1
        extent.id = self._next_id
        extent.num_blocks = len(blocks)
        extent.end_block = start + len(blocks)
        node = self.nodes[extent.id] = Node(extent, blocks, start, parent)
        for block in blocks:
            self.node_of[block.block_id] = node
        if parent is not None:
            parent.children[node] = None
        return node

    def fit(self, node: Node, path: Sequence[Block], position: int, limit: int) -> Node:
        """The part of `node` that lies on `path` from `position` on and before `limit`, as a node of its own."""
        blocks, last = node.blocks, position + len(node.blocks) - 1
        if blocks[0] is path[position] and last < len(path) and blocks[-1] is path[last]:
            return node
        if node.blocks[0] is not path[position]:
            node = self.split(node, position - node.start)
        blocks = node.blocks
        shared = min(len(blocks), limit - position)
        if blocks[shared - 1] is not path[position + shared - 1]:
            low = 1  # somewhere behind it the two part, and do not meet again
            while low < shared:
                middle = (low + shared) // 2
                if blocks[middle] is path[position + middle]:
                    low = middle + 1
                else:
                    shared = middle
        if shared < len(blocks):
            self.split(node, shared)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut in two; the lower part is new and comes back."""
        facts, now = node.extent, self._clock()
        children, node.children = node.children, {}
        lower = self.add(node.blocks[at:], node.start + at, node, like(facts))
        del node.blocks[at:]
        facts.num_blocks, facts.end_block = len(node.blocks), node.end
        for child in children:
            child.parent = lower
        lower.children = children
        for branch, fate in node.owners.items():
            lower.owners[branch] = fate
            branch.nodes[lower] = None
        for who in node.waiting:
            lower.waiting.add(who)
            self.waiting[who].append(lower)
        self.rank(node, now)
        self.rank(lower, now)
        return lower

    def are_one(self, upper: Node, lower: Node) -> bool:
        """Whether nothing tells the two apart, which a request uses."""
        return (
            len(upper.children) == 1
            and lower in upper.children
            and upper.owners == lower.owners
            and not upper.waiting
            and not lower.waiting
            and upper.blocks[-1].ref_cnt == lower.blocks[0].ref_cnt > 0
        )

    def merge(self, upper: Node, lower: Node) -> None:
        """`upper` takes over what `lower` has. Changes state."""
        if lower.is_known:
            self.policy.forget(lower.extent, self._clock())
        for branch in lower.owners:
            branch.nodes.pop(lower, None)
        del self.nodes[lower.extent.id]
        upper.children = lower.children
        for child in upper.children:
            child.parent = upper
        self.extend(upper, lower.blocks)

    def refate(self, node: Node, now: float) -> None:
        """Its owners have changed. Changes state."""
        fate = node.fate()
        if node.extent.fate is not fate:
            node.extent.fate = fate
            if node.is_ranked:
                self.policy.reconsider(node.extent, now)

    def rank(self, node: Node, now: float) -> None:
        """Tell the policy whether it may be chosen, where that has changed."""
        is_free = not node.children and node.blocks[-1].ref_cnt == 0
        if is_free is not node.is_ranked:
            rank(node, self.policy, now, is_free=is_free)

    def drop(self, node: Node, now: float) -> None:
        """Its last block has left."""
        self.policy.forget(node.extent, now)
        del self.nodes[node.extent.id]
        for branch in node.owners:
            branch.nodes.pop(node, None)
        for who in node.waiting:
            self.waiting[who].remove(node)
        parent = node.parent
        if parent is not None:
            del parent.children[node]
            self.rank(parent, now)


def _is_alone(node: Node, branch: Branch) -> bool:
    """Whether only one request of `branch` uses it, and nothing hangs on it."""
    return not node.children and node.blocks[-1].ref_cnt == 1 and len(node.owners) == 1 and branch in node.owners
