"""The course of a search: which setting comes next, how many seeds it gets, and who is played once more with fresh ones.

It simulates nothing: `ask` and `ask_finalists` put runs into `queue`, and `heard` takes what each came to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

import msgspec
from optuna.trial import TrialState

from replays.simulator.grid import BASELINE, PointReport, joined
from replays.simulator.report import SimulationReport
from replays.simulator.run import SimulationOptions
from replays.tuner.front import Tried, baseline, gap_left, keeps_throughput, ranked
from replays.tuner.space import Setting, Space

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

_REACH = 0.8
"""Share of the best gain over the baseline that a setting must have on the seeds so far to be simulated with the next."""
_LEAST_THROUGHPUT = 0.97
"""Share of the baseline's, likewise: a seed has more noise than all of them."""
_LOST_THROUGHPUT = 10.0
"""What a share of throughput that is lacking counts as, in shares of the gap."""
_BEST = 3
"""Settings from which steps are taken."""
_FINALISTS = 4
_FRESH_SEEDS = 500
_MOST_REPEATS = 20
"""Proposals in a row that were tried before; then the space is taken to be small, and one is tried again."""


def num_first(space: Space) -> int:
    """Settings that Optuna's model is not asked for."""
    return len(space.first()) + len(space.known_good(BASELINE))


@dataclass(slots=True)
class _Open:
    """A trial that is being simulated, one seed after the other."""

    trial: Trial | None
    """None: a finalist, with fresh seeds."""
    setting: Setting
    seeds: Sequence[int]
    is_whole: bool
    """It is simulated with every seed, whatever it comes to."""
    points: list[PointReport] = field(default_factory=list)
    reports: list[SimulationReport] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Course:
    """What is asked for, and what has come."""

    study: Study
    space: Space
    base: SimulationOptions
    seeds: Sequence[int]
    num_asked: int
    queue: deque[tuple[int, SimulationOptions]] = field(default_factory=deque)
    open: dict[int, _Open] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Settings that were asked for."""
    found: list[Tried] = field(default_factory=list)
    """What is known of settings, those that are being simulated left out."""

    @property
    def _plain(self) -> Tried | None:
        """What the baseline came to, once that is known."""
        return next((one for one in self.found if one.setting == Setting(BASELINE)), None)

    def ask(self) -> None:
        """The next trial: its first run is in the queue. Changes state."""
        if self.num_asked == len(self.space.first()):
            for values in self.space.known_good(self._best_by_default()):
                self.study.enqueue_trial(values)
        trial, setting = self._proposed()
        for _ in range(_MOST_REPEATS):
            if str(setting) not in self.known:
                break
            self.study.tell(trial, state=TrialState.PRUNED)
            trial, setting = self._proposed()
        is_whole = self.num_asked < len(self.space.first())
        self.known.add(str(setting))
        self.num_asked += 1
        self.open[trial.number] = _Open(trial, setting, self.seeds, is_whole)
        self._want(trial.number)

    def ask_finalists(self) -> None:
        """The best and the baseline with fresh seeds, if they were not played with these before. Changes state."""
        plain = baseline(self.found)
        first = [replace(one, by_seed=one.by_seed[: len(self.seeds)]) for one in self.found]
        best = [one.number for one in ranked(first) if one.number != plain.number]
        finalists = {plain.number, *best[:_FINALISTS]}
        for one in self.found:
            if one.number in finalists and len(one.by_seed) == len(self.seeds):
                self.open[one.number] = _Open(None, one.setting, [seed + _FRESH_SEEDS for seed in self.seeds], is_whole=True)
                self._want(one.number)

    def _best_by_default(self) -> str:
        """The eviction policy of the best so far."""
        return ranked(self.found)[0].setting.policy if self._plain is not None else BASELINE

    def _proposed(self) -> tuple[Trial, Setting]:
        if self.num_asked >= num_first(self.space) and self.num_asked % 2 and self._plain is not None:
            step = Random(f"{self.seeds[0]}/{len(self.study.get_trials(deepcopy=False))}")
            best = step.choice(ranked(self.found)[:_BEST])
            self.study.enqueue_trial(self.space.near(best.setting, step))
        trial = self.study.ask()
        return trial, self.space.suggest(trial)

    def _want(self, number: int) -> None:
        opened = self.open[number]
        seed = opened.seeds[len(opened.points)]
        self.queue.append((number, with_seed(opened.setting.on(self.base), seed)))

    def heard(self, number: int, report: SimulationReport) -> bool:
        """A run has ended; whether its trial has. Changes state."""
        opened = self.open[number]
        opened.reports.append(report)
        opened.points.append(joined([report]))
        if len(opened.points) < len(opened.seeds) and (opened.is_whole or self._keeps_up(number, opened)):
            self._want(number)
            return False
        del self.open[number]
        if opened.trial is None:
            self._confirmed(number, opened)
        else:
            self._tell(opened.trial, opened)
        return True

    def _keeps_up(self, number: int, opened: _Open) -> bool:
        """Whether it may still be the best, as far as the seeds so far say."""
        played = len(opened.points)
        others = [one for one in self.found if len(one.by_seed) >= played]
        plain = self._plain
        if plain is None:
            return True
        mine = Tried(number, opened.setting, opened.points[0], opened.points)
        best = max(_gain(one.by_seed[:played], plain.by_seed) for one in others if keeps_throughput(one, plain, _LEAST_THROUGHPUT))
        return keeps_throughput(mine, plain, _LEAST_THROUGHPUT) and _gain(mine.by_seed, plain.by_seed) >= _REACH * best

    def _tell(self, trial: Trial, done: _Open) -> None:
        one = Tried(trial.number, done.setting, joined(done.reports), done.points)
        self.found = sorted((*self.found, one), key=lambda other: other.number)
        plain = self._plain or one
        trial.set_user_attr("point", msgspec.json.encode(one.point).decode())
        trial.set_user_attr("by_seed", msgspec.json.encode(done.points).decode())
        self.study.tell(trial, gap_left(one, plain) + _LOST_THROUGHPUT * _lacking(one, plain))

    def _confirmed(self, number: int, done: _Open) -> None:
        place = next(place for place, one in enumerate(self.found) if one.number == number)
        one = self.found[place] = replace(self.found[place], by_seed=[*self.found[place].by_seed, *done.points])
        self.study.set_user_attr(f"confirmed {number}", msgspec.json.encode(one.by_seed).decode())


def _gain(mine: Sequence[PointReport], plain: Sequence[PointReport]) -> float:
    """Points of the baseline's gap that are won, over the seeds of `mine`."""
    return sum((theirs.gap_points or 0.0) - (ours.gap_points or 0.0) for ours, theirs in zip(mine, plain, strict=False))


def _lacking(one: Tried, plain: Tried) -> float:
    """Share of the baseline's throughput."""
    pairs = list(zip(one.by_seed, plain.by_seed, strict=False))
    wanted = sum(theirs.requests_per_second for _, theirs in pairs)
    return max(0.0, 1.0 - sum(ours.requests_per_second for ours, _ in pairs) / wanted) if wanted else 0.0


def with_seed(options: SimulationOptions, seed: int) -> SimulationOptions:
    return replace(options, loop=replace(options.loop, seed=seed))
