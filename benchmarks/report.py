"""What a benchmark hands back, printed as one table and written as JSON with where and on what it was measured."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE_FOLDER = Path.home() / ".cache" / "agentserve" / "benchmarks"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `quick` measures less of everything, for a first look."""

    quick: bool = False
    contenders: tuple[str, ...] = ()
    """Which servers take part; empty: all of the benchmark's default ones."""
    cache_folder: Path = CACHE_FOLDER
    """Where peers are installed, each in a virtual environment of its own."""
    gpu: bool = False
    """Measure on the CUDA device as well, where the benchmark can."""
    seeds: tuple[int, ...] = ()
    """Empty: those of the benchmark."""
    blocks: int = 0
    """KV blocks of the engine (capacity); 0: the benchmark's own number."""
    url: str = ""
    """A running server to measure, where the benchmark can; empty: it starts its own."""
    traces: Path | None = None
    """Recorded sessions, where the benchmark reads some; None: generated ones."""
    json: Path | None = None
    """Where the table will be written, for a benchmark that keeps there what it has while it runs."""
    resume: Path | None = None
    """An earlier run's `json`, to go on from what it kept (capacity)."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a name and figures by column; None prints as a dash."""

    name: str
    figures: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark's table. Column names carry their units."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Figures by name that stand at the top of the JSON; None where one could not be measured."""


Benchmark = Callable[[Options], Result]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at `percent` of the sorted `values`, the nearest rank at or above it."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def environment() -> dict[str, str]:
    """Commit, machine and versions of this run."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or "none",
        "machine": f"{platform.machine()}, {_cpu()}",
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    )
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def show(result: Result) -> None:
    """Print `result` for people."""
    console = Console()
    table = Table(title=result.title)
    table.add_column("")
    for column in result.columns:
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(row.name, *[_figure(row.figures.get(column)) for column in result.columns])
    console.print(table)
    for note in result.notes:
        console.print(note)


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


def write_json(result: Result, path: Path) -> None:
    """Write `result` and its environment as JSON, its named figures at the top."""
    data: dict[str, Any] = {**result.figures, "environment": environment(), "result": result}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data)) + b"\n")
