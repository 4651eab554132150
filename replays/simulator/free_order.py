"""Which blocks leave when new ones are wanted: copies that nobody uses, in the order that the policy gives to those that may go.

Blocks leave from the end of a chain, so that what others hang on stays: of a branch's last piece what lies behind its last child, and every
copy of a piece but the one that is used last.
"""

from __future__ import annotations

from admission.eviction.policy import EvictionPolicy
from replays.simulator.pieces import Copy, Piece, PooledExtent


class FreeOrder:
    """Tells the policy what it may choose from, each time that changes."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.idle: dict[int, Copy] = {}
        """Copies that no running request uses, by their extents' ids; some of them may not go yet."""

    def rank(self, piece: Piece, now: float) -> None:
        """Look again whether the copies of `piece` may lose blocks."""
        for copy in piece.copies:
            extent = copy.extent
            free = not copy.holders and copy.num_evictable > 0
            if free == extent.ranked:
                continue
            extent.ranked = free
            if not free:
                self.policy.hold(extent, now)
            elif extent.known:
                self.policy.release(extent, now)
            else:
                extent.known = True
                self.policy.insert(extent, now)

    def hold_back(self, copy: Copy, now: float) -> None:
        """The copy may not go."""
        if copy.extent.ranked:
            copy.extent.ranked = False
            self.policy.hold(copy.extent, now)

    def forget(self, copy: Copy, now: float) -> None:
        """The copy is gone."""
        self.idle.pop(copy.extent.id, None)
        if copy.extent.known:
            self.policy.forget(copy.extent, now)
            copy.extent.known = copy.extent.ranked = False

    def next(self, now: float) -> Copy:
        """The copy that loses blocks next. Changes nothing here. Asserts that there is one."""
        extent = self.policy.to_evict(now)
        assert isinstance(extent, PooledExtent), "free blocks, but nothing to evict"
        assert extent.copy is not None
        piece = extent.copy.piece
        if len(piece.copies) > 1 and piece.keeper is extent.copy:  # never under LRU: a spare copy is worth nothing
            return min(piece.copies, key=lambda other: other.recency)
        return extent.copy

    def check_integrity(self) -> None:
        """Assert that the policy may choose exactly what may go."""
        self.policy.check_integrity()
        for copy in self.idle.values():
            assert not copy.holders
            assert copy.extent.num_blocks == copy.piece.end - copy.piece.start > 0
            assert copy.extent.ranked == (copy.num_evictable > 0)
