"""`agentserve simulate`: what other policies, capacities and loads would have done on recorded sessions."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec
from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from replays.row_faults import RowFaults, say_rows
from replays.simulator.grid import (
    DEFINITIONS,
    Grid,
    GridError,
    PointReport,
    parse_admission,
    parse_policy,
    parse_tier,
    parse_tokens,
    points_of,
    run_all,
    unlimited,
)
from replays.simulator.loop import PLAYS_EACH, LoopOptions
from replays.simulator.report import SimulationReport
from replays.simulator.run import SimulationOptions
from replays.simulator.tables import anatomy_tables, point_table
from replays.simulator.workload import Reading, Workload, read_workload
from replays.traces import TraceError

ERRORS = Console(stderr=True, highlight=False)
_PIPE_WIDTH = 200
_SAY_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""

_DURATION_HELP = f"Simulated seconds of profiling, or until each session was played {PLAYS_EACH} times; 0: each once, without warm-up."

FormatName: TypeAlias = Literal["auto", "weka", "capture", "dynamo", "mooncake"]
EndsName: TypeAlias = Literal["unknown", "inferred", "said"]


def output() -> Console:
    """Where tables go: as wide as the terminal, and wide in a file or a pipe."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=_PIPE_WIDTH)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Hears (done, total), and shows it on stderr while it lasts."""
    if not ERRORS.is_terminal:
        with progress_lines(title, _SAY_SECONDS) as heard:
            yield heard
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERRORS, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def progress_lines(title: str, every_seconds: float) -> Iterator[Callable[[int, int], None]]:
    """The same as lines, the first after `every_seconds`: whatever takes longer says so, also while nothing is done yet."""
    state, is_over = ["nothing is done yet"], threading.Event()
    started = time.monotonic()

    def say() -> None:
        while not is_over.wait(every_seconds):
            ERRORS.print(f"{title}: {state[0]}, {time.monotonic() - started:.0f} s", style="dim", markup=False)

    def heard(done: int, total: int) -> None:
        state[0] = f"{done} of {total}"

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        is_over.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """How the traces are read and played; `simulate` and `tune` share these."""

    trace_format: Annotated[FormatName, Parameter(name="--format", help="Of the traces; auto looks at the first row.")] = "auto"
    profile: Annotated[str, Parameter(help="Engine and machine, by name.")] = "nominal"
    block_size: Annotated[PositiveInt, Parameter(help="Tokens of a KV block.")] = 128
    assistant: Annotated[
        Literal["canned", "live"], Parameter(help="live: clients send answers back as they were generated, so these can be hit.")
    ] = "canned"
    context_tokens: Annotated[int | None, Parameter(help="The model's limit: sessions near it are about to compact or to end.")] = None
    duration: Annotated[NonNegativeFloat, Parameter(help=_DURATION_HELP)] = 3600.0
    warmup_requests: Annotated[int, Parameter(help="Per lane, of one token, before profiling.")] = 10
    idle_cap: Annotated[PositiveFloat, Parameter(help="Longest idle time of one session tree, seconds.")] = 300.0
    arrivals: Annotated[
        NonNegativeFloat | None, Parameter(help="Open loop: sessions that begin a second; 0: when they began in the recording.")
    ] = None
    speed: Annotated[PositiveFloat, Parameter(help="Of an open loop with recorded arrivals: how much faster they come.")] = 1.0
    unmeasured: Annotated[NonNegativeFloat, Parameter(help="Seconds at the start of an open loop that are warm-up.")] = 0.0
    strict: Annotated[bool, Parameter(help="Stop at the first bad row of a trace; else such rows are left out, counted and named.")] = False
    jobs: Annotated[int, Parameter(help="Processes; 0: one for each core.")] = 0

    @property
    def num_jobs(self) -> int:
        return self.jobs or os.cpu_count() or 1

    def simulation(self) -> SimulationOptions:
        """What all runs have in common."""
        loop = LoopOptions(
            duration=self.duration or None,
            warmup=self.warmup_requests,
            idle_cap=self.idle_cap,
            arrivals=self.arrivals,
            speed=self.speed,
            unmeasured=self.unmeasured,
        )
        return SimulationOptions(profile=self.profile, block_size=self.block_size, context_tokens=self.context_tokens, loop=loop)

    def read(self, traces: Sequence[Path]) -> Workload:
        """The traces. Raises TraceError."""
        reading = Reading(self.trace_format, self.block_size, echoes=self.assistant == "live")
        faults = RowFaults(strict=self.strict)
        try:
            with progress_bar("reading traces") as progress:
                workload = read_workload(traces, reading, self.num_jobs, progress, faults)
        finally:  # where nothing is left to play, these lines are the reason
            for line in say_rows(faults.report()):
                ERRORS.print(line, style="yellow", markup=False, soft_wrap=True)
        if self.arrivals == 0 and not workload.has_clock:
            raise GridError("these sessions are not on one clock, so there are no recorded arrivals: give a rate with --arrivals")
        return workload


def say_error(error: Exception) -> int:
    """Prints it; the exit code for wrong use and bad files."""
    ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
    return 2


def simulate_command(
    traces: Annotated[list[Path], Parameter(consume_multiple=True)],
    /,
    *,
    policy: Annotated[list[str], Parameter(consume_multiple=True)] = ["lru", "dead_first", "class_hazard"],  # noqa: B006  # never changed
    capacity: Annotated[list[str], Parameter(consume_multiple=True)] = [],  # noqa: B006  # never changed
    streams: Annotated[list[PositiveInt], Parameter(consume_multiple=True)] = [28],  # noqa: B006  # never changed
    seeds: Annotated[list[int], Parameter(consume_multiple=True)] = [1],  # noqa: B006  # never changed
    admission: Annotated[list[str], Parameter(consume_multiple=True)] = ["fcfs"],  # noqa: B006  # never changed
    tier: Annotated[list[str], Parameter(consume_multiple=True)] = ["0"],  # noqa: B006  # never changed
    ends: Annotated[list[EndsName], Parameter(consume_multiple=True)] = ["unknown"],  # noqa: B006  # never changed
    anatomy: bool = False,
    json: Path | None = None,
    png: Path | None = None,
    options: Annotated[WorkloadOptions, Parameter(name="*")] = WorkloadOptions(),  # frozen, so one default serves all
) -> int:
    """Simulate recorded sessions under eviction policies, capacities and loads: hits, the gap to the ceiling, latency and throughput.

    Every combination of policies, capacities, streams, admissions and ends is run with every seed; lru is always among them.

    Parameters
    ----------
    traces
        Traces: weka sessions, Mooncake or Dynamo rows, or captures of this server; files or folders.
    policy
        Eviction policies; parameters follow a colon: class_hazard:horizon_seconds=60.
    capacity
        Tokens of the KV pool, such as 6264960 or 6.26M; by default the profile's.
    streams
        Session trees that are live at a time.
    seeds
        Each point is run with each of these.
    admission
        Admission policies, with parameters as above.
    tier
        Tokens of a CPU tier under the pool, which takes what leaves it; 0: none. inclusive:1.5M stores what is computed instead.
    ends
        Whether policies are told that a session has ended: never, as the server infers it, or as clients could say it.
    anatomy
        Show what the pool held and lost, and, by one more run without evictions a load, the capacity that an LRU would need.
    json
        Write points, runs and definitions here.
    png
        Draw the anatomy of the last policy's first run here.
    """
    try:
        for path in filter(None, (json, png)):
            path.parent.mkdir(parents=True, exist_ok=True)
        grid = Grid(
            policies=[parse_policy(text) for text in policy],
            capacities=[parse_tokens(text) for text in capacity] or [None],
            streams=streams if options.arrivals is None else [1],
            seeds=seeds,
            admissions=[parse_admission(text) for text in admission],
            tiers=[parse_tier(text) for text in tier],
            ends=ends,
            base=options.simulation(),
        )
        grid.check()
        workload = options.read(traces)
        reports, roomy = _run(workload, grid, options.num_jobs, with_unlimited=anatomy or png is not None)
    except (GridError, TraceError, OSError) as error:
        return say_error(error)
    points = points_of(reports)
    console = output()
    console.print(f"{workload.name}: {len(workload.scripts)} sessions, {workload.num_calls} calls; profile {options.profile}")
    if any(report.is_upper_bound for report in reports):
        console.print("idle times are dropped: hit rates are an UPPER BOUND")
    console.print(point_table(points))
    _say_overflows(points)
    _say_cut(reports)
    if anatomy:
        console.print("", anatomy_tables([report for report in reports if report.seed == seeds[0]], roomy))
    if json is not None:
        write_json(json, {"definitions": DEFINITIONS, "points": points, "runs": reports, "unlimited": roomy, "rows": workload.rows})
    if png is not None:
        # matplotlib takes half a second to import, which only those who want a picture should pay.
        from replays.simulator.plot import plot_anatomy

        last = next(report for report in reversed(reports) if report.seed == seeds[0])
        plot_anatomy(png, last, next((r for r in roomy if (r.concurrency, r.seed) == (last.concurrency, last.seed)), None))
    return 0


def _run(workload: Workload, grid: Grid, jobs: int, *, with_unlimited: bool) -> tuple[list[SimulationReport], list[SimulationReport]]:
    wanted = list(grid.options())
    extra = list(unlimited(grid).options()) if with_unlimited else []
    with progress_bar("simulating") as progress:
        reports = run_all(workload.scripts, [*wanted, *extra], jobs, progress)
    return reports[: len(wanted)], reports[len(wanted) :]


def _say_overflows(points: Sequence[PointReport]) -> None:
    worst = max((point.overflows for point in points), default=0)
    if worst:
        ERRORS.print(f"{worst} requests were longer than the whole pool and were refused; larger capacities have fewer", style="yellow")


def _say_cut(reports: Sequence[SimulationReport]) -> None:
    seconds = [report.duration_seconds for report in reports if report.is_cut]
    if seconds:
        ended = f"{len(seconds)} of {len(reports)} runs ended before --duration, after {min(seconds):,.0f} simulated seconds or more"
        ERRORS.print(f"{ended}: each session had been played {PLAYS_EACH} times", style="yellow", soft_wrap=True)


def write_json(path: Path, data: object) -> None:
    """Formatted JSON. Raises OSError."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data)) + b"\n")
