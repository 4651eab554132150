"""gdsf: smallest first by clock + uses × cost ÷ size, where the clock is the value of what left last.

Cherkasova's GreedyDual-Size-Frequency. A miss costs its blocks and a fixed part, so that small extents are worth more; with extents of
one size it is lfu with ageing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import EvictionPolicy, Extent, Knob, Pool
from admission.eviction.ranking import Ranking, by_depth


@dataclass(frozen=True, slots=True)
class GdsfParameters:
    fixed_cost_blocks: Annotated[float, Knob(0, 10_000, "what a miss costs beyond its blocks, in the prefill of so many blocks")] = 16.0


def gdsf(parameters: GdsfParameters, pool: Pool) -> EvictionPolicy:
    return _Gdsf(parameters)


class _Gdsf:
    __slots__ = ("_clock", "_hits", "_offered", "_parameters", "_ranking", "_values")

    def __init__(self, parameters: GdsfParameters) -> None:
        self._parameters = parameters
        self._clock = 0.0
        self._ranking = Ranking()
        self._values: dict[int, float] = {}
        self._hits: dict[int, int] = {}
        self._offered: Extent | None = None

    def insert(self, extent: Extent, now: float) -> None:
        self._value(extent)
        self._put(extent)

    def hold(self, extent: Extent, now: float) -> None:
        self._ranking.discard(extent)

    def release(self, extent: Extent, now: float) -> None:
        # Not every release is a use: a parent is let go when the deeper extent has left.
        if extent.num_hits > self._hits[extent.id]:
            self._value(extent)
        self._put(extent)

    def reconsider(self, extent: Extent, now: float) -> None:
        self._put(extent)

    def forget(self, extent: Extent, now: float) -> None:
        value = self._values.pop(extent.id)
        if extent is self._offered:
            self._clock = max(self._clock, value)
            self._offered = None
        del self._hits[extent.id]
        self._ranking.discard(extent)

    def to_evict(self, now: float) -> Extent | None:
        self._offered = self._ranking.first()
        return self._offered

    def check_integrity(self) -> None:
        self._ranking.check_integrity()
        assert len(self._ranking) <= len(self._values) == len(self._hits)

    def _value(self, extent: Extent) -> None:
        uses = 1 + extent.num_hits
        cost_by_size = 1 + self._parameters.fixed_cost_blocks / max(extent.num_blocks, 1)
        self._values[extent.id] = self._clock + uses * cost_by_size
        self._hits[extent.id] = extent.num_hits

    def _put(self, extent: Extent) -> None:
        self._ranking.put(extent, by_depth(extent, self._values[extent.id], extent.freed_seconds))
