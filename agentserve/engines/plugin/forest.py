"""The prefix tree over an engine's cached blocks: which of them are leaves that nobody uses, ranked by an eviction policy.

It never scans: finding a request's path costs a step a node, releasing it likewise, and a victim costs the policy's choice (O(K) for K
queues) and then O(1) a block. Whether a block is in use is read from the block itself (`ref_cnt`), never counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from admission.eviction.policy import EvictionPolicy, Fate
from agentserve.engines.plugin.nodes import Block, Branch, Node
from agentserve.engines.plugin.tree import Tree


class PluginFault(RuntimeError):
    """The books do not fit the engine's blocks: a fault of the plugin, or a change of the engine that it does not know."""


class Forest:
    """Nodes over blocks 0 to `num_blocks` − 1. `clock`: seconds, only rising."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self._tree = tree = Tree(num_blocks, policy, clock)
        self.node_of, self.nodes, self.waiting = tree.node_of, tree.nodes, tree.waiting
        self.num_evicted: dict[bool, int] = {True: 0, False: 0}
        """Evicted blocks by whether they were believed dead."""
        self.on_evict: Callable[[Node, list[Block]], None] | None = None
        """Told of each node's victims, deepest first, while it still hangs on its parent."""
        self._clock = clock

    def switch(self, policy: EvictionPolicy) -> None:
        """From now on `policy` ranks. Changes state."""
        self._tree.policy = policy
        now = self._clock()
        for node in self.nodes.values():
            node.is_known = node.is_ranked
            if node.is_ranked:
                policy.insert(node.extent, now)

    def trace(self, path: Sequence[Block], branch: Branch, num_cached: int) -> list[Node]:
        """The nodes of a request's cached blocks, root first, made to fit: cut where the path leaves them, new for what is not known.

        `path`: its blocks, of which the first `num_cached` have a hash. The request uses them. Changes state.
        """
        nodes: list[Node] = []
        node_of, position, parent = self.node_of, 0, None
        while position < num_cached:
            node = node_of[path[position].block_id]
            if node is None:
                node = self._tree.grow(parent, path, position, num_cached, branch)
            else:
                blocks, last = node.blocks, position + len(node.blocks) - 1
                if last >= num_cached or blocks[-1] is not path[last] or blocks[0] is not path[position]:
                    node = self._tree.fit(node, path, position, num_cached)
            position = node.start + len(node.blocks)
            if node is not parent:
                if node.parent is not parent:
                    self._tree.hang(node, parent)
                nodes.append(node)
                parent = node
        return nodes

    def hold(self, nodes: Iterable[Node], branch: Branch, *, hit: bool = True) -> None:
        """A request of `branch` uses them: they are alive, and no victims. Changes state."""
        live = Fate.LIVE
        for node in nodes:
            if node.owners.get(branch) is not live:
                self._tree.own(node, branch)
            extent = node.extent
            extent.num_hits += hit
            extent.fate = live  # to this branch, so to all
            if node.is_ranked:
                self._tree.rank(node, self._clock())

    def join(self, nodes: list[Node]) -> list[Node]:
        """Nodes of one path that nothing tells apart any more become one. The nodes that are left. Changes state."""
        if len(nodes) < 2:
            return nodes
        left: list[Node] = []
        for node in nodes:
            if left and self._tree.are_one(left[-1], node):
                self._tree.merge(left[-1], node)
            else:
                left.append(node)
        return left

    def release(self, blocks: Sequence[Block]) -> list[Block]:
        """Blocks of one request that nobody uses any more, deepest first; those that no node has come back, unless they hang on one
        that has: what a request had generated when it was preempted. Changes state."""
        now = self._clock()
        freed = self._tree.last_freed = max(now, math.nextafter(self._tree.last_freed, math.inf))
        unknown: list[Block] = []
        node_of, position = self.node_of, 0
        while position < len(blocks):
            block = blocks[position]
            node = node_of[block.block_id]
            if node is None:
                unknown.append(block)
                position += 1
                continue
            if unknown:
                self._tree.take_in(node, unknown)
                unknown = []
            own, behind = node.blocks, position + len(node.blocks)
            whole = block is own[-1] and behind <= len(blocks) and blocks[behind - 1] is own[0]
            position = behind if whole else position + 1
            node.extent.freed_seconds = freed
            self._tree.rank(node, now)
        return unknown

    def take(self, num_blocks: int) -> list[Block]:
        """Up to `num_blocks` victims of the policy's choice, fewer if there are no more. They are forgotten here. Changes state."""
        taken: list[Block] = []
        now = self._clock()
        while len(taken) < num_blocks:
            extent = self._tree.policy.to_evict(now)
            if extent is None:
                if self._tree.uproot():
                    continue
                break
            node = self.nodes[extent.id]
            blocks, before = node.blocks, len(taken)
            for block in blocks[: -num_blocks + before - 1 : -1]:  # as many as are wanted, deepest first
                if block.ref_cnt:
                    break
                self.node_of[block.block_id] = None
                taken.append(block)
            num_taken = len(taken) - before
            del blocks[len(blocks) - num_taken :]
            self.num_evicted[extent.fate is not Fate.LIVE] += num_taken
            extent.num_blocks = len(blocks)
            extent.end_block = node.start + len(blocks)
            if self.on_evict is not None and num_taken:
                self.on_evict(node, taken[before:])
            if not blocks:
                self._tree.drop(node, now)
            else:
                self._tree.rank(node, now)
                if node.is_ranked and not num_taken:
                    raise PluginFault(f"extent {extent.id!r} was offered, and none of its blocks is free")
        return taken

    def clear(self) -> list[Block]:
        """Forget every node, and hand back their blocks, which nobody uses. Changes state."""
        now = self._clock()
        blocks: list[Block] = []
        for node in list(self.nodes.values()):
            assert node.blocks[-1].ref_cnt == 0
            if node.is_known:
                self._tree.policy.forget(node.extent, now)
            for branch in node.owners:
                branch.nodes.pop(node, None)
            blocks += node.blocks
        for block in blocks:
            self.node_of[block.block_id] = None
        self.nodes.clear()
        for nodes in self.waiting.values():
            nodes.clear()
        return blocks

    def set_fate(self, node: Node, branch: Branch, fate: Fate) -> None:
        """What it is to `branch` from now on; a dead owner of a node that lives on for others is forgotten. Changes state."""
        if branch not in node.owners:
            return
        del node.owners[branch]
        if fate is Fate.LIVE or Fate.LIVE not in node.owners.values():
            node.owners[branch] = fate
        else:
            branch.nodes.pop(node, None)
        self._tree.refate(node, self._clock())

    def cut(self, node: Node, depth: int) -> Node | None:
        """What of it lies at block `depth` of its chain and behind, as a node of its own; None: nothing does. Changes state."""
        if depth >= node.end:
            return None
        return node if depth <= node.start else self._tree.split(node, depth - node.start)

    def reconsider(self, node: Node) -> None:
        """Facts of its extent have changed. Changes the policy's state."""
        if node.is_ranked:
            self._tree.policy.reconsider(node.extent, self._clock())

    def protect(self, who: str, nodes: Iterable[Node]) -> None:
        """`who` waits and will want them. Changes state."""
        kept = self.waiting.setdefault(who, [])
        for node in nodes:
            node.waiting.add(who)
            kept.append(node)
            if not node.extent.protected:
                node.extent.protected = True
                self.reconsider(node)

    def unprotect(self, who: str) -> None:
        """`who` waits no more. Changes state."""
        for node in self.waiting.pop(who, ()):
            node.waiting.discard(who)
            if node.extent.protected and not node.waiting:
                node.extent.protected = False
                if node.blocks:
                    self.reconsider(node)

    def check_integrity(self) -> None:
        """Assert what must hold between calls. O(blocks)."""
        self._tree.policy.check_integrity()
        for node in self.nodes.values():
            assert node.blocks
            assert all(self.node_of[block.block_id] is node for block in node.blocks)
            assert all(child.parent is node for child in node.children)
            assert node.is_ranked == (not node.children and node.blocks[-1].ref_cnt == 0)
            assert node.extent.num_blocks == len(node.blocks)
            assert node.extent.end_block == node.end
            assert node.extent.protected == bool(node.waiting)
            assert all(node in branch.nodes for branch in node.owners)
        assert sum(node is not None for node in self.node_of) == sum(len(node.blocks) for node in self.nodes.values())
