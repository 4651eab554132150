"""The search: Optuna proposes settings, processes simulate them seed by seed, a journal keeps what is known.

At first every policy is tried as it is, and some settings at random, each with every seed. After that every second setting is a step from
the best so far, because Optuna itself looks for the whole front; and one that falls behind on its first seed, on which all play the same
sessions, is not simulated with the others.

A search that was broken off goes on from its journal. It is refused where the journal is of another workload or load: its figures would
not compare.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import optuna
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from replays.simulator.grid import GridError, PointReport, joined, share_scripts, simulate_shared
from replays.simulator.report import SimulationReport
from replays.simulator.run import SimulationOptions
from replays.simulator.scripts import Script
from replays.tuner.front import DIRECTIONS, baseline, objectives, winner
from replays.tuner.front import Tried as Tried
from replays.tuner.space import Setting, Space, setting_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

_STUDY = "agentserve-by-seed"
"""Journals of searches that knew nothing of single seeds have another name in them."""
_REACH = 0.7
"""Share of the best gain over the baseline that a setting must have on the first seed to be simulated with the others."""
_AT_RANDOM = 3
"""Settings before Optuna's model is asked."""
_MOST_REPEATS = 20
"""Proposals in a row that were tried before; then the space is taken to be small, and one is tried again."""

Progress: TypeAlias = Callable[[int, int], None]


@contextmanager
def processes(scripts: Sequence[Script], jobs: int) -> Iterator[Executor]:
    """Processes that have `scripts`, forked before anything else of the search exists."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=share_scripts, initargs=(scripts,)) as executor:
        yield executor


def open_study(journal: Path | None, context: str, space: Space, seed: int) -> Study:
    """The study in `journal` (None: in memory), made where it is not there yet. Raises GridError when it is of something else.

    `context` names workload, load and seeds: all that figures depend on besides the setting.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None if journal is None else JournalStorage(JournalFileBackend(str(journal)))
    sampler = TPESampler(seed=seed, n_startup_trials=_num_first(space))
    study = optuna.create_study(
        storage=storage, study_name=_STUDY, directions=list(DIRECTIONS.values()), sampler=sampler, load_if_exists=True
    )
    known = study.user_attrs.get("context")
    if known is None:
        study.set_user_attr("context", context)
        for values in space.first():
            study.enqueue_trial(values)
    elif known != context:
        raise GridError(f"{journal} is a search over something else ({known}); name another file with --study")
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)  # of a run that was broken off
        if trial.params:
            study.enqueue_trial(trial.params)
    return study


def _num_first(space: Space) -> int:
    """Settings that are simulated with every seed, whatever they come to."""
    return len(space.first()) + _AT_RANDOM


@dataclass(slots=True)
class _Open:
    """A trial whose seeds are being simulated."""

    trial: Trial
    options: SimulationOptions
    num_wanted: int
    """Seeds that were asked for so far."""
    reports: list[SimulationReport] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Search:
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
    firsts: dict[int, PointReport] = field(default_factory=dict)
    """Each trial's figures of the first seed alone."""

    def ask(self) -> None:
        """The next trial: its runs are in the queue. Changes state."""
        trial, setting = self._proposed()
        for _ in range(_MOST_REPEATS):
            if str(setting) not in self.known:
                break
            self.study.tell(trial, state=TrialState.PRUNED)
            trial, setting = self._proposed()
        is_first = self.num_asked < _num_first(self.space)
        self.known.add(str(setting))
        self.num_asked += 1
        self.open[trial.number] = _Open(trial, setting.on(self.base), 0)
        self._want(trial.number, len(self.seeds) if is_first else 1)

    def _proposed(self) -> tuple[Trial, Setting]:
        if self.num_asked >= _num_first(self.space) and self.num_asked % 2:
            step = Random(f"{self.seeds[0]}/{len(self.study.get_trials(deepcopy=False))}")
            self.study.enqueue_trial(self.space.near(winner(tried(self.study)).setting, step))
        trial = self.study.ask()
        return trial, self.space.suggest(trial)

    def _want(self, number: int, num_seeds: int) -> None:
        opened = self.open[number]
        more = self.seeds[opened.num_wanted : num_seeds]
        opened.num_wanted = num_seeds
        self.queue.extend((number, _with_seed(opened.options, seed)) for seed in more)

    def heard(self, number: int, report: SimulationReport) -> bool:
        """A run has ended; whether its trial has. Changes state."""
        opened = self.open[number]
        opened.reports.append(report)
        if report.seed == self.seeds[0]:
            self.firsts[number] = joined([report])
        if len(opened.reports) < opened.num_wanted:
            return False
        if opened.num_wanted < len(self.seeds) and self._keeps_up(number):
            self._want(number, len(self.seeds))
            return False
        self._tell(number, self.open.pop(number))
        return True

    def _keeps_up(self, number: int) -> bool:
        gaps = {other: first.gap_points for other, first in self.firsts.items() if first.gap_points is not None}
        plain, mine = gaps.get(baseline(tried(self.study)).number), gaps.get(number)
        if plain is None or mine is None:
            return True
        return plain - mine >= _REACH * (plain - min(gaps.values()))

    def _tell(self, number: int, done: _Open) -> None:
        point = joined(sorted(done.reports, key=lambda report: report.seed))
        values = objectives(point)
        if len(done.reports) < len(self.seeds):
            # One seed is harder than another: what the baseline has on all of them, over what it has on this one, is what this one lacks.
            plain = baseline(tried(self.study))
            missing = zip(objectives(plain.point), objectives(self.firsts[plain.number]), strict=True)
            values = [value + whole - first for value, (whole, first) in zip(values, missing, strict=True)]
        done.trial.set_user_attr("point", msgspec.json.encode(point).decode())
        done.trial.set_user_attr("first", msgspec.json.encode(self.firsts[number]).decode())
        self.study.tell(done.trial, values)


def _with_seed(options: SimulationOptions, seed: int) -> SimulationOptions:
    return replace(options, loop=replace(options.loop, seed=seed))


def search(
    study: Study,
    space: Space,
    base: SimulationOptions,
    seeds: Sequence[int],
    num_trials: int,
    executor: Executor,
    jobs: int,
    progress: Progress,
) -> None:
    """Try settings until the study has `num_trials` of them. Raises what a simulation raises."""
    before = tried(study)
    num_done = len(before)
    progress(num_done, num_trials)
    state = _Search(study, space, base, seeds, num_done, known={str(one.setting) for one in before}, firsts=_firsts(study))
    running: dict[Future[SimulationReport], int] = {}
    while num_done < num_trials:
        while len(running) < jobs and (state.queue or state.num_asked < num_trials):
            if not state.queue:
                state.ask()
            number, options = state.queue.popleft()
            running[executor.submit(simulate_shared, options)] = number
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            if state.heard(running.pop(future), future.result()):
                num_done += 1
                progress(num_done, num_trials)


def _firsts(study: Study) -> dict[int, PointReport]:
    known = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return {trial.number: msgspec.json.decode(trial.user_attrs["first"].encode(), type=PointReport) for trial in known}


def tried(study: Study) -> list[Tried]:
    """Everything that is known, in the order in which it was asked for."""
    found = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        point = msgspec.json.decode(trial.user_attrs["point"].encode(), type=PointReport)
        found.append(Tried(trial.number, setting_of(trial), point))
    return found


def run_points(
    executor: Executor, settings: Sequence[SimulationOptions], seeds: Sequence[int], progress: Progress = lambda done, total: None
) -> list[PointReport]:
    """Each of `settings` with every seed, joined."""
    futures = [[executor.submit(simulate_shared, _with_seed(one, seed)) for seed in seeds] for one in settings]
    points = []
    for number, row in enumerate(futures, start=1):
        points.append(joined([future.result() for future in row]))
        progress(number, len(settings))
    return points
