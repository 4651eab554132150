"""Trace formats by name, and the choice of one. A format that is made of rows is a file here and a line in `ROW_FORMATS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from replays.formats.capture import read_captures, starts_capture
from replays.formats.dynamo import read_dynamo, starts_dynamo
from replays.formats.mooncake import read_mooncake, starts_mooncake
from replays.formats.rows import RowFormat, first_row, row_files
from replays.row_faults import RowFaults
from replays.traces import Session, TraceSet

ROW_FORMATS: dict[str, RowFormat] = {
    "capture": RowFormat("what `agentserve serve --capture-folder` wrote: a turn a row", starts_capture, read_captures),
    "dynamo": RowFormat("NVIDIA Dynamo's request trace: `request_end` events with replay hashes", starts_dynamo, read_dynamo),
    "mooncake": RowFormat("Mooncake's JSONL: a request a row, `timestamp` in ms, ids of global scope", starts_mooncake, read_mooncake),
}
FORMAT_NAMES = ("auto", "weka", *ROW_FORMATS)


class Sessions(Protocol):
    """Recorded sessions, in order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Session: ...

    def checked(self) -> Iterator[Session]:
        """Every session once. Strict readings raise TraceError at the first that is not valid, or whose id was used before."""
        ...


class RowTraces(Sequence[Session]):
    """The sessions that rows of one or more files make, in order of their start. Read whole: a session's rows may lie anywhere."""

    def __init__(self, path: Path, row_format: RowFormat, faults: RowFaults) -> None:
        self._sessions = row_format.read(row_files(path), faults)

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, index: int) -> Session:  # type: ignore[override]  # no slices, as in TraceSet
        return self._sessions[index]

    def checked(self) -> Iterator[Session]:
        """Every session; they were checked when they were read."""
        return iter(self._sessions)


def open_traces(path: Path, trace_format: str = "auto", faults: RowFaults | None = None) -> Sessions:
    """The sessions of a file or folder. `auto` looks at the first row that is JSON. Bad rows go to `faults`, strict if none are given.

    Raises TraceError; for a weka session only when it is read, and then also in a lenient reading where it is asked for by its number.
    """
    name = detect(path) if trace_format == "auto" else trace_format
    faults = faults or RowFaults(strict=True)
    return TraceSet(path, faults=faults) if name == "weka" else RowTraces(path, ROW_FORMATS[name], faults)


def detect(path: Path) -> str:
    """The format of the first file's first row that is JSON. What is no row of another format is left to weka's reader and its messages."""
    if path.is_file() and path.suffix == ".json":
        return "weka"
    files = row_files(path, optional=True)
    row = first_row(files[0]) if files else None
    if isinstance(row, dict):
        for name, row_format in ROW_FORMATS.items():
            if row_format.starts(row):
                return name
    return "weka"
