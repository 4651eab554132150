"""A queue of extents that counts its blocks; the held keep their place in it, so that it can be told how full it is."""

from __future__ import annotations

from admission.eviction.policy import Extent
from admission.eviction.ranking import Ranking, by_depth


class Segment:
    """First in, first out. Sizes are in blocks, as of the last call that named the extent."""

    __slots__ = ("_blocks", "_free", "_next_place", "_places", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self._blocks: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._next_place = 0
        self._free = Ranking()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, extent: Extent) -> bool:
        return extent.id in self._places

    @property
    def num_free(self) -> int:
        return len(self._free)

    def append(self, extent: Extent) -> None:
        """Puts a free extent at the tail."""
        assert extent not in self
        self._places[extent.id] = self._next_place
        self._next_place += 1
        self.measure(extent)
        self.release(extent)

    def remove(self, extent: Extent) -> None:
        del self._places[extent.id]
        self.num_blocks -= self._blocks.pop(extent.id)
        self._free.discard(extent)

    def hold(self, extent: Extent) -> None:
        self._free.discard(extent)

    def release(self, extent: Extent) -> None:
        """It may be first again, at its old place."""
        self.measure(extent)
        self._free.put(extent, by_depth(extent, self._places[extent.id]))

    def measure(self, extent: Extent) -> None:
        """Some of its blocks may have left, or come."""
        self.num_blocks += extent.num_blocks - self._blocks.get(extent.id, 0)
        self._blocks[extent.id] = extent.num_blocks

    def first(self) -> Extent | None:
        return self._free.first()

    def check_integrity(self) -> None:
        self._free.check_integrity()
        assert self._blocks.keys() == self._places.keys()
        assert self.num_blocks == sum(self._blocks.values()) >= 0
