"""class_hazard: dead first, then the session that is expected back last, by the return times of its class.

One queue for the dead and one for each class and level of `admission.last_turn`, longest idle first: inside a class the chance of return
only falls with idle time, so that the heads alone are compared. They are compared by the mean time until the return, counted as at most
`horizon_seconds` (those that never come count as the horizon); as the horizon shrinks this becomes the order by hazard. A head is placed
among the others when it becomes one and now and then as it ages, so that a victim costs O(log classes), however many levels there are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Fate, Knob, Pool, ReturnHazard
from admission.eviction.ranking import Ranking, by_depth

_STALE_SHARE = 0.05
"""A head's place is computed anew when its idle time has grown by this much: chances of return change with the logarithm of the age."""


@dataclass(frozen=True, slots=True)
class ClassHazardParameters:
    horizon_seconds: Annotated[float, Knob(1, 86_400, "how far ahead returns are told apart", log=True)] = 150.0


def class_hazard(parameters: ClassHazardParameters, pool: Pool) -> EvictionPolicy:
    assert pool.returns is not None
    return _ClassHazard(parameters, pool.returns)


class _ClassHazard:
    __slots__ = ("_changed", "_dead", "_heads", "_live", "_order", "_parameters", "_queues", "_returns", "_stale")

    def __init__(self, parameters: ClassHazardParameters, returns: ReturnHazard) -> None:
        self._parameters = parameters
        self._returns = returns
        self._dead = Ranking()
        self._live: dict[str, Ranking] = {}
        self._heads: dict[str, tuple[Extent, float]] = {}
        """Class → its head as it was placed, and since when that was idle."""
        self._order = Ranking()
        """The heads by place."""
        self._stale = Ranking()
        """The heads by when their place is computed anew."""
        self._changed: set[str] = set()
        """Classes whose head may be another."""
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
        for name in self._changed:
            self._look(name, now)
        self._changed.clear()
        while (due := self._stale.first_rank()) is not None and due[0] <= now:
            stale = self._stale.first()
            assert stale is not None
            self._place(stale, now)
        return self._order.first()

    def check_integrity(self) -> None:
        for ranking in (self._dead, self._order, self._stale, *self._live.values()):
            ranking.check_integrity()
        assert sum(map(len, (self._dead, *self._live.values()))) == len(self._queues)
        assert all(self._live.values())
        assert len(self._order) == len(self._stale) == len(self._heads)
        assert self._live.keys() - self._heads.keys() <= self._changed
        assert all(head in self._live[name] for name, (head, _) in self._heads.items())

    def _look(self, name: str, now: float) -> None:
        """Who leads this class now is placed, unless it was."""
        queue = self._live.get(name)
        head = None if queue is None else queue.first()
        known = self._heads.get(name)
        if head is None or (known is not None and known[0] is head and known[1] == head.freed_seconds):
            return
        if known is not None:
            self._displace(known[0])
        self._heads[name] = (head, head.freed_seconds)
        self._place(head, now)

    def _place(self, head: Extent, now: float) -> None:
        """Where it stands among the heads, smallest first, and until when."""
        idle_seconds = max(now - head.freed_seconds, 0.0)
        wait = self._returns.time_to_return(head.return_class, idle_seconds, self._parameters.horizon_seconds)
        self._order.put(head, (-wait, head.freed_seconds, -head.end_block, head.id))
        self._stale.put(head, (max(now + idle_seconds * _STALE_SHARE, math.nextafter(now, math.inf)),))

    def _displace(self, head: Extent) -> None:
        self._order.discard(head)
        self._stale.discard(head)

    def _put(self, extent: Extent) -> None:
        name = None
        if extent.fate is not Fate.LIVE:
            queue = self._dead
        else:
            name = extent.return_class
            queue = self._live.setdefault(name, Ranking())
            self._changed.add(name)
        queue.put(extent, by_depth(extent, extent.freed_seconds))
        self._queues[extent.id] = (queue, name)

    def _drop(self, extent: Extent) -> None:
        if extent.id not in self._queues:
            return
        queue, name = self._queues.pop(extent.id)
        queue.discard(extent)
        if name is None:
            return
        if name in self._heads and self._heads[name][0] is extent:
            self._displace(extent)
            del self._heads[name]
            self._changed.add(name)
        if not queue:
            del self._live[name]
            self._changed.discard(name)
