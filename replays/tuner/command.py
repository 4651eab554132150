"""`agentserve tune`: search policies and parameters on recorded sessions, and judge the best on sessions that were held back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import xxhash
from cyclopts import Parameter, validators
from cyclopts.types import NonNegativeFloat, PositiveInt

from replays.simulator.command import EndsName, WorkloadOptions, output, progress_bar, say_error, write_json
from replays.simulator.grid import BASELINE, ENDS, GridError, check_profile, parse_tier, parse_tokens
from replays.simulator.run import SimulationOptions
from replays.simulator.scripts import Script
from replays.traces import TraceError
from replays.tuner.apply import ApplyError, body_of, switch, write_settings
from replays.tuner.space import Setting, Space, space_of
from replays.tuner.split import split


@dataclass(frozen=True, slots=True)
class Job:
    """One search: what is played, what may be chosen, and how long to look."""

    traces: str
    tuned: Sequence[Script]
    held_back: Sequence[Script]
    base: SimulationOptions
    ends: str
    space: Space
    seeds: Sequence[int]
    num_trials: int
    jobs: int
    gap: float
    """Points that lru is to lose; 0: the load is that of `base`."""

    @property
    def context(self) -> str:
        """All that figures depend on besides the setting, short."""
        calls = [(script.plan.session.id, len(script.plan.calls)) for script in self.tuned]
        parts = [calls, self.base, self.ends, self.gap, list(self.seeds), list(self.space.policies), list(self.space.admissions)]
        return xxhash.xxh3_64_hexdigest(msgspec.json.encode([repr(part) for part in parts]))


def tune_command(
    traces: Annotated[list[Path], Parameter(consume_multiple=True)],
    /,
    *,
    policy: Annotated[list[str], Parameter(consume_multiple=True)] = [],  # noqa: B006  # never changed
    admission: Annotated[list[str], Parameter(consume_multiple=True)] = ["working_set"],  # noqa: B006  # never changed
    capacity: str = "",
    tier: str = "0",
    streams: PositiveInt = 28,
    gap: NonNegativeFloat = 0.0,
    ends: EndsName = "unknown",
    seeds: Annotated[list[int], Parameter(consume_multiple=True)] = [1, 2, 3],  # noqa: B006  # never changed
    trials: PositiveInt = 60,
    held_back: Annotated[float, Parameter(validator=validators.Number(gt=0, lt=1))] = 0.2,
    study: Path | None = None,
    out: Path | None = None,
    apply_to: Annotated[str, Parameter(name="--apply")] = "",
    admin_key: Annotated[str, Parameter(show_default=False)] = "",
    options: Annotated[WorkloadOptions, Parameter(name="*")] = WorkloadOptions(),  # noqa: B008  # frozen, so one default serves all
) -> int:
    """Search eviction policies and their parameters on recorded sessions: hit rate, TTFT p95, throughput and preemptions.

    A part of the sessions is held back; on these the winner is judged beside lru and the oracle, at the load of the search and around it.

    Parameters
    ----------
    traces
        Traces, as `simulate` reads them.
    policy
        Eviction policies that may be chosen; by default all that an engine can run.
    admission
        Admission policies that may be chosen beside fcfs; none: fcfs alone.
    capacity
        Tokens of the KV pool, such as 6264960 or 6.26M; by default the profile's.
    tier
        Tokens of a CPU tier, as in `simulate`; lru, which all is compared with, has none.
    streams
        Session trees that are live at a time.
    gap
        Points that lru is to lose to eviction: the load is looked for, from `streams` on, for the search and for the judgement each;
        0: it is `streams`.
    ends
        Whether policies are told that a session has ended, as in `simulate`.
    seeds
        Each setting is simulated with each of these, one after the other, for as long as it keeps up with the best; the best with as many
        fresh ones.
    trials
        Settings to try, those that the study has already counted in.
    held_back
        Share of the sessions that the search does not see.
    study
        Journal of the search; one that was broken off goes on from here.
    out
        Folder for the report: report.html, report.json and pictures.
    apply_to
        The server's address: it goes on by the winner at once. Or its settings file: the admission policy is written there.
    admin_key
        The server's key for its administration.
    """
    try:
        base = options.simulation()
        space = space_of(policy, admission)
        check_profile(options.profile)
        tokens = parse_tokens(capacity) if capacity else None
        for path in filter(None, (out, study.parent if study else None)):
            path.mkdir(parents=True, exist_ok=True)
        workload = options.read(traces)
        tuned, kept = split(workload.scripts, held_back)
        if not tuned or not kept:
            raise GridError(f"{len(workload.scripts)} sessions are too few to hold a share of {held_back:g} of them back")
        base = replace(
            base, capacity_tokens=tokens, knowledge=ENDS[ends], tier=parse_tier(tier), loop=replace(base.loop, concurrency=streams)
        )
        job = Job(workload.name, tuned, kept, base, ends, space, seeds, trials, options.num_jobs, gap)
        setting = _tune(job, study, out)
        if apply_to:
            _apply(apply_to, admin_key, setting)
    except (GridError, TraceError, ApplyError, OSError) as error:
        return say_error(error)
    return 0


def _apply(where: str, admin_key: str, setting: Setting) -> None:
    if where.startswith(("http://", "https://")):
        switch(where, admin_key, setting, with_eviction=setting.policy != BASELINE)
        output().print(f"{where} goes on by {setting}")
        return
    write_settings(Path(where), setting)
    output().print(f"{where} says: admission {setting.admission}; a running server takes it on SIGHUP")
    if setting.policy != BASELINE:
        body = body_of(setting, with_eviction=True).decode()
        output().print(f"eviction is the engine's: PUT /v1/admin/policies {body}", soft_wrap=True, markup=False)


def _tune(job: Job, journal: Path | None, out: Path | None) -> Setting:
    """Search, judge, report; the winner."""
    # Optuna and matplotlib take a second to import, which only this command should pay.
    from replays.tuner.front import whole
    from replays.tuner.judge import held_back_seeds, judge
    from replays.tuner.report import TUNE_DEFINITIONS, TuneReport, trials_of, tune_tables
    from replays.tuner.search import open_study, processes, search, tried

    started = time.monotonic()
    opened = open_study(journal, job.context, job.space, job.seeds[0])
    with processes(job.tuned, job.jobs) as executor:
        base = _at_load(job, executor, job.seeds)
        with progress_bar("searching") as progress:
            cpu_seconds = search(opened, job.space, base, job.seeds, job.num_trials, executor, job.jobs, progress)
    found = tried(opened)
    trials, best, plain = trials_of(found)
    setting = next(trial.setting for trial in trials if trial.number == best)
    with processes(job.held_back, job.jobs) as executor:
        held_back = _at_load(job, executor, held_back_seeds(job.seeds))
        with progress_bar("judging") as progress:
            judged = judge(executor, held_back, setting, job.seeds, progress)
    report = TuneReport(
        traces=job.traces,
        num_tuned_sessions=len(job.tuned),
        num_held_back_sessions=len(job.held_back),
        profile=job.base.profile,
        streams=base.loop.concurrency,
        capacity_tokens=judged[0].capacity_tokens,
        ends=job.ends,
        tier_tokens=job.base.tier.capacity_tokens if job.base.tier is not None else 0,
        seeds=list(job.seeds),
        seconds=time.monotonic() - started,
        search_cpu_seconds=cpu_seconds,
        num_whole=len(whole(found)),
        trials=trials,
        winner=best,
        baseline=plain,
        judged=judged,
        definitions=TUNE_DEFINITIONS,
    )
    output().print(tune_tables(report))
    if out is not None:
        _write(out, report)
    return setting


def _at_load(job: Job, executor: Executor, seeds: Sequence[int]) -> SimulationOptions:
    """`job.base`, at the load where lru loses `job.gap` points of the sessions of `executor`."""
    from replays.tuner.load import streams_that_lose

    if not job.gap:
        return job.base
    with progress_bar("looking for the load") as progress:
        streams = streams_that_lose(executor, job.base, job.gap, seeds, progress)
    return replace(job.base, loop=replace(job.base.loop, concurrency=streams))


def _write(out: Path, report: object) -> None:
    from replays.tuner.page import page
    from replays.tuner.pictures import judged_picture, trials_picture
    from replays.tuner.report import TuneReport

    assert isinstance(report, TuneReport)
    trials, judged = trials_picture(report), judged_picture(report)
    write_json(out / "report.json", report)
    (out / "trials.png").write_bytes(trials)
    (out / "held_back.png").write_bytes(judged)
    (out / "report.html").write_text(page(report, trials, judged), encoding="utf-8")
