"""Blocks that requests at the engine have still to take: who is sent behind them finds the cache without the blocks that make room.

A request is looked up when it is scheduled, behind those that were sent before it. What they take until then no event has told of yet;
but how much it is follows from their prompts, and an engine that evicts by last use alone takes it from the blocks used the longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefix_cache.blocks import BlockHash
from prefix_cache.mirror import Mirror

_NUM_LATE_BATCHES = 16
"""After so many more, an answer's blocks that were not announced never will be."""

_NUM_BATCHES_UNTOUCHED = 16
"""In so few, blocks just used do not become those used the longest ago."""


@dataclass(slots=True, eq=False)
class Taker:
    """One request: the whole blocks that it uses or computes."""

    hashes: Sequence[BlockHash]
    num_blocks: int
    departures: tuple[int, ...]
    """The mirror's, when it was sent."""
    ended_at: int | None = None
    """The mirror's number of batches when it was over; None while it runs."""
    is_stored: bool = False
    """Whether events have told of all its blocks; while it runs they stay."""
    touched_at: int = -_NUM_BATCHES_UNTOUCHED
    """The mirror's number of batches when its blocks last counted as used."""


class Demand:
    """Requests at one engine, in the order in which they were sent. `num_blocks`: usable blocks of its pool."""

    def __init__(self, mirror: Mirror, num_blocks: int) -> None:
        self.block_size = mirror.block_size
        self._mirror = mirror
        self._num_blocks = num_blocks
        self._takers: dict[Taker, None] = {}

    def __len__(self) -> int:
        return len(self._takers)

    def begin(self, hashes: Sequence[BlockHash], num_blocks: int) -> Taker:
        """A request whose prompt has `num_blocks` whole blocks goes to the engine. Needs its `end`, whatever becomes of it."""
        taker = Taker(hashes, num_blocks, self._mirror.departures)
        self._takers[taker] = None
        return taker

    def end(self, taker: Taker, computed: Sequence[BlockHash] = (), num_blocks: int = 0) -> None:
        """The request is over, and has left the first `num_blocks` of `computed` behind; none if it broke off. Safe to call twice."""
        if taker.ended_at is not None or taker not in self._takers:
            return
        self._mirror.touch(taker.hashes, taker.num_blocks)
        if not num_blocks:
            del self._takers[taker]
            return
        self._mirror.touch(computed, num_blocks)
        taker.hashes, taker.num_blocks, taker.ended_at = computed[:num_blocks], num_blocks, self._mirror.num_applied_batches
        taker.is_stored = False  # what it generated may not have been announced

    def num_left(self, hashes: Sequence[BlockHash], num_matched: int) -> int:
        """How many of the first `num_matched` of `hashes`, which match now, still do for a request that is sent now."""
        if not num_matched or not self._takers:
            return num_matched
        num_taken = self._num_taken()
        if num_taken <= 0:
            return num_matched
        self._keep_running()
        return self._mirror.num_left(hashes, num_matched, num_taken)

    def _num_taken(self) -> int:
        """Blocks that hold something now, and go to the requests that were sent."""
        num_missing = num_open = 0
        for taker in list(self._takers):
            missing = 0 if taker.is_stored else taker.num_blocks - self._mirror.num_announced(taker.hashes, taker.num_blocks)
            if taker.ended_at is None:
                taker.is_stored = not missing
                num_missing += missing + 1 if missing else 0
                num_open += not missing  # the block that it writes to, which has no name yet
            elif missing and not self._is_over(taker, taker.ended_at):
                num_missing += missing
            else:
                del self._takers[taker]
        return num_missing - (self._num_blocks - self._mirror.num_held_blocks - num_open)

    def _keep_running(self) -> None:
        """What runs is not evicted, however long it has been running."""
        num_batches = self._mirror.num_applied_batches
        for taker in self._takers:
            if taker.ended_at is None and num_batches - taker.touched_at >= _NUM_BATCHES_UNTOUCHED:
                self._mirror.touch(taker.hashes, taker.num_blocks)
                taker.touched_at = num_batches

    def _is_over(self, taker: Taker, ended_at: int) -> bool:
        """Whether what is missing was announced and has left, its last block first, or will never be announced."""
        if self._mirror.num_applied_batches - ended_at >= _NUM_LATE_BATCHES:
            return True
        return self._mirror.removed_since(taker.hashes[taker.num_blocks - 1], taker.departures)
