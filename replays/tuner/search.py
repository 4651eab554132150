"""The search: Optuna proposes settings, processes simulate them with every seed, a journal keeps what is known.

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
from replays.tuner.space import Setting, Space, setting_of

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import Trial

DIRECTIONS = {"hit_rate": "maximize", "ttft_p95_seconds": "minimize", "requests_per_second": "maximize", "preemptions": "minimize"}
"""Figures of a point that are searched for, and which way is better."""
_STUDY = "agentserve"
_WORST_SECONDS = 1e6

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting and what it came to, over all seeds."""

    number: int
    setting: Setting
    point: PointReport


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
    sampler = TPESampler(seed=seed, n_startup_trials=len(space.policies) + 6)
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
    return study


@dataclass(slots=True)
class _Open:
    """A trial whose seeds are being simulated."""

    trial: Trial
    reports: list[SimulationReport] = field(default_factory=list)


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
    num_done = len(tried(study))
    progress(num_done, num_trials)
    num_asked = num_done
    queue: deque[tuple[int, SimulationOptions]] = deque()
    running: dict[Future[SimulationReport], int] = {}
    trials: dict[int, _Open] = {}
    while num_done < num_trials:
        while len(running) < jobs and (queue or num_asked < num_trials):
            if not queue:
                trial = study.ask()
                num_asked += 1
                trials[trial.number] = _Open(trial)
                options = space.suggest(trial).on(base)
                queue.extend((trial.number, replace(options, loop=replace(options.loop, seed=seed))) for seed in seeds)
            number, options = queue.popleft()
            running[executor.submit(simulate_shared, options)] = number
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            number = running.pop(future)
            trials[number].reports.append(future.result())
            if len(trials[number].reports) == len(seeds):
                _tell(study, trials.pop(number))
                num_done += 1
                progress(num_done, num_trials)


def _tell(study: Study, done: _Open) -> None:
    point = joined(sorted(done.reports, key=lambda report: report.seed))
    done.trial.set_user_attr("point", msgspec.json.encode(point).decode())
    study.tell(done.trial, objectives(point))


def objectives(point: PointReport) -> list[float]:
    """The figures of `DIRECTIONS`. A load under which nothing ended is the worst there is."""
    ttft = point.ttft_p95_seconds
    return [point.hit_rate or 0.0, _WORST_SECONDS if ttft is None else ttft, point.requests_per_second, point.preemptions]


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
    futures = [[executor.submit(simulate_shared, replace(one, loop=replace(one.loop, seed=seed))) for seed in seeds] for one in settings]
    points = []
    for number, row in enumerate(futures, start=1):
        points.append(joined([future.result() for future in row]))
        progress(number, len(settings))
    return points
