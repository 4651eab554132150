"""Whether a turn was its session's last: the score, its levels, and what they do to the odds of an end."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import EvictionPolicy, Extent, Pool
from admission.last_turn import NUM_LEVELS, Course, TurnEnd
from admission.return_class import awaits_agent, split_level, with_level, with_tenant, with_tool
from admission.return_prior import LAST_TURN_CUTS, LAST_TURN_ODDS, LAST_TURN_WEIGHTS
from admission.returns import ReturnModel, ReturnParameters
from replays.return_prior import Idle, fit_last_turn, idle_times
from replays.session_ends import levels
from replays.traces import TraceSet

SAMPLE = Path(__file__).parents[1] / "replays" / "data" / "sample.jsonl"
TURN = TurnEnd(ends_turn=False, tools=("Bash",), num_prompt_tokens=40_000, num_output_tokens=300)


def _after(*ends: TurnEnd, gap: float = 5.0) -> Course:
    course = Course()
    for position, end in enumerate(ends):
        if position:
            course.came_back(gap)
        course.turn_ended(end)
    return course


def test_long_answers_and_a_large_context_are_followed_by_an_end_more_often_than_a_pause_or_a_beginning() -> None:
    assert len(LAST_TURN_WEIGHTS) == len(Course().facts(None))
    assert list(LAST_TURN_CUTS) == sorted(LAST_TURN_CUTS)
    assert len(LAST_TURN_ODDS) == len(LAST_TURN_CUTS) + 1 == NUM_LEVELS
    usual = _after(*[TURN] * 10).level(0.2)
    likely = replace(TURN, ends_turn=True, tools=(), num_prompt_tokens=180_000, num_output_tokens=4000)
    assert usual is not None
    assert _after(*[likely] * 10).level(0.7) == NUM_LEVELS - 1 > usual
    assert _after(TURN).level(0.2) == 0 < usual
    assert (_after(*[TURN] * 10, gap=300.0).level(0.2) or 0) < usual


def test_a_turn_without_a_known_prompt_has_no_level_and_is_no_turn() -> None:
    course = _after(TURN, TURN)
    known = course.facts(0.2)
    course.turn_ended(TurnEnd(ends_turn=False))
    assert course.level(0.2) is None
    course.came_back(5.0)
    course.turn_ended(replace(TURN, num_prompt_tokens=41_000))
    growth = course.facts(0.2)[7]
    assert growth == pytest.approx(math.log1p(1.0)), "of the prompt, since the one that was known"
    assert course.facts(0.2)[11] > known[11]


def test_a_level_stands_before_any_class() -> None:
    for name in ("root/tool", with_tenant(with_tool("root/tool:slow", ["Task"]), "a~3"), "never/seen:before"):
        assert split_level(with_level(name, 5)) == (name, 5)
        assert split_level(with_level(name, None)) == (name, None) == split_level(name)
        assert awaits_agent(with_level(name, 5)) == awaits_agent(name)


def test_a_level_changes_the_odds_of_an_end_and_not_when_the_others_return() -> None:
    model = ReturnModel()
    for name in ("root/end_turn:slow", "root/tool", with_tenant("root/tool", "acme")):
        plain = model.alive(name, 120.0)
        for level, factor in enumerate(LAST_TURN_ODDS):
            alive = model.alive(with_level(name, level), 120.0)
            assert (1 - alive) / alive == pytest.approx(factor * (1 - plain) / plain, rel=1e-2)
            assert model.quantile(with_level(name, level), 0.9) == pytest.approx(model.quantile(name, 0.9), rel=1e-2)


def test_what_a_level_sees_is_learnt_of_its_class_and_forgotten_with_its_tenant() -> None:
    model = ReturnModel(ReturnParameters(max_tenants=1))
    name = model.class_for("acme", "root/tool", 0.0)
    before = model.quantile(with_level(name, 0), 0.5)
    for _ in range(500):
        model.came_back(with_level(name, 6), 500.0, 0.0)
    assert before < 60 < 400 < model.quantile(with_level(name, 0), 0.5)
    common = model.quantile(with_level("root/tool", 0), 0.5)
    model.class_for("other", "root/tool", 0.0)
    assert model.quantile(with_level(name, 0), 0.5) == pytest.approx(common)


def _idles(rng: random.Random, number: int) -> list[Idle]:
    """Idle times of more than a minute; after long answers half of the sessions are over, after short ones hardly any."""
    template = next(iter(idle_times(next(iter(TraceSet(SAMPLE))).root)))
    idles = []
    for _ in range(number):
        num_output = int(10 ** rng.uniform(1, 4))
        is_over = rng.random() < (0.5 if num_output > 1000 else 0.02)
        course = _after(TURN, TURN, replace(TURN, num_output_tokens=num_output))
        idles.append(replace(template, gap_seconds=None if is_over else rng.uniform(61, 900), signs=course.facts(0.2), level=0))
    return idles


def test_the_fit_finds_what_precedes_ends_and_its_factors_are_calibrated() -> None:
    rng = random.Random(4)
    prior = {name: ([0] * 20 + [10] * 20 + [0] * 6, 70) for name in ("root/tool", "root/end_turn", "root/unknown")}
    model = ReturnModel(prior=prior)
    last = fit_last_turn(_idles(rng, 1600), model)
    actual: list[list[bool]] = [[] for _ in last.odds]
    for idle in _idles(rng, 1600):
        score = sum(sign * weight for sign, weight in zip(idle.signs, last.weights, strict=True))
        actual[sum(score > cut for cut in last.cuts)].append(idle.gap_seconds is None)
    alive = model.alive(next(iter(idle_times(next(iter(TraceSet(SAMPLE))).root))).pace_class, 60.0)
    for factor, ends in zip(last.odds, actual, strict=True):
        odds = factor * (1 - alive) / alive
        assert odds / (1 + odds) == pytest.approx(sum(ends) / len(ends), abs=0.12)
    assert sum(actual[0]) < len(actual[0]) / 10
    assert sum(actual[-1]) > len(actual[-1]) / 3


def test_the_calibration_of_levels_counts_who_was_idle_for_a_minute() -> None:
    template = _idles(random.Random(1), 1)[0]
    gaps = [10.0, 100.0, 100.0, 100.0, None]
    (_, row) = levels([replace(template, gap_seconds=gap, level=3) for gap in gaps], ReturnModel()).splitlines()
    assert row.split()[:2] == ["3", "4"]
    assert row.split()[-2:] == ["25.0", "%"]


class _Waits:
    """Return times that a test sets: by class, and growing with the idle time."""

    def __init__(self, waits: dict[str, float], growth: dict[str, float]) -> None:
        self.waits, self.growth = waits, growth

    def hazard(self, return_class: str, idle_seconds: float) -> float:
        return 1 / self.time_to_return(return_class, idle_seconds, math.inf)

    def time_to_return(self, return_class: str, idle_seconds: float, horizon_seconds: float) -> float:
        return self.waits[return_class] + self.growth.get(return_class, 0.0) * idle_seconds

    def returned_share(self, return_class: str, idle_seconds: float) -> float:
        return 0.5


def _class_hazard(waits: dict[str, float], **growth: float) -> EvictionPolicy:
    return EVICTION_POLICIES["class_hazard"].build(Pool(1000, _Waits(waits, growth)), {})


@pytest.mark.parametrize("seed", range(5))
def test_the_victim_is_the_longest_idle_of_the_class_that_is_expected_back_last_after_any_changes(seed: int) -> None:
    rng = random.Random(seed)
    waits = {with_level(name, level): rng.uniform(1, 100) for name in ("root/tool", "root/end_turn") for level in range(NUM_LEVELS)}
    policy = _class_hazard(waits)
    idle: dict[int, Extent] = {}
    held: list[Extent] = []
    for now in range(600):
        if held and rng.random() < 0.4:
            extent = held.pop(rng.randrange(len(held)))
            extent.freed_seconds, extent.return_class = float(now), rng.choice(list(waits))
            policy.release(extent, now)
            idle[extent.id] = extent
        elif idle and rng.random() < 0.6:
            extent = idle.pop(rng.choice(list(idle)))
            held.append(extent)
            policy.hold(extent, now)
        else:
            extent = idle[now] = Extent(now, str(now), 1, float(now), float(now), return_class=rng.choice(list(waits)))
            policy.insert(extent, now)
        if rng.random() < 0.5:
            policy.check_integrity()
            expected = min(idle.values(), key=lambda extent: (-waits[extent.return_class], extent.freed_seconds), default=None)
            assert policy.to_evict(now) is expected


def test_a_head_is_placed_anew_as_it_ages() -> None:
    policy = _class_hazard({"ages": 10.0, "stays": 50.0}, ages=1.0)
    ages, stays = (Extent(number, name, 1, 0.0, 0.0, return_class=name) for number, name in enumerate(("ages", "stays")))
    for extent in (ages, stays):
        policy.insert(extent, 0.0)
    assert policy.to_evict(20.0) is stays
    assert policy.to_evict(60.0) is ages
