"""How a branch's resident blocks lie in pieces: they grow, are cut in two, get second copies, join again and lose their ends."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort

from replays.simulator.chains import Branch
from replays.simulator.free_order import FreeOrder
from replays.simulator.pieces import Copy, Piece, PooledExtent


class Extents:
    """Makes and changes pieces; each change is passed on to the order in which they may go."""

    def __init__(self, order: FreeOrder) -> None:
        self._order = order
        self._ids = itertools.count(1)

    def cut(self, branch: Branch, depth: int, now: float) -> None:
        """Let no piece of the branch go across `depth`."""
        for index, piece in enumerate(branch.pieces):
            if piece.start < depth < piece.end:
                self.split(branch, index, depth, now)
                return

    def split(self, branch: Branch, index: int, depth: int, now: float) -> None:
        """Cut piece `index` at `depth` in two."""
        upper = branch.pieces[index]
        lower = Piece(branch, depth, upper.end)
        upper.end_at(depth)
        for copy in upper.copies:
            lower.copies.append(self._copy(lower, set(copy.holders), now, like=copy))
        branch.pieces.insert(index + 1, lower)
        self._order.rank(upper, now)
        self._order.rank(lower, now)

    def join(self, branch: Branch, now: float) -> None:
        """Make one piece of neighbours with the same history."""
        pieces = branch.pieces
        for index in range(len(pieces) - 1, 0, -1):
            upper, lower = pieces[index - 1], pieces[index]
            if upper.joins(lower):
                del pieces[index]
                for kept, gone in zip(upper.copies, lower.copies, strict=True):
                    self._order.forget(gone, now)
                    self._order.hold_back(kept, now)
                upper.end_at(lower.end)

    def double(self, holder: int, branch: Branch, low: int, high: int, now: float) -> None:
        """The holder computed blocks `low` to `high`, which are resident already: a second copy."""
        self.cut(branch, low, now)
        self.cut(branch, high, now)
        for piece in branch.pieces:
            if low <= piece.start < high:
                piece.copies.append(self._copy(piece, {holder}, now))
                self._order.rank(piece, now)

    def grow(self, holder: int, branch: Branch, low: int, high: int, now: float) -> None:
        """The holder computed blocks `low` to `high`, which come behind the resident ones."""
        branch.resident = high
        pieces = branch.pieces
        last = pieces[-1] if pieces else None
        if last is not None and len(last.copies) == 1 and last.copies[0].holders == {holder}:
            last.end_at(high)
            return
        piece = Piece(branch, low, high)
        piece.copies.append(self._copy(piece, {holder}, now))
        pieces.append(piece)
        if last is not None:
            self._order.rank(last, now)
        elif branch.parent is not None:
            insort(branch.parent.attached, branch.start)
            self._rank_last(branch.parent, now)

    def drop_spare(self, copy: Copy, num_blocks: int, now: float) -> None:
        """The last blocks of one of several copies go."""
        piece = copy.piece
        if num_blocks < piece.end - piece.start:
            place, index = piece.copies.index(copy), piece.branch.pieces.index(piece)
            self.split(piece.branch, index, piece.end - num_blocks, now)
            piece = piece.branch.pieces[index + 1]
            copy = piece.copies[place]
        piece.copies.remove(copy)
        self._order.forget(copy, now)
        self._order.rank(piece, now)

    def truncate(self, copy: Copy, num_blocks: int, now: float) -> None:
        """The last blocks of a branch go; `copy` is their only one."""
        piece = copy.piece
        branch = piece.branch
        piece.end_at(piece.end - num_blocks)
        branch.resident = piece.end
        if piece.end > piece.start:
            self._order.rank(piece, now)
            return
        branch.pieces.pop()
        self._order.forget(copy, now)
        if branch.pieces:
            self._rank_last(branch, now)
        elif branch.parent is not None:
            attached = branch.parent.attached
            del attached[bisect_left(attached, branch.start)]
            self._rank_last(branch.parent, now)

    def _rank_last(self, branch: Branch, now: float) -> None:
        """What hung on the branch's last piece has changed."""
        if branch.pieces:
            self._order.rank(branch.pieces[-1], now)

    def _copy(self, piece: Piece, holders: set[int], now: float, like: Copy | None = None) -> Copy:
        """A copy of `piece`, with the history of `like`."""
        extent = PooledExtent(next(self._ids), "", piece.end - piece.start, now, now, end_block=piece.end)
        if like is not None:
            old = like.extent
            extent.session_id, extent.inserted_seconds, extent.freed_seconds = old.session_id, old.inserted_seconds, old.freed_seconds
            extent.num_hits, extent.fate, extent.truth = old.num_hits, old.fate, old.truth
            extent.return_class, extent.next_use_seconds = old.return_class, old.next_use_seconds
        copy = extent.copy = Copy(piece, extent, holders, like.freed if like is not None else now)
        if not holders:
            self._order.idle[extent.id] = copy
        return copy
