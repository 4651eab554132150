"""What the pool holds of a branch: pieces, each a run of blocks with one history, each with one or more physical copies.

A prefix that is computed twice at once, or the last block that a full hit must compute again, lies in the pool twice: the engine finds the
copy that came first, and each copy ages by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from admission.eviction.policy import Extent, Fate
from replays.simulator.chains import Branch


@dataclass(slots=True, eq=False)
class PooledExtent(Extent):
    """An extent that knows where it lies."""

    copy: Copy | None = None
    known: bool = False
    """The policy was told of it."""
    ranked: bool = False
    """The policy may choose it: known and not held."""
    truth: Fate = Fate.LIVE
    """What will really become of it, whatever the policy is told."""


@dataclass(slots=True, eq=False)
class Copy:
    """One physical copy of a piece's blocks."""

    piece: Piece
    extent: PooledExtent
    holders: set[int]
    """Running requests that use it."""
    freed: float = 0.0
    """When the last of them let go; each release has a time of its own, so that equal times mean one release."""

    @property
    def recency(self) -> float:
        return math.inf if self.holders else self.freed

    @property
    def num_evictable(self) -> int:
        """Blocks of it that nothing hangs on."""
        piece = self.piece
        if len(piece.copies) > 1 and piece.keeper is not self:
            return piece.end - piece.start
        branch = piece.branch
        if branch.pieces[-1] is not piece:
            return 0
        attached = branch.attached
        return piece.end - (max(piece.start, attached[-1]) if attached else piece.start)


@dataclass(slots=True, eq=False)
class Piece:
    """Blocks `start` to `end` (depths) of `branch`."""

    branch: Branch
    start: int
    end: int
    copies: list[Copy] = field(default_factory=list)
    """In the order in which they came; lookups find the first."""

    @property
    def keeper(self) -> Copy:
        """The copy that goes last, and on which deeper blocks hang; the others are spare."""
        copies = self.copies
        return copies[0] if len(copies) == 1 else max(copies, key=lambda copy: copy.recency)

    def end_at(self, end: int) -> None:
        """Reach to depth `end`."""
        self.end = end
        for copy in self.copies:
            copy.extent.num_blocks = end - self.start
            copy.extent.end_block = end

    def joins(self, deeper: Piece) -> bool:
        """Whether this and the next piece have the same history and the same prospects, so that one extent says it all."""
        if len(self.copies) != len(deeper.copies):
            return False
        return all(_alike(mine, other) for mine, other in zip(self.copies, deeper.copies, strict=True))


def _alike(left: Copy, right: Copy) -> bool:
    if left.freed != right.freed or left.holders or right.holders:
        return False
    one, two = left.extent, right.extent
    return one.fate is two.fate and one.truth is two.truth and one.next_use_seconds == two.next_use_seconds
