"""What the tuner wins on sessions that were held back, by what is told of ends and by tier; a part of the benchmark `simulator`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from replays.return_prior import CONTEXT_TOKENS
from replays.simulator.grid import ENDS
from replays.simulator.loop import LoopOptions
from replays.simulator.run import SimulationOptions
from replays.simulator.scripts import Script
from replays.simulator.tiers import TierOptions
from replays.tuner.front import whole, winner
from replays.tuner.judge import Judged, held_back_seeds, judge
from replays.tuner.load import streams_that_lose
from replays.tuner.search import open_study, processes, search, tried
from replays.tuner.space import space_of
from replays.tuner.split import split

TRIALS, SEEDS = 60, (1, 2, 3)
GAP_POINTS = 5.0
"""That LRU loses where the tuner searches and where its winner is judged."""

_TIER = TierOptions(1_500_000)
ARMS: dict[str, tuple[str, TierOptions | None]] = {
    "ends said": ("said", None),
    "ends said, exclusive tier of 1.5 M tokens": ("said", _TIER),
    "ends inferred": ("inferred", None),
    "ends inferred, exclusive tier of 1.5 M tokens": ("inferred", _TIER),
}


@dataclass(frozen=True, slots=True)
class TunedArm:
    """What the tuner chose for one arm, and what that came to on a held-back fifth of the sessions."""

    name: str
    setting: str
    seconds: float
    """Wall time of the search, without the judgement."""
    cpu_seconds: float
    """Of its simulations, over both processes."""
    num_settings: int
    num_whole: int
    """Of these, how many were simulated with every seed; the others fell behind on the first ones."""
    judged: Judged


def tuned_arms(
    scripts: Sequence[Script],
    capacity_tokens: int,
    streams: int,
    arms: Mapping[str, tuple[str, TierOptions | None]] = ARMS,
) -> Iterator[TunedArm]:
    """Each arm's search and judgement. The loads are LRU's, which no arm changes: they are looked for once, from `streams` on."""
    tuned, held_back = split(scripts, 0.2)
    space = space_of(("dead_first", "class_hazard", "ttl"), ("working_set",))
    base = SimulationOptions(capacity_tokens=capacity_tokens, context_tokens=CONTEXT_TOKENS, loop=LoopOptions(concurrency=streams))
    with processes(tuned, 2) as searching, processes(held_back, 2) as judging:
        searched_at = streams_that_lose(searching, base, GAP_POINTS, SEEDS)
        judged_at = streams_that_lose(judging, base, GAP_POINTS, held_back_seeds(SEEDS))
        for name, (ends, tier) in arms.items():
            at = replace(base, knowledge=ENDS[ends], tier=tier)
            study = open_study(None, name, space, SEEDS[0])
            started = time.perf_counter()
            cpu = search(study, space, _loaded(at, searched_at), SEEDS, TRIALS, searching, 2, lambda done, total: None)
            seconds = time.perf_counter() - started
            found = tried(study)
            setting = winner(found).setting
            (judged,) = judge(judging, _loaded(at, judged_at), setting, SEEDS, around=())
            yield TunedArm(name, str(setting), seconds, cpu, len(found), len(whole(found)), judged)


def _loaded(options: SimulationOptions, streams: int) -> SimulationOptions:
    return replace(options, loop=replace(options.loop, concurrency=streams))


def figures_of(arms: Sequence[TunedArm]) -> dict[str, object]:
    """The tuner's figures by arm."""
    return {
        "tuned_gap_closed_share": {arm.name: arm.judged.closed_share for arm in arms},
        "tuned_oracle_closed_share": {arm.name: arm.judged.oracle_closed_share for arm in arms},
        "tuned_throughput_ratio": {arm.name: arm.judged.throughput_ratio for arm in arms},
        "tuned_ttft_p95_ratio": {arm.name: arm.judged.ttft_p95_ratio for arm in arms},
        "tuned_setting": {arm.name: arm.setting for arm in arms},
        "tuned_seconds": {arm.name: arm.seconds for arm in arms},
        "tuned_cpu_seconds": {arm.name: arm.cpu_seconds for arm in arms},
        "tuned_settings": {arm.name: arm.num_settings for arm in arms},
        "tuned_settings_of_all_seeds": {arm.name: arm.num_whole for arm in arms},
        "tuned_lru_gap_points": {arm.name: arm.judged.baseline.gap_points for arm in arms},
        "tuned_streams": {arm.name: arm.judged.streams for arm in arms},
    }


def said_of(arm: TunedArm) -> str:
    """A line for the table's notes."""
    judged = arm.judged
    closed = "no gap" if judged.closed_share is None else f"{100 * judged.closed_share:.1f} %"
    oracle = "" if judged.oracle_closed_share is None else f" (the oracle's eviction alone {100 * judged.oracle_closed_share:.1f} %)"
    closed += f" of LRU's {judged.baseline.gap_points:.1f} points"
    throughput = "" if judged.throughput_ratio is None else f", throughput × {judged.throughput_ratio:.3f}"
    looked = f"{arm.num_settings} settings ({arm.num_whole} with every seed) in {arm.cpu_seconds:.0f} CPU s"
    return f"tuned, {arm.name}: closes {closed}{oracle}{throughput}, at {judged.streams} streams, by {arm.setting}; {looked}"
