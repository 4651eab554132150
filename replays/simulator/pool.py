"""vLLM's block pool in extents: which blocks are hashed, who uses them, and which go when new ones are wanted.

The pool owns pins and the tree; the policy only ranks (`admission.eviction.policy`). Blocks without a hash always go first. What holds in
vLLM's free queue holds here block for block under LRU: a request's blocks are freed deepest first, so chains lose their tails.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from admission.eviction.policy import EvictionPolicy, Fate
from replays.simulator.chains import Branch
from replays.simulator.pieces import Copy, Piece, PooledExtent

Path: TypeAlias = Sequence[Branch]


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


def covered(path: Path, low: int, high: int) -> Iterator[tuple[Branch, int, int]]:
    """(branch, from, to) of the blocks `low` to `high` of a path, root first."""
    last = len(path) - 1
    for index, branch in enumerate(path):
        end = path[index + 1].start if index < last else high
        if end >= high:
            end, last = high, index
        start = branch.start
        if start < low:
            start = low
        if start < end:
            yield branch, start, end
        if index == last:
            return


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
        self._policy = policy
        self._prospects = prospects
        """None: nobody knows anything, and all is live."""
        self._on_evict = on_evict
        self._on_store = on_store
        self._next_id = 0
        self._idle: dict[int, Copy] = {}
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
                    self._split(branch, index, end, now)
                copies = piece.copies
                copy = copies[0]
                extent = copy.extent
                if not copy.holders:
                    self.num_idle -= piece.end - piece.start
                    del self._idle[extent.id]
                copy.holders.add(holder)
                extent.num_hits += 1
                if len(copies) > 1:
                    self._rank_piece(piece, now)
                elif extent.ranked:
                    self._hold_back(copy, now)

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
                self._commit_again(holder, branch, start, min(end, resident), now)
            if end > resident:
                self._commit_new(holder, branch, max(start, resident), end, now)

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
                    self._idle[extent.id] = copy
                    extent.freed_seconds = freed
                    extent.session_id = use.session_id
                    extent.return_class = use.return_class
            self._settle(branch, now)

    def _settle(self, branch: Branch, now: float) -> None:
        """Some of the branch was let go: what has one history now is one piece, and what may be evicted is ranked."""
        self.tell(branch, now)
        pieces = branch.pieces
        if len(pieces) == 1:
            self._rank_piece(pieces[0], now)
            return
        self._join(branch, now)
        last = pieces[-1]
        for piece in pieces:
            if piece is last or len(piece.copies) > 1:  # the only copy of what others hang on is not ranked
                self._rank_piece(piece, now)

    def idle_extents(self) -> Iterator[tuple[PooledExtent, bool]]:
        """Every extent that no running request uses, and whether a later copy makes it spare."""
        for copy in self._idle.values():
            yield copy.extent, len(copy.piece.copies) > 1 and copy.piece.keeper is not copy

    def check_integrity(self) -> None:
        """Assert what must hold between calls: sums, chains without holes, and that the policy's choice is a leaf."""
        self._policy.check_integrity()
        assert self.num_plain >= 0
        assert self.num_idle == sum(copy.extent.num_blocks for copy in self._idle.values())
        assert self.num_free <= self.num_blocks
        for copy in self._idle.values():
            piece, branch = copy.piece, copy.piece.branch
            assert not copy.holders
            assert copy.extent.num_blocks == piece.end - piece.start > 0
            assert copy.extent.ranked == (self._evictable(copy) > 0)
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
            index = _piece_at(branch, depth)
            if index is not None:
                self._split(branch, index, depth, now)
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
                        self._policy.reconsider(extent, now)

    def _extent(self, piece: Piece, holders: set[int], now: float, like: PooledExtent | None = None) -> Copy:
        self._next_id += 1
        extent = PooledExtent(
            id=self._next_id,
            session_id=like.session_id if like else "",
            num_blocks=piece.end - piece.start,
            inserted_seconds=like.inserted_seconds if like else now,
            freed_seconds=like.freed_seconds if like else now,
            end_block=piece.end,
        )
        if like is not None:
            extent.num_hits, extent.fate, extent.truth = like.num_hits, like.fate, like.truth
            extent.return_class, extent.next_use_seconds = like.return_class, like.next_use_seconds
        copy = extent.copy = Copy(piece, extent, holders, like.copy.freed if like and like.copy else now)
        if not holders:
            self._idle[extent.id] = copy
        return copy

    def _split(self, branch: Branch, index: int, depth: int, now: float) -> None:
        """Cut piece `index` at `depth` in two."""
        upper = branch.pieces[index]
        lower = Piece(branch, depth, upper.end)
        upper.end = depth
        for copy in upper.copies:
            lower.copies.append(self._extent(lower, set(copy.holders), now, copy.extent))
            copy.extent.num_blocks = depth - upper.start
            copy.extent.end_block = depth
        branch.pieces.insert(index + 1, lower)
        self._rank_piece(upper, now)
        self._rank_piece(lower, now)

    def _join(self, branch: Branch, now: float) -> None:
        """Make one piece of neighbours with the same history."""
        pieces = branch.pieces
        index = len(pieces) - 1
        while index > 0:
            upper, lower = pieces[index - 1], pieces[index]
            if upper.joins(lower):
                upper.end = lower.end
                del pieces[index]
                for kept, gone in zip(upper.copies, lower.copies, strict=True):
                    self._forget(gone, now)
                    self._hold_back(kept, now)
                    kept.extent.num_blocks = upper.end - upper.start
                    kept.extent.end_block = upper.end
            index -= 1

    def _commit_again(self, holder: int, branch: Branch, low: int, high: int, now: float) -> None:
        """The holder computed blocks that are resident already: a second copy."""
        for depth in (low, high):
            index = _piece_at(branch, depth)
            if index is not None:
                self._split(branch, index, depth, now)
        for piece in branch.pieces:
            if low <= piece.start < high:
                piece.copies.append(self._extent(piece, {holder}, now))
                self._rank_piece(piece, now)

    def _commit_new(self, holder: int, branch: Branch, low: int, high: int, now: float) -> None:
        pieces = branch.pieces
        last = pieces[-1] if pieces else None
        branch.resident = high
        branch.computed = max(branch.computed, high)
        if self._on_store is not None:
            self._on_store(branch, low, high, now)
        if last is not None and len(last.copies) == 1 and last.copies[0].holders == {holder}:
            last.end = high
            last.copies[0].extent.num_blocks = high - last.start
            last.copies[0].extent.end_block = high
            return
        piece = Piece(branch, low, high)
        piece.copies.append(self._extent(piece, {holder}, now))
        pieces.append(piece)
        if last is not None:
            self._rank_piece(last, now)
        elif branch.parent is not None:
            insort(branch.parent.attached, branch.start)
            if branch.parent.pieces:
                self._rank_piece(branch.parent.pieces[-1], now)

    def _evictable(self, copy: Copy) -> int:
        piece = copy.piece
        if len(piece.copies) > 1 and piece.keeper is not copy:
            return piece.end - piece.start
        branch = piece.branch
        if branch.pieces[-1] is not piece:
            return 0
        attached = branch.attached
        return piece.end - (max(piece.start, attached[-1]) if attached else piece.start)

    def _rank_piece(self, piece: Piece, now: float) -> None:
        for copy in piece.copies:
            self._rank(copy, now)

    def _rank(self, copy: Copy, now: float) -> None:
        """Tell the policy whether the copy may lose blocks, where that has changed."""
        extent = copy.extent
        free = not copy.holders and self._evictable(copy) > 0
        if free == extent.ranked:
            return
        extent.ranked = free
        if not free:
            self._policy.hold(extent, now)
        elif extent.known:
            self._policy.release(extent, now)
        else:
            extent.known = True
            self._policy.insert(extent, now)

    def _hold_back(self, copy: Copy, now: float) -> None:
        if copy.extent.ranked:
            copy.extent.ranked = False
            self._policy.hold(copy.extent, now)

    def _forget(self, copy: Copy, now: float) -> None:
        self._idle.pop(copy.extent.id, None)
        if copy.extent.known:
            self._policy.forget(copy.extent, now)
            copy.extent.known = copy.extent.ranked = False

    def _evict(self, most: int, now: float) -> int:
        """Evict up to `most` blocks of the policy's choice; how many it were."""
        extent = self._policy.to_evict(now)
        assert isinstance(extent, PooledExtent), "free blocks, but nothing to evict"
        copy = extent.copy
        assert copy is not None
        piece = copy.piece
        if len(piece.copies) > 1 and piece.keeper is copy:  # never under LRU: a spare copy is worth nothing
            copy = min(piece.copies, key=lambda other: other.recency)
        num_blocks = min(most, self._evictable(copy))
        self.num_idle -= num_blocks
        branch, end = piece.branch, piece.end
        if len(piece.copies) > 1:
            self._drop_spare(copy, num_blocks, now)
        else:
            self._truncate(copy, num_blocks, now)
            if self._on_evict is not None:
                self._on_evict(branch, end - num_blocks, end, copy.extent, now)
        return num_blocks

    def _drop_spare(self, copy: Copy, num_blocks: int, now: float) -> None:
        piece = copy.piece
        if num_blocks < piece.end - piece.start:
            branch = piece.branch
            place = piece.copies.index(copy)
            index = branch.pieces.index(piece)
            self._split(branch, index, piece.end - num_blocks, now)
            piece = branch.pieces[index + 1]
            copy = piece.copies[place]
        piece.copies.remove(copy)
        self._forget(copy, now)
        self._rank_piece(piece, now)

    def _truncate(self, copy: Copy, num_blocks: int, now: float) -> None:
        piece = copy.piece
        branch = piece.branch
        piece.end -= num_blocks
        branch.resident = piece.end
        copy.extent.num_blocks -= num_blocks
        copy.extent.end_block = piece.end
        if piece.end > piece.start:
            self._rank(copy, now)
            return
        branch.pieces.pop()
        self._forget(copy, now)
        if branch.pieces:
            self._rank_piece(branch.pieces[-1], now)
        elif branch.parent is not None:
            attached = branch.parent.attached
            del attached[bisect_left(attached, branch.start)]
            if branch.parent.pieces:
                self._rank_piece(branch.parent.pieces[-1], now)


def _piece_at(branch: Branch, depth: int) -> int | None:
    """The piece that has `depth` inside it, neither at its start nor at its end."""
    for index, piece in enumerate(branch.pieces):
        if piece.start < depth < piece.end:
            return index
    return None
