"""Simulated time: things that happen at a moment, in order of time, then of rank, then of when they were planned."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum


class Rank(IntEnum):
    """Of things at the same moment, which comes first."""

    STEP_END = 0
    TRANSFER = 1
    ARRIVAL = 2
    TICK = 3


class Clock:
    """`now` in seconds; `run` makes what was planned happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._planned: list[tuple[float, int, int, bool, Callable[[], None]]] = []
        self._sequence = 0
        self._num_awaited = 0

    def at(self, time: float, do: Callable[[], None], rank: Rank = Rank.ARRIVAL, *, awaited: bool = True) -> None:
        """Plan `do` for `time`, or for now where that has passed. What is not `awaited` keeps nothing going: it may never come."""
        self._sequence += 1
        self._num_awaited += awaited
        heapq.heappush(self._planned, (max(time, self.now), rank, self._sequence, awaited, do))

    def run(self) -> None:
        """Until nothing is awaited or `stopped` is set."""
        while self._num_awaited and not self.stopped:
            self.now, _, _, awaited, do = heapq.heappop(self._planned)
            self._num_awaited -= awaited
            do()
