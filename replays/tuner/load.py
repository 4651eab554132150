"""The load to search and to judge at: so many sessions that a plain engine loses a given part of its hits to eviction.

Where lru loses nothing every setting is as good, and what a search finds there is noise; far beyond, nothing helps. The sessions that are
held back may weigh more or less than those that are searched on, so each side has a load of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeAlias

from replays.simulator.grid import BASELINE, GridError
from replays.simulator.run import SimulationOptions
from replays.tuner.search import Progress, run_points
from replays.tuner.space import Setting

_GROWTH = 1.25
_MOST_TIMES = 16
"""The load that is looked at first, so often: what loses nothing there has nothing to be tuned for."""

Loses: TypeAlias = Callable[[int], bool]


def streams_that_lose(
    executor: Executor, base: SimulationOptions, points: float, seeds: Sequence[int], progress: Progress = lambda done, total: None
) -> int:
    """Sessions at a time at which lru without a tier loses nearest to `points` of the ceiling, mean over `seeds`.

    It looks from the concurrency of `base` on. Raises GridError where lru never loses so much.
    """
    gaps: dict[int, float] = {}

    def loses(streams: int) -> bool:
        if streams not in gaps:
            plain = Setting(BASELINE).on(replace(base, tier=None, loop=replace(base.loop, concurrency=streams)))
            (point,) = run_points(executor, [plain], seeds)
            gaps[streams] = point.gap_points or 0.0
            progress(len(gaps), len(gaps) + 1)
        return gaps[streams] >= points

    low, high = _bracket(loses, base.loop.concurrency)
    if high > _MOST_TIMES * base.loop.concurrency:
        raise GridError(f"lru loses less than {points:g} points with {low} sessions at a time: there is nothing to tune for")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if loses(middle) else (middle, high)
    return min((streams for streams in (low, high) if streams), key=lambda streams: (abs(gaps.get(streams, math.inf) - points), streams))


def _bracket(loses: Loses, streams: int) -> tuple[int, int]:
    """(a load that loses less or 0, one that loses as much or is too large to look at)."""
    if not loses(streams):
        low, most = streams, _MOST_TIMES * streams
        while (high := math.ceil(low * _GROWTH)) <= most and not loses(high):
            low = high
        return low, high
    high = streams
    while (low := int(high / _GROWTH)) and loses(low):
        high = low
    return low, high
