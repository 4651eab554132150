"""s3fifo: new extents wait in a small queue and leave from there unless they were hit; the demotion is too quick for new tails.

Yang et al., SOSP '23. What the small queue lets go is remembered by its session (extents are never the same again): a session that
comes back while it is remembered goes to the main queue at once. The main queue gives those that were hit another round, one for each
hit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Knob, Pool
from admission.eviction.segment import Segment

_MOST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class S3FifoParameters:
    small_share: Annotated[float, Knob(0.01, 0.9, "of the pool's blocks for the small queue")] = 0.1
    ghost_share: Annotated[float, Knob(0, 4, "of the pool's blocks that are remembered after they left the small queue")] = 0.9
    promoting_hits: Annotated[float, Knob(1, 3, "hits that take an extent from the small queue to the main one")] = 2.0


def s3fifo(parameters: S3FifoParameters, pool: Pool) -> EvictionPolicy:
    return _S3Fifo(parameters, pool.capacity_blocks)


class _S3Fifo:
    __slots__ = ("_counts", "_ghosts", "_has_evicted", "_hits", "_main", "_main_blocks", "_next_place", "_offered", "_offered_blocks",
                 "_parameters",
                 "_places", "_small", "_small_blocks")  # fmt: skip

    def __init__(self, parameters: S3FifoParameters, capacity_blocks: int) -> None:
        self._parameters = parameters
        self._small_blocks = int(capacity_blocks * parameters.small_share)
        self._main_blocks = capacity_blocks - self._small_blocks
        self._small = Segment()
        self._main = Segment()
        self._ghosts = _Ghosts(int(capacity_blocks * parameters.ghost_share))
        self._places: dict[int, int] = {}
        self._next_place = 0
        self._hits: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        self._offered: Extent | None = None
        self._offered_blocks = 0
        self._has_evicted = False

    def insert(self, extent: Extent, now: float) -> None:
        self._hits[extent.id] = extent.num_hits
        self._counts[extent.id] = 0
        remembered = self._ghosts.take(extent.session_id)
        self._ghosts.trim()
        warm = not self._has_evicted and self._small.num_blocks >= self._small_blocks
        self._append(self._main if remembered or warm else self._small, extent)

    def hold(self, extent: Extent, now: float) -> None:
        self._segment(extent).hold(extent)

    def release(self, extent: Extent, now: float) -> None:
        new_hits = extent.num_hits - self._hits[extent.id]
        self._hits[extent.id] = extent.num_hits
        self._counts[extent.id] = min(self._counts[extent.id] + new_hits, _MOST_ROUNDS)
        self._segment(extent).put(extent, self._places[extent.id])

    def reconsider(self, extent: Extent, now: float) -> None:
        self._segment(extent).measure(extent)

    def forget(self, extent: Extent, now: float) -> None:
        segment = self._segment(extent)
        if extent is self._offered:
            self._has_evicted = True
            if segment is self._small:
                self._ghosts.add(extent.session_id, self._offered_blocks)
            self._offered = None
        segment.remove(extent)
        del self._places[extent.id], self._hits[extent.id], self._counts[extent.id]

    def to_evict(self, now: float) -> Extent | None:
        if self._offered is not None:
            self._segment(self._offered).measure(self._offered)
        self._offered = self._next()
        self._offered_blocks = 0 if self._offered is None else self._offered.num_blocks
        return self._offered

    def _next(self) -> Extent | None:
        main_is_over = self._main.num_blocks > self._main_blocks
        queues = (self._from_main, self._from_small) if main_is_over else (self._from_small, self._from_main)
        return queues[0]() or queues[1]()

    def _from_small(self) -> Extent | None:
        while (extent := self._small.first()) is not None and self._counts[extent.id] >= self._parameters.promoting_hits:
            self._small.remove(extent)
            self._counts[extent.id] = 0
            self._append(self._main, extent)
        return extent

    def _from_main(self) -> Extent | None:
        while (extent := self._main.first()) is not None and self._counts[extent.id] > 0:
            self._counts[extent.id] -= 1
            self._append(self._main, extent)
        return extent

    def check_integrity(self) -> None:
        self._small.check_integrity()
        self._main.check_integrity()
        assert len(self._small) + len(self._main) == len(self._places) == len(self._hits) == len(self._counts)

    def _segment(self, extent: Extent) -> Segment:
        return self._main if extent in self._main else self._small

    def _append(self, segment: Segment, extent: Extent) -> None:
        self._places[extent.id] = self._next_place
        self._next_place += 1
        segment.put(extent, self._places[extent.id])


class _Ghosts:
    """Sessions that left the small queue, with the blocks that they had there; the oldest go when there are too many blocks."""

    __slots__ = ("_blocks", "_capacity_blocks", "_num_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._num_blocks = 0
        self._blocks: dict[str, int] = {}

    def add(self, session_id: str, num_blocks: int) -> None:
        if session_id in self._blocks:
            return
        self._blocks[session_id] = num_blocks
        self._num_blocks += num_blocks

    def take(self, session_id: str) -> bool:
        """Whether it was remembered; it no longer is."""
        num_blocks = self._blocks.pop(session_id, None)
        self._num_blocks -= num_blocks or 0
        return num_blocks is not None

    def trim(self) -> None:
        """Forgets the oldest beyond the capacity: after the newcomer was looked up, so that its own victims do not push it out."""
        while self._num_blocks > self._capacity_blocks:
            self.take(next(iter(self._blocks)))
