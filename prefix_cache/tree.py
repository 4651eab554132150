"""The unlimited cache behind `ceiling`: a radix tree of every token sequence that was ever computed, compared token by token.

A turn is matched and inserted from the position where its session stood, so it costs its new tokens, not its history. Spans are arrays of
4-byte ids compared by memcmp. A long run of tokens is a chain of nodes of at most `span_tokens`: that bounds what an append copies, and
what is forgotten at once when the tree is full. A node costs about 350 bytes, so agents' prompts need 4 to 5 bytes a unique token.
"""

from __future__ import annotations

import heapq
from array import array
from itertools import islice
from typing import NamedTuple

import numpy as np

_TOKENS_PER_NODE = 64
"""Where prompts are so short that nodes cost more than tokens, the bound counts nodes: one for each so many tokens of `max_tokens`."""

_MAX_OTHERS = 64


class _Node:
    """Tokens `start` to `end` of the sequences that run through it. A split keeps this object as the lower half."""

    __slots__ = ("children", "is_forgotten", "is_queued", "last_used", "parent", "span", "start")

    def __init__(self, parent: _Node | None, start: int, span: array[int], last_used: int) -> None:
        self.parent = parent
        self.start = start
        self.span = span
        self.children: dict[int, _Node] | None = None
        self.last_used = last_used
        self.is_queued = False
        self.is_forgotten = False

    @property
    def end(self) -> int:
        return self.start + len(self.span)


class _Root(_Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: bytes) -> None:
        super().__init__(None, 0, array("I"), 0)
        self.namespace = namespace


class Position(NamedTuple):
    """A place in the tree, `num_tokens` deep. It outlives splits; where its tokens were forgotten it means what is left of them.

    With a smaller `num_tokens` it is the place that far along the same sequence.
    """

    node: _Node
    num_tokens: int
    namespace: bytes = b""


class PrefixTree:
    """Not thread-safe. `max_tokens` bounds the tokens held; past it the least recently used leaves are forgotten."""

    def __init__(self, max_tokens: int, *, span_tokens: int = 4096) -> None:
        assert max_tokens > 0
        assert span_tokens > 0
        self.max_tokens = max_tokens
        self.span_tokens = span_tokens
        self.num_tokens = 0
        self.num_nodes = 0
        self.num_forgotten_tokens = 0
        self._max_nodes = 1024 + max_tokens // _TOKENS_PER_NODE
        self._roots: dict[bytes, _Root] = {}
        self._uses = 0
        self._pushes = 0
        # Leaves by last use, corrected when popped: a use costs nothing here, and each node is queued at most once.
        self._leaves: list[tuple[int, int, _Node]] = []

    def root(self, namespace: bytes = b"") -> Position:
        """The start of every sequence of `namespace` (one a salt or tenant: they share nothing)."""
        node = self._roots.get(namespace)
        return Position(node if node is not None else _Root(namespace), 0, namespace)

    def match(self, ids: array[int], start: Position | None = None) -> Position:
        """Where the longest known prefix of `ids` ends. Counts as a use of it.

        `ids` is the whole sequence (typecode "I"); the tokens before `start` are taken as equal and not read.
        """
        node, depth, namespace = self._walk(ids, start)
        self._touch(node)
        return Position(node, depth, namespace)

    def elsewhere(self, ids: array[int], namespace: bytes, beyond: int = 0) -> int:
        """How many leading tokens of `ids` are known in another namespace; 0 unless more than `beyond`. Counts as no use.

        At most `_MAX_OTHERS` namespaces are looked at, the newest first.
        """
        longest = 0
        for other in islice(reversed(self._roots), _MAX_OTHERS):
            if other != namespace:
                longest = max(longest, self._walk(ids, self.root(other))[1])
        return longest if longest > beyond else 0

    def insert(self, ids: array[int], start: Position | None = None) -> Position:
        """Add the whole sequence `ids`, known to lead through `start`; return its end.

        Adds what is missing, also where `start` itself has been forgotten. The end is nearer than `len(ids)` only if the tree is smaller.
        """
        node, depth, namespace = self._walk(ids, start)
        if depth < len(ids):
            if isinstance(node, _Root):
                self._roots[namespace] = node
            if depth < node.end:
                node = self._split(node, depth)
            node = self._append(node, ids, depth)
        self._touch(node)
        self._forget()
        return self.surviving(Position(node, len(ids), namespace))

    def surviving(self, position: Position) -> Position:
        """`position`, or the deepest ancestor of it that has not been forgotten."""
        node, depth = position.node, position.num_tokens
        if node.parent is not None and not node.is_forgotten and depth > node.start:
            return position
        while node.parent is not None and (node.is_forgotten or depth <= node.start):
            depth = min(depth, node.start)
            node = node.parent
        if node.parent is None:
            return self.root(position.namespace)
        return Position(node, depth, position.namespace)

    def check_integrity(self) -> None:
        """Assert that counts, links and the leaf queue agree. Costs a walk over all nodes; for tests."""
        queued = {id(node) for _, _, node in self._leaves}
        num_tokens = num_nodes = 0
        pending: list[_Node] = list(self._roots.values())
        while pending:
            node = pending.pop()
            for first, child in (node.children or {}).items():
                assert child.parent is node
                assert child.start == node.end
                assert child.span[0] == first
                assert len(child.span) <= self.span_tokens
                assert child.children or id(child) in queued
                assert not child.is_forgotten
                num_tokens += len(child.span)
                num_nodes += 1
                pending.append(child)
        assert (num_tokens, num_nodes) == (self.num_tokens, self.num_nodes)
        assert num_tokens <= self.max_tokens

    def _walk(self, ids: array[int], start: Position | None) -> tuple[_Node, int, bytes]:
        assert ids.typecode == "I"
        at = self.surviving(start) if start is not None else self.root()
        node, depth = at.node, at.num_tokens
        assert depth <= len(ids)
        while depth < len(ids):
            if depth == node.end:
                child = node.children.get(ids[depth]) if node.children else None
                if child is None:
                    break
                node = child
            num_equal = _common_prefix(node.span, depth - node.start, ids, depth)
            depth += num_equal
            if depth < node.end:
                break
        return node, depth, at.namespace

    def _split(self, node: _Node, depth: int) -> _Node:
        """Cut `node` at `depth`, strictly inside it; return the new upper half."""
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        cut = depth - node.start
        upper = _Node(parent, node.start, node.span[:cut], node.last_used)
        upper.children = {node.span[cut]: node}
        parent.children[upper.span[0]] = upper
        node.parent, node.start, node.span = upper, depth, node.span[cut:]
        self.num_nodes += 1
        return upper

    def _append(self, node: _Node, ids: array[int], depth: int) -> _Node:
        """Hang `ids[depth:]` below `node`, which ends at `depth`; return the new end. A leaf grows in place up to its span."""
        self.num_tokens += len(ids) - depth
        if node.parent is not None and not node.children:
            room = self.span_tokens - len(node.span)
            node.span.extend(ids[depth : depth + room])
            depth = min(depth + room, len(ids))
        while depth < len(ids):
            child = _Node(node, depth, ids[depth : depth + self.span_tokens], self._uses)
            if node.children is None:
                node.children = {}
            node.children[ids[depth]] = child
            self.num_nodes += 1
            node, depth = child, child.end
        return node

    def _touch(self, node: _Node) -> None:
        """Note a use that ended in `node`. Ancestors need no note: they become leaves only when all below them was oldest and has gone."""
        self._uses += 1
        node.last_used = self._uses
        if node.parent is not None and not node.children:
            self._queue(node)

    def _queue(self, node: _Node) -> None:
        if not node.is_queued:
            node.is_queued = True
            self._pushes += 1
            heapq.heappush(self._leaves, (node.last_used, self._pushes, node))

    def _forget(self) -> None:
        while self.num_tokens > self.max_tokens or self.num_nodes > self._max_nodes:
            queued_at, _, node = heapq.heappop(self._leaves)
            node.is_queued = False
            if node.children:
                continue
            if node.last_used > queued_at:
                self._queue(node)
            else:
                self._forget_leaf(node)

    def _forget_leaf(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.children is not None
        del parent.children[node.span[0]]
        node.is_forgotten = True
        self.num_tokens -= len(node.span)
        self.num_forgotten_tokens += len(node.span)
        self.num_nodes -= 1
        # Positions may still hold the node; they need its start, not its tokens.
        node.span = array("I")
        if not parent.children:
            parent.children = None
            if isinstance(parent, _Root):
                del self._roots[parent.namespace]
            else:
                self._queue(parent)


def _common_prefix(span: array[int], span_start: int, ids: array[int], ids_start: int) -> int:
    """How many tokens of `span[span_start:]` and `ids[ids_start:]` are equal before the first difference."""
    length = min(len(span) - span_start, len(ids) - ids_start)
    left = span[span_start : span_start + length]
    right = ids[ids_start : ids_start + length]
    if left == right:
        return length
    return int((np.frombuffer(left, np.uint32) != np.frombuffer(right, np.uint32)).argmax())
