"""The replay commands: `replay`, `report`, `generate`, `shapes`, and those of simulated engines.

Exit codes: 0 well, 1 too many failed requests, 2 wrong use or bad files.
"""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import msgspec
from cyclopts import App, Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import track

from model.m3.config import MINIMAX_M3
from model.m3.index_reuse import fixed_plan
from model.m3.sharding import Shard
from replays.calibrate.command import calibrate
from replays.formats import open_traces
from replays.generator import GeneratorSettings, generate_sessions
from replays.options import ReplayOptions, to_arguments
from replays.records import RecordsError, Run, read_run
from replays.report import Report, make_report, read_report, write_report
from replays.row_faults import RowFaults, RowsReport, say_rows
from replays.server import ask_version
from replays.shape_tables import shape_tables
from replays.shapes import distributions, read_calls, repeated_work
from replays.sim_engine.command import sim_engine
from replays.simulator.command import simulate_command
from replays.simulator.profile_command import profiles
from replays.tables import report_tables
from replays.traces import TraceError
from replays.tuner.command import tune_command

app = App(name="replays", help="Replay recorded agent sessions, report on replays, and generate sessions.")
app.command(simulate_command, name="simulate")
app.command(tune_command, name="tune")
app.command(sim_engine)
app.command(profiles)
app.command(calibrate)

_ERRORS = Console(stderr=True, highlight=False)
_OUTPUT = Console(highlight=False)
_STOP_SECONDS = 20.0
_NUM_ERRORS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class _Target:
    """Where one run goes: `run` names it in cache-bust lines, so that runs against one engine do not warm each other's cache."""

    url: str
    metrics_url: str
    run: str


def _target(url: str, metrics_url: str = "") -> _Target:
    return _Target(url.rstrip("/"), metrics_url or f"{url.rstrip('/')}/metrics", uuid4().hex[:8])


def _engine_url(url: str) -> str:
    """The address of the engine behind the server at `url`. Raises OSError when the server does not say."""
    found = ask_version(url.rstrip("/")).engine_url
    if found is None:
        raise OSError(f"{url} does not say where its engine is: name it with --direct-url")
    return found


class ReplayFailed(RuntimeError):
    """The child process gave no records; its own message is already on stderr."""


def _command(traces: Path, target: _Target, concurrency: int, options: ReplayOptions, records: Path) -> list[str]:
    locustfile = importlib.util.find_spec("replays.locustfile")
    assert locustfile is not None
    assert locustfile.origin is not None
    return [
        *(sys.executable, "-m", "locust", "-f", locustfile.origin, "--headless", "--skip-log-setup"),
        *("--users", str(concurrency), "--spawn-rate", str(min(concurrency, 100)), "--host", target.url, "--exit-code-on-error", "0"),
        *("--replay-traces", str(traces.resolve()), "--replay-records", str(records), "--replay-metrics-url", target.metrics_url),
        *("--replay-run", target.run),
        *to_arguments(options),
    ]


def _run(traces: Path, target: _Target, concurrency: int, options: ReplayOptions, records: Path) -> Run:
    """Play in a child process (locust patches the sockets of its own) and read what it wrote. Ctrl-C ends it with what there is."""
    process = subprocess.Popen(_command(traces, target, concurrency, options, records), stdout=subprocess.DEVNULL)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        status = process.wait(_STOP_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if status == 2 or not records.exists():
        raise ReplayFailed(f"the replay of {target.url} did not run (exit code {status})")
    return read_run(records)


def _check_traces(traces: Path, *, strict: bool) -> RowsReport:
    """Read every session once, so that bad rows are found before anything is sent. Raises TraceError where none is left."""
    faults = RowFaults(strict=strict)
    trace_set = open_traces(traces, faults=faults)
    num_sound = 0
    for _ in track(trace_set.checked(), "reading traces", total=len(trace_set), console=_ERRORS, transient=True):
        num_sound += 1
    rows = faults.report()
    for line in say_rows(rows):
        _ERRORS.print(line, style="yellow", markup=False, soft_wrap=True)
    if not num_sound:
        raise TraceError("no session here is sound", path=traces)
    return rows


def _failed_share(report: Report) -> float:
    return report.failed_requests / report.requests if report.requests else 1.0


def _say_errors(name: str, run: Run) -> None:
    """The most frequent errors of a run, as the server put them."""
    errors = Counter(record.error for record in run.records if record.error is not None and not record.overflow)
    for error, count in errors.most_common(_NUM_ERRORS_SHOWN):
        _ERRORS.print(f"{name}: {count} × {error}", markup=False, soft_wrap=True)


def _show(named: list[tuple[str, Report]]) -> None:
    _OUTPUT.print(report_tables(named))


@app.command
def replay(
    traces: Path,
    *,
    url: str = "http://127.0.0.1:8000",
    concurrency: PositiveInt = 4,
    direct: bool = False,
    direct_url: str = "",
    metrics_url: str = "",
    failed_threshold: NonNegativeFloat = 0.1,
    strict: bool = False,
    json: Path | None = None,
    png: Path | None = None,
    records: Path | None = None,
    options: Annotated[ReplayOptions, Parameter(name="*")] = ReplayOptions(),  # noqa: B008  # frozen, so one default serves all
) -> int:
    """Drive agent sessions through a server by AgentX's rules and report hits, misses and latency.

    Parameters
    ----------
    traces
        Traces of any form that `simulate` reads: a file, or a folder of files.
    url
        The server.
    concurrency
        Session trees that are live at a time (root and sub-agents count as one).
    direct
        Send the same trace to the engine itself as well, with other words, so that neither finds the other's blocks; report both.
    direct_url
        The engine's own address; by default what the server says of it.
    metrics_url
        The engine's metrics; by default /metrics of the server.
    failed_threshold
        Share of failed requests above which the exit code is 1.
    strict
        Stop with exit code 2 at the first bad row of the traces; else such rows are left out, counted and named.
    json
        Write the report here.
    png
        Draw the report here.
    records
        Keep the records of the requests here (JSON lines).
    """
    named: list[tuple[str, Report]] = []
    try:
        for path in filter(None, (json, png, records)):
            path.parent.mkdir(parents=True, exist_ok=True)
        rows = _check_traces(traces, strict=strict)
        with tempfile.TemporaryDirectory(prefix="agentserve-replay-") as folder:
            main_target = _target(url, metrics_url)
            direct_target = _target(direct_url or _engine_url(url)) if direct or direct_url else None
            main = _run(traces, main_target, concurrency, options, records or Path(folder) / "main.jsonl")
            _say_errors("server", main)
            report = make_report(main)
            report.rows = rows
            named.append(("server", report))
            direct_run: Run | None = None
            if direct_target is not None:
                direct_run = _run(traces, direct_target, concurrency, options, Path(folder) / "direct.jsonl")
                _say_errors("direct", direct_run)
                report.direct = make_report(direct_run)
                report.direct.rows = rows
                named.append(("direct", report.direct))
        _write(report, main, direct_run, json, png)
    except (TraceError, RecordsError, ReplayFailed, OSError, msgspec.DecodeError) as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    _show(named)
    for name, report in named:
        if not report.requests:
            _ERRORS.print(f"{name}: no request ended within --duration; make it longer, or --time-scale larger", style="red", markup=False)
    return 1 if max(_failed_share(report) for _, report in named) > failed_threshold else 0


def _write(report: Report, main: Run, direct: Run | None, json: Path | None, png: Path | None) -> None:
    if json is not None:
        write_report(json, report)
    if png is not None:
        # matplotlib takes half a second to import, which only those who want a picture should pay.
        from replays.plot import plot_run

        plot_run(png, main, report, direct)


@app.command
def report(files: Annotated[list[Path], Parameter(consume_multiple=True)], /) -> int:
    """Show reports side by side; the first is what the others are compared with.

    Parameters
    ----------
    files
        Reports as `replay --json` wrote them.
    """
    named: list[tuple[str, Report]] = []
    try:
        for path in files:
            found = read_report(path)
            named.append((path.stem, found))
            if found.direct is not None:
                named.append((f"{path.stem}, direct", found.direct))
    except RecordsError as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    _show(named)
    return 0


@app.command
def generate(
    *,
    sessions: PositiveInt,
    out: Path,
    seed: int = 42,
    token_scale: PositiveFloat = 1.0,
    min_turns: PositiveInt = 2,
    max_turns: PositiveInt = 514,
    subagent_share: NonNegativeFloat = 0.44,
) -> int:
    """Make up agent sessions like AgentX's: sub-agents, context cuts, tool and human gaps.

    Parameters
    ----------
    sessions
        How many.
    out
        A .jsonl file, or a folder for one .json file a session (what AgentX's own harness reads).
    seed
        The same seed gives the same bytes.
    token_scale
        Shrinks every token count.
    min_turns
        Fewest turns of a session's root.
    max_turns
        Most turns of a session's root, and of a sub-agent.
    subagent_share
        Share of sessions that start sub-agents.
    """
    settings = GeneratorSettings(
        sessions, seed, token_scale=token_scale, min_turns=min_turns, max_turns=max_turns, subagent_share=subagent_share
    )
    made = track(generate_sessions(settings), "generating", total=sessions, console=_ERRORS, transient=True)
    try:
        if out.suffix == ".jsonl":
            with out.open("wb") as file:
                file.writelines(msgspec.json.encode(session) + b"\n" for session in made)
        else:
            out.mkdir(parents=True, exist_ok=True)
            for session in made:
                (out / f"{session.id}.json").write_bytes(msgspec.json.encode(session))
    except OSError as error:
        _ERRORS.print(f"error: {out}: {error.strerror}", style="red", markup=False, soft_wrap=True)
        return 2
    _ERRORS.print(f"{sessions} sessions in {out}")
    return 0


@app.command
def shapes(
    source: Path,
    *,
    tp: PositiveInt = 4,
    index_topk_freq: PositiveInt = 1,
    batched_tokens: PositiveInt = 32_768,
    draft_tokens: NonNegativeInt = 3,
    json: Path | None = None,
) -> int:
    """Shapes that a workload brings to MiniMax-M3's kernels, and the work that repeats per layer, token and request.

    Parameters
    ----------
    source
        A trace (hits are then those of an unlimited cache), or what `replay --records` wrote (the engine's own hits, and decode batches).
    tp
        Tensor-parallel size.
    index_topk_freq
        One of so many sparse layers chooses blocks.
    batched_tokens
        Tokens of a prefill step at most.
    draft_tokens
        Draft tokens verified for each sequence in a decode step.
    json
        Write the figures here.
    """
    try:
        shard = Shard(MINIMAX_M3, tp)
        calls = list(read_calls(source, MINIMAX_M3.block_size))
        spread = distributions(calls, batched_tokens, 1 + draft_tokens)
        work = repeated_work(calls, shard, fixed_plan(MINIMAX_M3.num_sparse_layers, index_topk_freq), batched_tokens)
        if json is not None:
            json.write_bytes(msgspec.json.encode({"calls": len(calls), "distributions": spread, "work": work}))
    except (TraceError, RecordsError, ValueError, OSError) as error:
        _ERRORS.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    for table in shape_tables(len(calls), spread, work):
        _OUTPUT.print(table)
    return 0
