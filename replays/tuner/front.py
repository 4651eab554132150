"""What of the tried settings is worth a look: the Pareto front, and the one that is recommended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from replays.simulator.grid import BASELINE, PointReport
from replays.tuner.space import Setting

DIRECTIONS = {"hit_rate": "maximize", "ttft_p95_seconds": "minimize", "requests_per_second": "maximize", "preemptions": "minimize"}
"""Figures of a point that are searched for, and which way is better."""
LEAST_THROUGHPUT = 0.995
"""Share of the baseline's requests a second that a recommended setting must keep: less is noise between seeds."""

_WORST_SECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting and what it came to: over all seeds of the search, or over the first of them, where it fell behind."""

    number: int
    setting: Setting
    point: PointReport
    by_seed: Sequence[PointReport] = field(default_factory=list)
    """The same seed by seed, and those with which finalists are played once more behind them."""


def objectives(point: PointReport) -> list[float]:
    """The figures of `DIRECTIONS`. A load under which nothing ended is the worst there is."""
    ttft = point.ttft_p95_seconds
    return [point.hit_rate or 0.0, _WORST_SECONDS if ttft is None else ttft, point.requests_per_second, point.preemptions]


def front(found: Sequence[Tried]) -> list[Tried]:
    """Those that no other beats in one figure without losing in another, the highest hit rate first; of equals the first tried.

    Who fell behind on its first seed is not among them: its figures would not compare.
    """
    found = whole(found)
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
    """The smallest gap to the ceiling with its doubt, among those that keep the baseline's throughput; equal ones by hit rate and TTFT.

    Not the hit rate itself: an engine that is faster gets to other turns in the same time, and their ceiling is another. Where finalists
    were played once more it is one of them: the best of many is best by luck too, and fresh seeds know nothing of that.
    """
    return ranked(found)[0]


def ranked(found: Sequence[Tried]) -> list[Tried]:
    """Those that `winner` chooses from, the best first."""
    plain = baseline(found)
    able = [one for one in whole(found) if len(one.by_seed) == len(plain.by_seed) and keeps_throughput(one, plain)]
    return sorted(able, key=lambda one: _merit(one, plain), reverse=True)


def keeps_throughput(one: Tried, plain: Tried, least: float = LEAST_THROUGHPUT) -> bool:
    """Over the seeds that both were played with."""
    pairs = list(zip(one.by_seed, plain.by_seed, strict=False)) or [(one.point, plain.point)]
    return sum(mine.requests_per_second for mine, _ in pairs) >= least * sum(theirs.requests_per_second for _, theirs in pairs)


def gap_left(one: Tried, plain: Tried) -> float:
    """Share of the baseline's gap that it leaves on the seeds that both were played with, and how far this may be off by chance.

    Seeds are paired: one that is harder for all says nothing of a setting. Points, where nobody knows the seeds or the baseline has no gap.
    """
    pairs = [(mine.gap_points or 0.0, theirs.gap_points or 0.0) for mine, theirs in zip(one.by_seed, plain.by_seed, strict=False)]
    pairs = pairs or [(one.point.gap_points or 0.0, 0.0)]
    mine, theirs = (fmean(side) for side in zip(*pairs, strict=True))
    if not theirs:
        return mine
    left = [gap / base for gap, base in pairs if base]
    return mine / theirs + (stdev(left) / len(left) ** 0.5 if len(left) > 1 else 0.0)


def _merit(one: Tried, plain: Tried) -> tuple[float, float, float, int]:
    point = one.point
    return -gap_left(one, plain), point.hit_rate or 0.0, -(point.ttft_p95_seconds or 0.0), -one.number


def whole(found: Sequence[Tried]) -> list[Tried]:
    """Those that were simulated with every seed, as the baseline was."""
    seeds = baseline(found).point.seeds
    return [one for one in found if one.point.seeds == seeds]
