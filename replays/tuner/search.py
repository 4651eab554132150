"""The search: Optuna proposes settings, processes simulate them seed by seed, a journal keeps what is known.

At first every policy is tried as it is, with every seed; then what the documentation recommends. After that every second setting is a step
from one of the best so far, the others are Optuna's. A setting that falls behind on the seeds so far, on which all play the same sessions,
is not simulated with the others: nor is one that costs throughput. At the end the best are played once more with fresh seeds, among which
the winner is chosen: so the luck of the draw, which the best of many always have, does not choose it.

A search that was broken off goes on from its journal. It is refused where the journal is of another workload or load: its figures would
not compare.
"""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
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
from replays.tuner.course import Course, num_first, with_seed
from replays.tuner.front import Tried as Tried
from replays.tuner.space import Space, setting_of

if TYPE_CHECKING:
    from optuna import Study

_STUDY = "agentserve-gap-left"
"""Journals of other searches have another name in them: their values were others."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # a space per policy needs `group`, in Optuna since 2.8
        sampler = TPESampler(seed=seed, n_startup_trials=num_first(space), multivariate=True, group=True, constant_liar=True)
    study = optuna.create_study(storage=storage, study_name=_STUDY, direction="minimize", sampler=sampler, load_if_exists=True)
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


def search(
    study: Study,
    space: Space,
    base: SimulationOptions,
    seeds: Sequence[int],
    num_trials: int,
    executor: Executor,
    jobs: int,
    progress: Progress,
) -> float:
    """Try settings until the study has `num_trials` of them, and the best of them with fresh seeds; CPU seconds of the simulations.

    Raises what a simulation raises.
    """
    before = tried(study)
    progress(len(before), num_trials)
    state = Course(study, space, base, seeds, len(before), known={str(one.setting) for one in before}, found=before)
    seconds = _play(state, num_trials, executor, jobs, progress)
    state.ask_finalists()
    return seconds + _play(state, num_trials, executor, jobs, progress)


def _play(state: Course, num_trials: int, executor: Executor, jobs: int, progress: Progress) -> float:
    """Until nothing is open and `num_trials` are known; CPU seconds."""
    seconds = 0.0
    running: dict[Future[tuple[SimulationReport, float]], int] = {}
    while state.open or state.num_asked < num_trials:
        while len(running) < jobs and (state.queue or state.num_asked < num_trials):
            if not state.queue:
                state.ask()
            number, options = state.queue.popleft()
            running[executor.submit(_timed, options)] = number
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            report, cpu = future.result()
            seconds += cpu
            if state.heard(running.pop(future), report):
                progress(len(state.found), num_trials)
    return seconds


def _timed(options: SimulationOptions) -> tuple[SimulationReport, float]:
    """The report, and the CPU seconds that it took."""
    started = time.process_time()
    report = simulate_shared(options)
    return report, time.process_time() - started


def tried(study: Study) -> list[Tried]:
    """Everything that is known, in the order in which it was asked for."""
    found = []
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        point = msgspec.json.decode(trial.user_attrs["point"].encode(), type=PointReport)
        by_seed = study.user_attrs.get(f"confirmed {trial.number}", trial.user_attrs["by_seed"])
        found.append(Tried(trial.number, setting_of(trial), point, msgspec.json.decode(by_seed.encode(), type=list[PointReport])))
    return found


def run_points(
    executor: Executor, settings: Sequence[SimulationOptions], seeds: Sequence[int], progress: Progress = lambda done, total: None
) -> list[PointReport]:
    """Each of `settings` with every seed, joined."""
    futures = [[executor.submit(simulate_shared, with_seed(one, seed)) for seed in seeds] for one in settings]
    points = []
    for number, row in enumerate(futures, start=1):
        points.append(joined([future.result() for future in row]))
        progress(number, len(settings))
    return points
