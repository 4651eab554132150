"""The winner on sessions that the search has not seen: beside the baseline and the oracle, at the load of the search and around it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

from msgspec import Struct

from replays.simulator.grid import BASELINE, PointReport, closed_share
from replays.simulator.run import SimulationOptions
from replays.tuner.search import Progress, run_points
from replays.tuner.space import ORACLE, Setting

LOADS = (0.75, 0.9, 1.1, 1.25)
"""Sessions at a time around the load of the search, as shares of it."""
_NEW_SEEDS = 1000


def held_back_seeds(seeds: Sequence[int]) -> list[int]:
    """Held-back runs draw other orders than the search did."""
    return [seed + _NEW_SEEDS for seed in seeds]


class Judged(Struct, kw_only=True):
    """One load. `closed_share` is of the gap that the baseline leaves without a tier; None where it leaves none to speak of."""

    streams: int
    capacity_tokens: int
    baseline: PointReport
    winner: PointReport
    oracle: PointReport | None
    """At the load of the search only."""
    closed_share: float | None
    oracle_closed_share: float | None
    throughput_ratio: float | None
    ttft_p95_ratio: float | None


def judge(
    executor: Executor,
    base: SimulationOptions,
    setting: Setting,
    seeds: Sequence[int],
    progress: Progress = lambda done, total: None,
    *,
    around: Sequence[float] = LOADS,
) -> list[Judged]:
    """One row a load, that of `base` first, then the shares `around` it. `executor` has the held-back sessions."""
    streams = base.loop.concurrency
    loads = list(dict.fromkeys([streams, *(max(1, round(share * streams)) for share in around)]))
    wanted: list[SimulationOptions] = []
    for load in loads:
        at = replace(base, loop=replace(base.loop, concurrency=load))
        wanted += [Setting(BASELINE).on(replace(at, tier=None)), setting.on(at)]
    wanted.append(Setting(ORACLE).on(base))
    *points, oracle = run_points(executor, wanted, held_back_seeds(seeds), progress)
    return [_judged(points[2 * place], points[2 * place + 1], oracle if place == 0 else None) for place in range(len(loads))]


def _judged(plain: PointReport, tuned: PointReport, oracle: PointReport | None) -> Judged:
    return Judged(
        streams=plain.streams,
        capacity_tokens=plain.capacity_tokens,
        baseline=plain,
        winner=tuned,
        oracle=oracle,
        closed_share=closed_share(tuned.gap_points, plain.gap_points),
        oracle_closed_share=None if oracle is None else closed_share(oracle.gap_points, plain.gap_points),
        throughput_ratio=_ratio(tuned.requests_per_second, plain.requests_per_second),
        ttft_p95_ratio=_ratio(tuned.ttft_p95_seconds, plain.ttft_p95_seconds),
    )


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base
