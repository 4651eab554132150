"""class_hazard: dead first, then the session that is expected back last, by the return times of its class.

One queue for the dead and one for each class, longest idle first: inside a class the chance of return only falls with idle time, so
that the heads alone are compared, O(classes) a victim. They are compared by the mean time until the return, counted as at most
`horizon_seconds` (those that never come count as the horizon); as the horizon shrinks this becomes the order by hazard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Fate, Knob, Pool, ReturnHazard
from admission.eviction.ranking import Rank, Ranking

_STALE_SHARE = 0.05
"""A head's place is computed anew when its idle time has grown by this much: chances of return change with the logarithm of the age."""


@dataclass(frozen=True, slots=True)
class ClassHazardParameters:
    horizon_seconds: Annotated[float, Knob(1, 86_400, "how far ahead returns are told apart", log=True)] = 90.0


def class_hazard(parameters: ClassHazardParameters, pool: Pool) -> EvictionPolicy:
    assert pool.returns is not None
    return _ClassHazard(parameters, pool.returns)


class _ClassHazard:
    __slots__ = ("_dead", "_live", "_parameters", "_places", "_queues", "_returns")

    def __init__(self, parameters: ClassHazardParameters, returns: ReturnHazard) -> None:
        self._parameters = parameters
        self._returns = returns
        self._dead = Ranking()
        self._live: dict[str, Ranking] = {}
        self._places: dict[str, tuple[Extent, float, float, Rank]] = {}
        """Class → its head, since when that is idle, until when its place is good, and the place."""
        self._queues: dict[int, tuple[Ranking, str | None]] = {}

    def insert(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def hold(self, extent: Extent, now: float) -> None:
        self._drop(extent)

    def release(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def reconsider(self, extent: Extent, now: float) -> None:
        self._drop(extent)
        self._put(extent)

    def forget(self, extent: Extent, now: float) -> None:
        self._drop(extent)

    def to_evict(self, now: float) -> Extent | None:
        dead = self._dead.first()
        if dead is not None:
            return dead
        heads = [head for queue in self._live.values() if (head := queue.first()) is not None]
        return min(heads, key=lambda extent: self._place(extent, now), default=None)

    def check_integrity(self) -> None:
        for ranking in (self._dead, *self._live.values()):
            ranking.check_integrity()
        assert sum(map(len, (self._dead, *self._live.values()))) == len(self._queues)
        assert all(self._live.values())

    def _place(self, extent: Extent, now: float) -> Rank:
        """Where it stands among the heads, smallest first."""
        known = self._places.get(extent.return_class)
        if known is not None and known[0] is extent and known[1] == extent.freed_seconds and now < known[2]:
            return known[3]
        idle_seconds = max(now - extent.freed_seconds, 0.0)
        wait = self._returns.time_to_return(extent.return_class, idle_seconds, self._parameters.horizon_seconds)
        place = (-wait, extent.freed_seconds, -extent.end_block, extent.id)
        self._places[extent.return_class] = (extent, extent.freed_seconds, now + idle_seconds * _STALE_SHARE, place)
        return place

    def _put(self, extent: Extent) -> None:
        name = None
        if extent.fate is not Fate.LIVE:
            queue = self._dead
        else:
            name = extent.return_class
            live = self._live.get(name)
            queue = self._live[name] = Ranking() if live is None else live
        queue.put(extent, (extent.freed_seconds, -extent.end_block))
        self._queues[extent.id] = (queue, name)

    def _drop(self, extent: Extent) -> None:
        if extent.id in self._queues:
            queue, name = self._queues.pop(extent.id)
            queue.discard(extent)
            if name is not None and not queue:
                del self._live[name]
                self._places.pop(name, None)
