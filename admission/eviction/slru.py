"""slru: what was hit again is protected up to a share of the pool, and the rest leaves first; lru inside both.

With `protected_share` 1 it is SGLang's slru. In a chain that only grows every block is hit one turn later, so that the bit tells new
tails from old ones, not the living from the dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Knob, Pool
from admission.eviction.segment import Segment


@dataclass(frozen=True, slots=True)
class SlruParameters:
    protected_share: Annotated[float, Knob(0.05, 1, "of the pool's blocks that may be protected")] = 0.5
    promoting_hits: Annotated[float, Knob(1, 8, "hits after which an extent is protected")] = 1.0


def slru(parameters: SlruParameters, pool: Pool) -> EvictionPolicy:
    return _Slru(parameters, pool.capacity_blocks)


class _Slru:
    __slots__ = ("_hits", "_parameters", "_probation", "_protected", "_room_blocks")

    def __init__(self, parameters: SlruParameters, capacity_blocks: int) -> None:
        self._parameters = parameters
        self._room_blocks = capacity_blocks * parameters.protected_share
        self._probation = Segment()
        self._protected = Segment()
        self._hits: dict[int, int] = {}

    def insert(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def hold(self, extent: Extent, now: float) -> None:
        self._segment(extent).hold(extent)

    def release(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def reconsider(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def forget(self, extent: Extent, now: float) -> None:
        self._segment(extent).remove(extent)
        del self._hits[extent.id]

    def to_evict(self, now: float) -> Extent | None:
        return self._probation.first() or self._protected.first()

    def check_integrity(self) -> None:
        self._probation.check_integrity()
        self._protected.check_integrity()

    def _segment(self, extent: Extent) -> Segment:
        return self._protected if extent in self._protected else self._probation

    def _put(self, extent: Extent) -> None:
        was_hit = extent.num_hits > self._hits.get(extent.id, 0)
        self._hits[extent.id] = extent.num_hits
        if extent in self._protected or (was_hit and extent.num_hits >= self._parameters.promoting_hits):
            if extent in self._probation:
                self._probation.remove(extent)
            self._protected.put(extent, extent.freed_seconds)
            self._demote()
        else:
            self._probation.put(extent, extent.freed_seconds)

    def _demote(self) -> None:
        while self._protected.num_blocks > self._room_blocks and (oldest := self._protected.first()) is not None:
            self._protected.remove(oldest)
            self._probation.put(oldest, oldest.freed_seconds)
