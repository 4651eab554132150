"""vLLM's block pool in extents: which blocks are hashed, who uses them, and which go when new ones are wanted.

The pool owns pins and the tree; the policy only ranks (`admission.eviction.policy`). Blocks without a hash always go first. What holds in
vLLM's free queue holds here block for block under LRU: a request's blocks are freed deepest first, so chains lose their tails.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from admission.eviction.policy import EvictionPolicy, Fate
from replays.simulator.chains import Branch, Path, covered
from replays.simulator.extents import Extents
from replays.simulator.free_order import FreeOrder
from replays.simulator.pieces import PooledExtent


@dataclass(frozen=True, slots=True)
class Use:
    """What the pool is told of a request that lets its blocks go."""

    session_id: str
    return_class: str = "unknown"


class Prospects(Protocol):
    """What becomes of a branch, by depth."""

    def outlook(self, branch: Branch, now: float) -> Sequence[tuple[int, Fate, Fate, float | None]]:
        """(up to this depth, true fate, fate as the policy is told, next use) from the branch's start; the last depth covers all."""
        ...


OnEvict: TypeAlias = Callable[[Branch, int, int, PooledExtent, float], None]
"""Blocks of a branch (from, to) have left the pool."""
OnStore: TypeAlias = Callable[[Branch, int, int, float], None]
"""Blocks of a branch (from, to) that were not in the pool are now."""


class BlockPool:
    """A pool of `num_blocks` usable blocks (vLLM's null block is not among them)."""

    def __init__(
        self,
        num_blocks: int,
        policy: EvictionPolicy,
        prospects: Prospects | None = None,
        on_evict: OnEvict | None = None,
        on_store: OnStore | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_plain = num_blocks
        """Free blocks without a hash."""
        self.num_idle = 0
        """Free blocks that could be hit."""
        self._order = FreeOrder(policy)
        self._extents = Extents(self._order)
        self._prospects = prospects
        """None: nobody knows anything, and all is live."""
        self._on_evict = on_evict
        self._on_store = on_store
        self._last_freed = -math.inf

    @property
    def num_free(self) -> int:
        return self.num_plain + self.num_idle

    @property
    def usage(self) -> float:
        """Blocks of running requests over all, as vLLM counts."""
        return 1.0 - self.num_free / self.num_blocks

    def hit_depth(self, path: Path, limit: int) -> int:
        """Resident blocks in the front of `path`, at most `limit`. Changes nothing."""
        last = len(path) - 1
        for index, branch in enumerate(path):
            end = min(limit, path[index + 1].start) if index < last else limit
            if branch.resident < end:
                return branch.resident
        return limit

    @staticmethod
    def computed_depth(path: Path, limit: int) -> int:
        """Blocks in the front of `path`, at most `limit`, that were computed at some time."""
        last = len(path) - 1
        for index, branch in enumerate(path):
            end = min(limit, path[index + 1].start) if index < last else limit
            if branch.computed < end:
                return branch.computed
        return limit

    def num_idle_in(self, path: Path, depth: int) -> int:
        """Of the first `depth` blocks, those that no running request uses: a hit takes them out of the free ones."""
        idle = 0
        for branch, start, end in covered(path, 0, depth):
            for piece in branch.pieces:
                if piece.start >= end:
                    break
                if not piece.copies[0].holders:
                    idle += min(piece.end, end) - max(piece.start, start)
        return idle

    def hold(self, holder: int, path: Path, depth: int, now: float) -> None:
        """`holder` uses the first `depth` blocks, which are resident. Changes state."""
        for branch, _, end in covered(path, 0, depth):
            for index, piece in enumerate(branch.pieces):  # a split adds the next one, which lies behind `end`
                if piece.start >= end:
                    break
                if piece.end > end:
                    self._extents.split(branch, index, end, now)
                copies = piece.copies
                copy = copies[0]
                extent = copy.extent
                if not copy.holders:
                    self.num_idle -= piece.end - piece.start
                    del self._order.idle[extent.id]
                copy.holders.add(holder)
                extent.num_hits += 1
                if len(copies) > 1:
                    self._order.rank(piece, now)
                elif extent.ranked:
                    self._order.hold_back(copy, now)

    def allocate(self, num_blocks: int, now: float) -> None:
        """Take free blocks, first those without a hash, then what the policy gives up. Asserts that there are enough."""
        assert num_blocks <= self.num_free
        plain = min(num_blocks, self.num_plain)
        self.num_plain -= plain
        left = num_blocks - plain
        while left:
            left -= self._evict(left, now)

    def commit(self, holder: int, path: Path, low: int, high: int, now: float) -> None:
        """`holder`'s own blocks `low` to `high` get their hashes, and can be hit from now on. Changes state."""
        for branch, start, end in covered(path, low, high):
            resident = branch.resident
            if start < resident:
                self._extents.double(holder, branch, start, min(end, resident), now)
            if end > resident:
                first = max(start, resident)
                self._extents.grow(holder, branch, first, end, now)
                branch.computed = max(branch.computed, end)
                if self._on_store is not None:
                    self._on_store(branch, first, end, now)

    def free(self, holder: int, path: Path, depth: int, num_plain: int, use: Use, now: float) -> None:
        """`holder` lets go of its first `depth` blocks, which have hashes, and of `num_plain` that have none. Changes state."""
        self.num_plain += num_plain
        freed = self._last_freed = max(now, math.nextafter(self._last_freed, math.inf))
        for branch, _, end in covered(path, 0, depth):
            for piece in branch.pieces:
                if piece.start >= end:
                    break
                copies = piece.copies
                copy = copies[0] if len(copies) == 1 else next(copy for copy in copies if holder in copy.holders)
                copy.holders.remove(holder)
                if not copy.holders:
                    copy.freed = freed
                    self.num_idle += piece.end - piece.start
                    extent = copy.extent
                    self._order.idle[extent.id] = copy
                    extent.freed_seconds = freed
                    extent.session_id = use.session_id
                    extent.return_class = use.return_class
            self._settle(branch, now)

    def _settle(self, branch: Branch, now: float) -> None:
        """Some of the branch was let go: what has one history now is one piece, and what may be evicted is ranked."""
        self.tell(branch, now)
        pieces = branch.pieces
        if len(pieces) == 1:
            self._order.rank(pieces[0], now)
            return
        self._extents.join(branch, now)
        last = pieces[-1]
        for piece in pieces:
            if piece is last or len(piece.copies) > 1:  # the only copy of what others hang on is not ranked
                self._order.rank(piece, now)

    def idle_extents(self) -> Iterator[tuple[PooledExtent, bool]]:
        """Every extent that no running request uses, and whether a later copy makes it spare."""
        for copy in self._order.idle.values():
            yield copy.extent, len(copy.piece.copies) > 1 and copy.piece.keeper is not copy

    def check_integrity(self) -> None:
        """Assert what must hold between calls: sums, chains without holes, and that the policy's choice is a leaf."""
        self._order.check_integrity()
        assert self.num_plain >= 0
        assert self.num_idle == sum(copy.extent.num_blocks for copy in self._order.idle.values())
        assert self.num_free <= self.num_blocks
        for copy in self._order.idle.values():
            branch = copy.piece.branch
            assert branch.pieces[0].start == branch.start
            assert branch.pieces[-1].end == branch.resident
            assert all(upper.end == lower.start for upper, lower in itertools.pairwise(branch.pieces))
            assert branch.parent is None or branch.parent.resident >= branch.start

    def tell(self, branch: Branch, now: float) -> None:
        """What becomes of `branch` has changed. Changes state."""
        if self._prospects is None or not branch.pieces:
            return
        outlook = self._prospects.outlook(branch, now)
        for depth, _, _, _ in outlook[:-1]:
            self._extents.cut(branch, depth, now)
        step = 0
        for piece in branch.pieces:
            while piece.start >= outlook[step][0]:
                step += 1
            _, truth, fate, next_use = outlook[step]
            for copy in piece.copies:
                extent = copy.extent
                extent.truth = truth
                if extent.fate is not fate or extent.next_use_seconds != next_use:
                    extent.fate = fate
                    extent.next_use_seconds = next_use
                    if extent.ranked:
                        self._order.policy.reconsider(extent, now)

    def _evict(self, most: int, now: float) -> int:
        """Evict up to `most` blocks of the policy's choice; how many it were."""
        copy = self._order.next(now)
        piece = copy.piece
        branch, end = piece.branch, piece.end
        num_blocks = min(most, copy.num_evictable)
        self.num_idle -= num_blocks
        if len(piece.copies) > 1:
            self._extents.drop_spare(copy, num_blocks, now)
            return num_blocks
        self._extents.truncate(copy, num_blocks, now)
        if self._on_evict is not None:
            self._on_evict(branch, end - num_blocks, end, copy.extent, now)
        return num_blocks
