"""The one ordered structure under the policies: extents by rank, smallest first, and the policies that a rank alone defines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import TypeAlias

from admission.eviction.policy import Extent

Rank: TypeAlias = tuple[float, ...]

_SLACK = 64


class Ranking:
    """A heap that deletes lazily: `put` and `discard` are O(log n) amortised, `first` too. An extent is in it at most once."""

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, Extent]] = []
        self._ranks: dict[int, Rank] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, extent: Extent) -> bool:
        return extent.id in self._ranks

    def put(self, extent: Extent, rank: Rank) -> None:
        """Ranks it, or ranks it anew."""
        if self._ranks.get(extent.id) == rank:
            return
        self._ranks[extent.id] = rank
        heapq.heappush(self._heap, (rank, extent.id, extent))
        if len(self._heap) > 4 * len(self._ranks) + _SLACK:
            self._heap = list({entry[1]: entry for entry in self._heap if self._ranks.get(entry[1]) == entry[0]}.values())
            heapq.heapify(self._heap)

    def discard(self, extent: Extent) -> None:
        self._ranks.pop(extent.id, None)

    def first(self) -> Extent | None:
        """The extent of smallest rank; of equals the one with the smaller id."""
        while self._heap:  # as in `_first`, which costs a call more for each victim
            rank, extent_id, extent = self._heap[0]
            if self._ranks.get(extent_id) == rank:
                return extent
            heapq.heappop(self._heap)
        return None

    def first_rank(self) -> Rank | None:
        entry = self._first()
        return None if entry is None else entry[0]

    def _first(self) -> tuple[Rank, int, Extent] | None:
        while self._heap:
            entry = self._heap[0]
            if self._ranks.get(entry[1]) == entry[0]:
                return entry
            heapq.heappop(self._heap)
        return None

    def check_integrity(self) -> None:
        live = {(rank, extent_id) for rank, extent_id, _ in self._heap if self._ranks.get(extent_id) == rank}
        assert len(live) == len(self._ranks)


def by_depth(extent: Extent, *rank: float) -> Rank:
    """`rank`, where of equals the deeper comes first."""
    return (*rank, -extent.end_block)


class RankedPolicy:
    """The policy that a rank alone defines. `rank(extent, now)` says when it goes, smallest first, and holds until the extent's facts
    change or `expiry(extent)` has passed, on the clock of `now`."""

    __slots__ = ("_expiries", "_expiry", "_rank", "_ranking")

    def __init__(self, rank: Callable[[Extent, float], Rank], expiry: Callable[[Extent], float] | None = None) -> None:
        self._rank = rank
        self._expiry = expiry
        self._ranking = Ranking()
        self._expiries = Ranking()

    def insert(self, extent: Extent, now: float) -> None:
        self._put(extent, now)

    def hold(self, extent: Extent, now: float) -> None:
        self._drop(extent)

    def release(self, extent: Extent, now: float) -> None:
        self._put(extent, now)

    def reconsider(self, extent: Extent, now: float) -> None:
        self._put(extent, now)

    def forget(self, extent: Extent, now: float) -> None:
        self._drop(extent)

    def to_evict(self, now: float) -> Extent | None:
        while (due := self._expiries.first_rank()) is not None and due[0] <= now:
            extent = self._expiries.first()
            assert extent is not None
            self._put(extent, now)
        return self._ranking.first()

    def check_integrity(self) -> None:
        self._ranking.check_integrity()
        self._expiries.check_integrity()
        assert len(self._expiries) <= len(self._ranking)

    def _put(self, extent: Extent, now: float) -> None:
        self._ranking.put(extent, by_depth(extent, *self._rank(extent, now)))
        if self._expiry is not None:
            expiry = self._expiry(extent)
            if now < expiry < math.inf:
                self._expiries.put(extent, (expiry,))
            else:
                self._expiries.discard(extent)

    def _drop(self, extent: Extent) -> None:
        self._ranking.discard(extent)
        self._expiries.discard(extent)
