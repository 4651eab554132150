"""A part of the pool that counts its blocks: members by place, smallest first; the held count too, but cannot be first."""

from __future__ import annotations

from admission.eviction.policy import Extent
from admission.eviction.ranking import Ranking, by_depth


class Segment:
    """`num_blocks` is as of the last call that named each member."""

    __slots__ = ("_blocks", "_free", "num_blocks")

    def __init__(self) -> None:
        self.num_blocks = 0
        self._blocks: dict[int, int] = {}
        self._free = Ranking()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, extent: Extent) -> bool:
        return extent.id in self._blocks

    def put(self, extent: Extent, place: float) -> None:
        """It is a member, free, at `place`."""
        self.measure(extent)
        self._free.put(extent, by_depth(extent, place))

    def hold(self, extent: Extent) -> None:
        """It stays a member."""
        self._free.discard(extent)

    def remove(self, extent: Extent) -> None:
        self.num_blocks -= self._blocks.pop(extent.id)
        self._free.discard(extent)

    def measure(self, extent: Extent) -> None:
        """Some of its blocks may have left, or come."""
        self.num_blocks += extent.num_blocks - self._blocks.get(extent.id, 0)
        self._blocks[extent.id] = extent.num_blocks

    def first(self) -> Extent | None:
        return self._free.first()

    def check_integrity(self) -> None:
        self._free.check_integrity()
        assert len(self._free) <= len(self._blocks)
        assert self.num_blocks == sum(self._blocks.values()) >= 0
