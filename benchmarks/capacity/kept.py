"""What a run that is cut off keeps: a line of JSON for each thing measured, in a file beside the table's, for a later run to go on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec

from benchmarks.capacity.drive import Measured


class Setting(msgspec.Struct, frozen=True, tag=True):
    """Of the whole file; runs of another setting do not mix with these."""

    traces: str
    num_blocks: int
    seconds: float


class ArmRun(msgspec.Struct, frozen=True, tag=True):
    arm: str
    seed: int
    measured: Measured


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Greedy answers of one kind of engine."""

    engine: str
    outputs: list[tuple[int, ...]]


class PluginError(msgspec.Struct, frozen=True, tag=True):
    text: str


class Overhead(msgspec.Struct, frozen=True, tag=True):
    shares: dict[str, float]


Line: TypeAlias = Setting | ArmRun | Outputs | PluginError | Overhead
_LINE = msgspec.json.Decoder(Line)


@dataclass(slots=True)
class Kept:
    """All that is measured, by arm and seed; with a `path`, kept there line by line."""

    setting: Setting
    path: Path | None = None
    runs: dict[str, dict[int, Measured]] = field(default_factory=dict)
    outputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    plugin_errors: list[str] = field(default_factory=list)
    overhead: dict[str, float] = field(default_factory=dict)

    @classmethod
    def begin(cls, setting: Setting, path: Path | None, resumed: Path | None) -> Kept:
        """Empty, or with what `resumed` holds, which is then copied to `path`. Raises ValueError for runs of another setting."""
        kept = cls(setting, path)
        lines = _read(resumed) if resumed is not None else []
        for line in lines:
            kept._take(line)
        if path is not None:
            path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (setting, *lines[1:])))
        return kept

    def has(self, arm: str, seed: int) -> bool:
        """Whether the arm has been measured on this seed."""
        return seed in self.runs.get(arm, {})

    def add(self, line: Line) -> None:
        """Takes it, and writes it down before anything else is measured."""
        self._take(line)
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")

    def _take(self, line: Line) -> None:
        match line:
            case Setting():
                if line != self.setting:
                    raise ValueError(f"--resume: those runs are of another setting, {line}, and these of {self.setting}")
            case ArmRun():
                self.runs.setdefault(line.arm, {})[line.seed] = line.measured
            case Outputs():
                self.outputs[line.engine] = line.outputs
            case PluginError():
                self.plugin_errors.append(line.text)
            case Overhead():
                self.overhead = line.shares


def runs_path(table: Path) -> Path:
    """Where the runs of a table lie."""
    return table.with_name(f"{table.name}.runs")


def _read(path: Path) -> list[Line]:
    """The lines of a file of runs, without a last one that was cut off. Raises ValueError."""
    if not path.is_file():
        raise ValueError(f"--resume: no runs at {str(path)!r}")
    whole = path.read_bytes().split(b"\n")[:-1]
    try:
        lines = [_LINE.decode(line) for line in whole]
    except msgspec.MsgspecError as error:
        raise ValueError(f"--resume: {str(path)!r} does not hold runs of this benchmark: {error}") from error
    if not lines or not isinstance(lines[0], Setting):
        raise ValueError(f"--resume: {str(path)!r} does not say of which setting its runs are")
    return lines
