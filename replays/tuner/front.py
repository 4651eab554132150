"""What of the tried settings is worth a look: the Pareto front, and the one that is recommended."""

from __future__ import annotations

from collections.abc import Sequence

from replays.simulator.grid import BASELINE
from replays.tuner.search import DIRECTIONS, Tried, objectives
from replays.tuner.space import Setting

LEAST_THROUGHPUT = 0.995
"""Share of the baseline's requests a second that a recommended setting must keep: less is noise between seeds."""


def front(found: Sequence[Tried]) -> list[Tried]:
    """Those that no other beats in one figure without losing in another, the highest hit rate first; of equals the first tried."""
    signs = [1 if way == "maximize" else -1 for way in DIRECTIONS.values()]
    scores = [[sign * value for sign, value in zip(signs, objectives(one.point), strict=True)] for one in found]
    kept: list[Tried] = []
    seen: list[list[float]] = []
    for one, score in zip(found, scores, strict=True):
        if score not in seen and not any(_beats(other, score) for other in scores):
            seen.append(score)
            kept.append(one)
    return sorted(kept, key=lambda one: (-(one.point.hit_rate or 0.0), one.number))


def _beats(left: Sequence[float], right: Sequence[float]) -> bool:
    pairs = list(zip(left, right, strict=True))
    return all(ours >= theirs for ours, theirs in pairs) and any(ours > theirs for ours, theirs in pairs)


def baseline(found: Sequence[Tried]) -> Tried:
    """What a plain engine does. It is always tried first."""
    return next(one for one in found if one.setting == Setting(BASELINE))


def winner(found: Sequence[Tried]) -> Tried:
    """The highest hit rate among those that keep the baseline's throughput; equal ones by TTFT p95."""
    least = LEAST_THROUGHPUT * baseline(found).point.requests_per_second
    able = [one for one in found if one.point.requests_per_second >= least]
    return max(able, key=lambda one: (one.point.hit_rate or 0.0, -(one.point.ttft_p95_seconds or 0.0), -one.number))
