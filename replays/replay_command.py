"""`agentserve replay` and `agentserve report`."""

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
from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, PositiveInt
from rich.console import Console
from rich.progress import track

from replays.formats import open_traces
from replays.options import ReplayOptions, to_arguments
from replays.records import RecordsError, Run, read_run
from replays.report import Report, make_report, read_report, write_report
from replays.row_faults import RowFaults, RowsReport, say_rows
from replays.server import ask_version
from replays.tables import report_tables
from replays.traces import TraceError

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
