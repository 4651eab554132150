"""The prompt of a branch laid out flat: ids, their JSON text and block hashes, kept up as the branch grows.

A turn moves the flat prompt to its own node; only what differs from where it stood is touched.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from agentserve.nodes import Node, common_ancestor
from prefix_cache.blocks import HashChain
from prefix_cache.tree import Position


def ids_json(ids: Sequence[int]) -> bytes:
    """Ids as JSON text without brackets: "1,2,3"."""
    return msgspec.json.encode(list(ids))[1:-1]


class FlatPrompt:
    """Ids from the start of the prompt, as far as `node.end` plus what was added with `extend`. `block_size` in tokens."""

    __slots__ = ("_pieces", "chain", "ids", "node", "num_resident_blocks", "position", "resident_as_of", "resident_in", "salt")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        self.node: Node | None = None
        self.ids: array[int] = array("I")
        self.salt = salt
        self.chain = HashChain(block_size, salt)
        self.position: Position | None = None
        """Where the ceiling index stands for these ids."""
        self.num_resident_blocks = 0
        """Leading blocks that were resident when the mirror's `departures` were `resident_as_of`."""
        self.resident_as_of: tuple[int, ...] | None = None
        self.resident_in: object = None
        """The mirror that said so."""
        # Each piece is at least twice as long as the next, so there are few, and appending copies little.
        self._pieces: list[bytes] = []

    @property
    def json(self) -> tuple[bytes, ...]:
        """The ids as JSON text without brackets, in pieces that join to it."""
        return tuple(self._pieces)

    def move_to(self, node: Node) -> None:
        """Stand at `node`: keep what both paths share, drop the rest, append the rest of `node`'s path."""
        shared = common_ancestor(self.node, node) if self.node is not None else None
        self._truncate(shared.end if shared is not None else 0)
        missing: list[Node] = []
        step: Node | None = node
        while step is not shared:
            assert step is not None
            missing.append(step)
            step = step.parent
        for part in reversed(missing):
            self.extend(part.ids)
        self.node = node

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids that no node holds yet (a generation prompt); the next `move_to` drops them."""
        if not len(ids):
            return
        added = ids if isinstance(ids, array) else array("I", ids)
        self._append_json(b"," + ids_json(added) if self._pieces else ids_json(added))
        self.ids.extend(added)
        self.chain.extend(added)

    def _append_json(self, piece: bytes) -> None:
        while self._pieces and len(self._pieces[-1]) < 2 * len(piece):
            piece = self._pieces.pop() + piece
        self._pieces.append(piece)

    def _cut_json(self, num_bytes: int) -> None:
        """Drop the last `num_bytes` of the text."""
        while num_bytes > 0:
            last = self._pieces.pop()
            if len(last) > num_bytes:
                self._pieces.append(last[: len(last) - num_bytes])
            num_bytes -= len(last)

    def _truncate(self, num_tokens: int) -> None:
        if num_tokens == len(self.ids):
            return
        cut = self.ids[num_tokens:]
        del self.ids[num_tokens:]
        self._cut_json(len(ids_json(cut)) + (num_tokens > 0))  # with the comma before
        self.chain = self.chain.fork(num_tokens)
        self.num_resident_blocks = min(self.num_resident_blocks, num_tokens // self.chain.block_size)
        self.chain.extend(self.ids[self.chain.num_tokens :])
        self.position = self.cut_position(num_tokens)

    def cut_position(self, num_tokens: int) -> Position | None:
        """The index position, but no deeper than `num_tokens`."""
        position = self.position
        if position is None or position.num_tokens <= num_tokens:
            return position
        return Position(position.node, num_tokens, position.namespace)
