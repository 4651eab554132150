"""sieve: in order of arrival, sparing once what was hit; the hand stays among old extents, so that new tails are what it meets.

Zhang et al., NSDI '24. The extents ahead of the hand and those behind it are two queues: the hand's step is to move the first of one to the
other, and when none is ahead it starts again at the oldest.
"""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Extent, Pool
from admission.eviction.ranking import Ranking


@dataclass(frozen=True, slots=True)
class SieveParameters:
    pass


def sieve(parameters: SieveParameters, pool: Pool) -> EvictionPolicy:
    return _Sieve()


class _Sieve:
    __slots__ = ("_ahead", "_behind", "_hand", "_hits", "_next_place", "_places", "_visited")

    def __init__(self) -> None:
        self._ahead = Ranking()
        self._behind = Ranking()
        self._hand = 0
        self._next_place = 0
        self._places: dict[int, int] = {}
        self._hits: dict[int, int] = {}
        self._visited: set[int] = set()

    def insert(self, extent: Extent, now: float) -> None:
        self._places[extent.id] = self._next_place
        self._next_place += 1
        self._hits[extent.id] = extent.num_hits
        self._put(extent)

    def hold(self, extent: Extent, now: float) -> None:
        self._ahead.discard(extent)
        self._behind.discard(extent)

    def release(self, extent: Extent, now: float) -> None:
        if extent.num_hits > self._hits[extent.id]:
            self._hits[extent.id] = extent.num_hits
            self._visited.add(extent.id)
        self._put(extent)

    def reconsider(self, extent: Extent, now: float) -> None:
        """Its facts do not count here."""

    def forget(self, extent: Extent, now: float) -> None:
        self.hold(extent, now)
        del self._places[extent.id], self._hits[extent.id]
        self._visited.discard(extent.id)
        if not self._ahead:
            self._turn_round()

    def to_evict(self, now: float) -> Extent | None:
        if not self._ahead:
            self._turn_round()
        while (extent := self._ahead.first()) is not None:
            self._hand = self._places[extent.id]
            if extent.id not in self._visited:
                return extent
            self._visited.remove(extent.id)
            self._ahead.discard(extent)
            self._behind.put(extent, (self._places[extent.id],))
            if not self._ahead:
                self._turn_round()
        return None

    def check_integrity(self) -> None:
        self._ahead.check_integrity()
        self._behind.check_integrity()
        assert len(self._ahead) + len(self._behind) <= len(self._places) == len(self._hits)
        assert self._visited <= self._places.keys()

    def _turn_round(self) -> None:
        self._ahead, self._behind = self._behind, self._ahead
        self._hand = 0

    def _put(self, extent: Extent) -> None:
        place = self._places[extent.id]
        (self._ahead if place >= self._hand else self._behind).put(extent, (place,))
