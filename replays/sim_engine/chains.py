"""Real token ids as paths in the simulator's block pool, and the pool's changes as vLLM's KV events.

A branch holds the ids of its blocks from the root of the chain on, keyed by chained hashes, so that prompts meet where their tokens are the
same. Branches that hold nothing and that nobody runs on are forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from prefix_cache.blocks import BlockHash, HashChain
from prefix_cache.events import BlockRemoved, BlockStored, Event
from replays.simulator.chains import Branch, Path
from replays.simulator.pieces import PooledExtent

_WIRE_BYTES = 8
_CLEAN_EVERY = 256
"""Requests between two looks for what can be forgotten."""


@dataclass(slots=True)
class _Known:
    """A branch's blocks: hashes, ids, and the branches that hang on it by (depth, hash of their first block)."""

    hashes: list[BlockHash]
    ids: array[int]
    salt: str
    children: dict[tuple[int, BlockHash], Branch] = field(default_factory=dict)
    num_users: int = 0


class TokenChains:
    """The branches of one pool. `stored` and `evicted` are the pool's hooks; `take_events` is what they amounted to."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[Branch, _Known] = {}
        self._roots: dict[BlockHash, Branch] = {}
        self._events: list[Event] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._known)

    def add(self, ids: array[int], salt: str = "") -> Path:
        """The path of a request whose prompt and answer will be `ids`: its whole blocks, and room behind them for a part of one."""
        self._num_added += 1
        if self._num_added % _CLEAN_EVERY == 0:
            self._forget_unused()
        chain = HashChain(self.block_size, salt.encode())
        chain.extend(ids)
        path, depth = self._walk(chain.hashes)
        if depth < len(chain.hashes) or not path:
            self._grow(path, depth, chain.hashes[depth:], ids[depth * self.block_size :], salt)
        for branch in path:
            self._known[branch].num_users += 1
        return tuple(path)

    def done(self, path: Path) -> None:
        """The request of that path has ended."""
        for branch in path:
            self._known[branch].num_users -= 1

    def _walk(self, hashes: Sequence[BlockHash]) -> tuple[list[Branch], int]:
        """The known branches that hold the front of `hashes`, and how many blocks that is."""
        path: list[Branch] = []
        depth = 0
        branch = self._roots.get(hashes[0]) if hashes else None
        while branch is not None:
            path.append(branch)
            known = self._known[branch]
            end = min(len(hashes), branch.start + len(known.hashes))
            while depth < end and known.hashes[depth - branch.start] == hashes[depth]:
                depth += 1
            branch = known.children.get((depth, hashes[depth])) if depth < len(hashes) else None
        return path, depth

    def _grow(self, path: list[Branch], depth: int, hashes: Sequence[BlockHash], ids: array[int], salt: str) -> None:
        """Put these blocks behind `depth` blocks of `path`: onto its last branch where that ends there, else as a new one."""
        whole = ids[: len(hashes) * self.block_size]
        parent = path[-1] if path else None
        if parent is not None and depth == parent.start + len(self._known[parent].hashes):
            self._known[parent].hashes += hashes
            self._known[parent].ids += whole
            return
        branch = Branch(parent, depth, 0)
        self._known[branch] = _Known(list(hashes), whole, salt)
        if parent is not None:
            self._known[parent].children[depth, hashes[0]] = branch
        elif hashes:
            self._roots[hashes[0]] = branch
        path.append(branch)

    def stored(self, branch: Branch, low: int, high: int, now: float) -> None:
        """The pool's hook: these blocks can be hit from now on."""
        known, size = self._known[branch], self.block_size
        first, last = low - branch.start, high - branch.start
        parent = self._hash_before(branch, low)
        extra = [[known.salt], *[None] * (last - first - 1)] if known.salt and low == 0 else None
        self._events.append(
            BlockStored(
                block_hashes=[_wire(block) for block in known.hashes[first:last]],
                parent_block_hash=None if parent is None else _wire(parent),
                token_ids=known.ids[first * size : last * size].tolist(),
                block_size=size,
                medium="GPU",
                extra_keys=extra,
                group_idx=0,
            )
        )

    def evicted(self, branch: Branch, low: int, high: int, extent: PooledExtent, now: float) -> None:
        """The pool's hook: these blocks are gone, the deepest first."""
        known = self._known[branch]
        hashes = known.hashes[low - branch.start : high - branch.start]
        self._events.append(BlockRemoved([_wire(block) for block in reversed(hashes)], medium="GPU", group_idx=0))

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def _hash_before(self, branch: Branch, depth: int) -> BlockHash | None:
        if depth > branch.start:
            return self._known[branch].hashes[depth - 1 - branch.start]
        return None if branch.parent is None else self._hash_before(branch.parent, depth)

    def _forget_unused(self) -> None:
        """Children first: a branch goes when it holds no block, nobody runs on it and nothing hangs on it."""
        for branch in sorted(self._known, key=lambda each: -each.start):
            known = self._known[branch]
            if branch.pieces or known.num_users or known.children:
                continue
            del self._known[branch]
            if branch.parent is not None:
                del self._known[branch.parent].children[branch.start, known.hashes[0]]
            elif known.hashes:
                del self._roots[known.hashes[0]]


def _wire(block: BlockHash) -> int:
    """A hash as events carry it: its low 64 bits."""
    return int.from_bytes(block[-_WIRE_BYTES:], "big")
