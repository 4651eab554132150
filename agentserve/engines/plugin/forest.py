"""The prefix tree over an engine's cached blocks: which of them are leaves that nobody uses, ranked by an eviction policy.

It never scans: finding a request's path costs a step a node, releasing it likewise, and a victim costs the policy's choice (O(K) for K
queues) and then O(1) a block. Whether a block is in use is read from the block itself (`ref_cnt`), never counted twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from admission.eviction.policy import EvictionPolicy, Extent, Fate
from agentserve.engines.plugin.nodes import Block, Branch, Node, like

MAX_OWNERS: Final = 64
"""Branches remembered a node: of a head that thousands of sessions share the latest count."""


class PluginFault(RuntimeError):
    """The books do not fit the engine's blocks: a fault of the plugin, or a change of the engine that it does not know."""


class Forest:
    """Nodes over blocks 0 to `num_blocks` − 1. `clock`: seconds, only rising."""

    def __init__(self, num_blocks: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.node_of: list[Node | None] = [None] * num_blocks
        """By block id; None: not cached, or not known to be."""
        self.nodes: dict[int, Node] = {}
        """By extent id."""
        self.waiting: dict[str, list[Node]] = {}
        """Who waits → the nodes that are protected for it."""
        self.num_evicted: dict[bool, int] = {True: 0, False: 0}
        """Evicted blocks by whether they were believed dead."""
        self.on_evict: Callable[[Node, list[Block]], None] | None = None
        """Told of each node's victims, deepest first, while it still hangs on its parent."""
        self._policy = policy
        self._clock = clock
        self._next_id = 0
        self._last_freed = -math.inf

    def switch(self, policy: EvictionPolicy) -> None:
        """From now on `policy` ranks. Changes state."""
        self._policy = policy
        now = self._clock()
        for node in self.nodes.values():
            node.is_known = node.is_ranked
            if node.is_ranked:
                policy.insert(node.extent, now)

    def trace(self, path: Sequence[Block], branch: Branch) -> list[Node]:
        """The nodes of a request's cached blocks, root first, made to fit: cut where the path leaves them, new for what is not known.

        `path`: all its blocks that have a hash. The request uses them. Changes state.
        """
        nodes: list[Node] = []
        position = 0
        while position < len(path):
            known = self.node_of[path[position].block_id]
            parent = nodes[-1] if nodes else None
            node = self._fit(known, path, position) if known is not None else self._grow(parent, path, position, branch)
            position = node.end
            if node is not parent:
                self._hang(node, parent)
                nodes.append(node)
        return nodes

    def hold(self, nodes: Iterable[Node], branch: Branch, *, hit: bool = True) -> None:
        """A request of `branch` uses them: they are alive, and no victims. Changes state."""
        now = self._clock()
        for node in nodes:
            if node.owners.get(branch) is not Fate.LIVE:
                self._own(node, branch)
            node.extent.num_hits += hit
            node.extent.fate = Fate.LIVE  # to this branch, so to all
            self._rank(node, now)

    def join(self, nodes: list[Node]) -> list[Node]:
        """Nodes of one path that nothing tells apart any more become one. The nodes that are left. Changes state."""
        left: list[Node] = []
        for node in nodes:
            if left and self._are_one(left[-1], node):
                self._merge(left[-1], node)
            else:
                left.append(node)
        return left

    def release(self, blocks: Sequence[Block]) -> list[Block]:
        """Blocks of one request that nobody uses any more, deepest first; those that no node has come back, unless they hang on one
        that has: what a request had generated when it was preempted. Changes state."""
        now = self._clock()
        freed = self._last_freed = max(now, math.nextafter(self._last_freed, math.inf))
        unknown: list[Block] = []
        position = 0
        while position < len(blocks):
            node = self.node_of[blocks[position].block_id]
            if node is None:
                unknown.append(blocks[position])
                position += 1
                continue
            if unknown:
                self._take_in(node, unknown)
                unknown = []
            last = position + len(node.blocks) - 1
            whole = blocks[position] is node.blocks[-1] and last < len(blocks) and blocks[last] is node.blocks[0]
            position = last + 1 if whole else position + 1
            node.extent.freed_seconds = freed
            self._rank(node, now)
        return unknown

    def take(self, num_blocks: int) -> list[Block]:
        """Up to `num_blocks` victims of the policy's choice, fewer if there are no more. They are forgotten here. Changes state."""
        taken: list[Block] = []
        now = self._clock()
        while len(taken) < num_blocks:
            extent = self._policy.to_evict(now)
            if extent is None:
                if self._uproot():
                    continue
                break
            node = self.nodes[extent.id]
            blocks = node.blocks
            before = len(taken)
            while blocks and len(taken) < num_blocks and blocks[-1].ref_cnt == 0:
                block = blocks.pop()
                self.node_of[block.block_id] = None
                taken.append(block)
            self.num_evicted[extent.fate is not Fate.LIVE] += len(taken) - before
            extent.num_blocks = len(blocks)
            extent.end_block = node.end
            if self.on_evict is not None and len(taken) > before:
                self.on_evict(node, taken[before:])
            if not blocks:
                self._drop(node, now)
            else:
                self._rank(node, now)
                if node.is_ranked and len(taken) == before:
                    raise PluginFault(f"extent {extent.id!r} was offered, and none of its blocks is free")
        return taken

    def clear(self) -> list[Block]:
        """Forget every node, and hand back their blocks, which nobody uses. Changes state."""
        now = self._clock()
        blocks: list[Block] = []
        for node in list(self.nodes.values()):
            assert node.blocks[-1].ref_cnt == 0
            if node.is_known:
                self._policy.forget(node.extent, now)
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
        self._refate(node, self._clock())

    def cut(self, node: Node, depth: int) -> Node | None:
        """What of it lies at block `depth` of its chain and behind, as a node of its own; None: nothing does. Changes state."""
        if depth >= node.end:
            return None
        return node if depth <= node.start else self._split(node, depth - node.start)

    def reconsider(self, node: Node) -> None:
        """Facts of its extent have changed. Changes the policy's state."""
        if node.is_ranked:
            self._policy.reconsider(node.extent, self._clock())

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
        self._policy.check_integrity()
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

    def _own(self, node: Node, branch: Branch) -> None:
        node.owners[branch] = Fate.LIVE
        branch.nodes[node] = None
        if len(node.owners) > MAX_OWNERS:
            oldest = next(iter(node.owners))
            del node.owners[oldest]
            oldest.nodes.pop(node, None)

    def _grow(self, parent: Node | None, path: Sequence[Block], position: int, branch: Branch) -> Node:
        """A node for blocks from `position` on that none has; or the parent grows, where nothing would tell the two apart."""
        is_mine = path[position].ref_cnt == 1
        end = position + 1
        while end < len(path) and self.node_of[path[end].block_id] is None and (path[end].ref_cnt == 1) == is_mine:
            end += 1
        run = list(path[position:end])
        grows = parent is not None and not parent.children and is_mine and parent.blocks[-1].ref_cnt == 1
        if grows and parent is not None and parent.end == position and list(parent.owners) == [branch]:
            self._extend(parent, run)
            return parent
        now = self._clock()
        node = self._node(run, position, parent, Extent(0, branch.session.id, len(run), now, now))
        self._own(node, branch)
        if parent is not None:
            self._rank(parent, now)
        return node

    def _extend(self, node: Node, run: list[Block]) -> None:
        node.blocks += run
        for block in run:
            self.node_of[block.block_id] = node
        node.extent.num_blocks = len(node.blocks)
        node.extent.end_block = node.end

    def _take_in(self, node: Node, unknown: list[Block]) -> None:
        """Blocks below `node`, deepest first, that nobody uses."""
        if not node.children and node.blocks[-1].ref_cnt == 0:
            self._extend(node, unknown[::-1])
            return
        lower = self._node(unknown[::-1], node.end, node, like(node.extent))
        for branch in node.owners:
            self._own(lower, branch)
        lower.extent.fate, lower.extent.protected = lower.fate(), False
        lower.extent.freed_seconds = self._last_freed
        self._rank(lower, self._clock())

    def _hang(self, node: Node, parent: Node | None) -> None:
        """`node` follows `parent` on a path. Of blocks that the engine has twice the path decides which copy the rest hangs on, so that
        the other is free to go."""
        old = node.parent
        if old is parent:
            return
        now = self._clock()
        node.parent = parent
        if parent is not None:
            parent.children[node] = None
            self._rank(parent, now)
        if old is not None:
            del old.children[node]
            self._rank(old, now)

    def _uproot(self) -> bool:
        """Let go of what is free but no leaf, which only copies of blocks in use can bring about; whether there was any. O(blocks)."""
        found = False
        for node in list(self.nodes.values()):
            num_free = next((at for at, block in enumerate(node.blocks) if block.ref_cnt), len(node.blocks))
            if num_free == 0 or node.is_ranked:
                continue
            if num_free < len(node.blocks):
                self._split(node, num_free)
            for child in node.children:
                child.parent = None
            node.children = {}
            self._rank(node, self._clock())
            found = True
        return found

    def _node(self, blocks: list[Block], start: int, parent: Node | None, extent: Extent) -> Node:
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

    def _fit(self, node: Node, path: Sequence[Block], position: int) -> Node:
        """The part of `node` that lies on `path` from `position` on, as a node of its own."""
        if node.blocks[0] is not path[position]:
            node = self._split(node, node.blocks.index(path[position]))
        shared = min(len(node.blocks), len(path) - position)
        if node.blocks[shared - 1] is not path[position + shared - 1]:
            shared = next(at for at in range(shared) if node.blocks[at] is not path[position + at])
        if shared < len(node.blocks):
            self._split(node, shared)
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut in two; the lower part is new and comes back."""
        facts, now = node.extent, self._clock()
        children, node.children = node.children, {}
        lower = self._node(node.blocks[at:], node.start + at, node, like(facts))
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
        self._rank(node, now)
        self._rank(lower, now)
        return lower

    def _are_one(self, upper: Node, lower: Node) -> bool:
        return (
            list(upper.children) == [lower]
            and upper.owners == lower.owners
            and not upper.waiting
            and not lower.waiting
            and upper.blocks[-1].ref_cnt == lower.blocks[0].ref_cnt > 0
        )

    def _merge(self, upper: Node, lower: Node) -> None:
        if lower.is_known:
            self._policy.forget(lower.extent, self._clock())
        for branch in lower.owners:
            branch.nodes.pop(lower, None)
        del self.nodes[lower.extent.id]
        upper.children = lower.children
        for child in upper.children:
            child.parent = upper
        self._extend(upper, lower.blocks)

    def _refate(self, node: Node, now: float) -> None:
        fate = node.fate()
        if node.extent.fate is not fate:
            node.extent.fate = fate
            if node.is_ranked:
                self._policy.reconsider(node.extent, now)

    def _rank(self, node: Node, now: float) -> None:
        """Tell the policy whether it may be chosen, where that has changed."""
        is_free = not node.children and node.blocks[-1].ref_cnt == 0
        if is_free == node.is_ranked:
            return
        node.is_ranked = is_free
        if not is_free:
            self._policy.hold(node.extent, now)
        elif node.is_known:
            self._policy.release(node.extent, now)
        else:
            node.is_known = True
            self._policy.insert(node.extent, now)

    def _drop(self, node: Node, now: float) -> None:
        """Its last block has left."""
        self._policy.forget(node.extent, now)
        del self.nodes[node.extent.id]
        for branch in node.owners:
            branch.nodes.pop(node, None)
        for who in node.waiting:
            self.waiting[who].remove(node)
        parent = node.parent
        if parent is not None:
            del parent.children[node]
            self._rank(parent, now)
