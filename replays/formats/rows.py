"""What formats that are made of rows have in common: files of JSON lines, plain or compressed, and sessions built from rows."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from replays.row_faults import RowFaults
from replays.traces import HashIds, Request, Session, Stream, TraceError

_SUFFIXES = (".jsonl", ".jsonl.gz")
_ID_MASK = (1 << 63) - 1
_LOOKED_AT = 100

Struct = TypeVar("Struct", bound=msgspec.Struct)
T = TypeVar("T")
Row: TypeAlias = "dict[str, Any]"


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One format: what it is, whether a file that begins with this row is of it, and how its files become sessions."""

    about: str
    starts: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Sequence[Path], RowFaults], list[Session]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, for messages. `number` counts from 1."""

    path: Path
    number: int
    text: bytes
    is_whole: bool = True
    """It ends with a line break; the last line of a file that was cut off does not."""

    def error(self, problem: str, field: str | None = None) -> TraceError:
        return TraceError(problem, path=self.path, row=self.number, field=field)

    def decode(self, decoder: msgspec.json.Decoder[Struct]) -> Struct:
        """The row. Raises TraceError that names the field."""
        try:
            return decoder.decode(self.text)
        except msgspec.ValidationError as error:
            problem, _, place = str(error).partition(" - at `$")
            raise self.error(problem, place.rstrip("`").lstrip(".") or None) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self.error(f"not valid JSON: {error}") from None


def row_files(path: Path, *, optional: bool = False) -> list[Path]:
    """The files of `path`, in order of name: itself, or the .jsonl and .jsonl.gz files of a folder. Raises TraceError if there are none."""
    files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIXES)) if path.is_dir() else [path] if path.exists() else []
    if not files and not optional:
        raise TraceError("no rows here (expected .jsonl or .jsonl.gz)" if path.exists() else "no such file or folder", path=path)
    return files


def lines_of(path: Path) -> Iterator[Line]:
    """The lines of a file that hold anything. Raises TraceError when it cannot be read."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, text in enumerate(file, start=1):
                if text.strip():
                    yield Line(path, number, text.removeprefix(b"\xef\xbb\xbf"), text.endswith(b"\n"))
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot be read: {getattr(error, 'strerror', None) or error}", path=path) from None


def read_rows(files: Sequence[Path], read: Callable[[Line], T], faults: RowFaults) -> Iterator[tuple[Line, T]]:
    """What `read` makes of each line; a line at which it raises TraceError goes to `faults`."""
    for file in files:
        for line in lines_of(file):
            try:
                row = read(line)
            except TraceError as error:
                faults.skip(error)
                continue
            yield line, row


def first_row(path: Path) -> object:
    """The first row of a file that is JSON, whatever it is; None where there is none among the first `_LOOKED_AT`."""
    for line in islice(lines_of(path), _LOOKED_AT):
        try:
            return msgspec.json.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return None


def as_ids(values: Sequence[int]) -> HashIds:
    """Ids of up to 64 bits, signed or not, as what the simulator takes; those that differ in the highest bit alone become one."""
    return np.array([value & _ID_MASK for value in values], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Call:
    """One request with the stream that it belongs to. `parent` names the stream that started that one, if one did."""

    stream: str
    parent: str | None
    request: Request
    line: Line


def sessions_of(calls: Sequence[Call], block_size: int, faults: RowFaults, *, has_clock: bool = True) -> list[Session]:
    """Trees of streams, in order of their first call. A stream whose parent has no calls is a root; a cycle of parents is cut.

    Calls that are odd are flagged: prompts that shrink, and answers without a token.
    """
    streams: dict[str, list[Call]] = {}
    parents: dict[str, str | None] = {}
    for call in sorted(calls, key=lambda call: call.request.start_seconds):
        streams.setdefault(call.stream, []).append(call)
        parents[call.stream] = parents.get(call.stream) or call.parent
    trees: dict[str, list[str]] = {}
    for name in streams:
        trees.setdefault(_root(name, parents, streams), []).append(name)
    found = []
    order = 0
    for root, names in trees.items():
        made = {name: _stream("" if name == root else name, streams[name], order, faults) for name in names}
        order += sum(len(stream.requests) for stream in made.values())
        children = tuple(made[name] for name in names if name != root)
        found.append(Session(root, block_size, made[root], children, scope="global", has_clock=has_clock))
    return found


def _root(name: str, parents: Mapping[str, str | None], streams: Mapping[str, object]) -> str:
    seen = {name}
    parent = parents[name]
    while parent is not None and parent in streams and parent not in seen:
        seen.add(parent)
        name, parent = parent, parents[parent]
    return name


def _stream(name: str, calls: Sequence[Call], order: int, faults: RowFaults) -> Stream:
    made: list[Request] = []
    for index, call in enumerate(calls):
        request = call.request
        shrinks = bool(made) and request.num_prompt_tokens < made[-1].num_prompt_tokens
        if shrinks:
            faults.flag(call.line.error("the prompt shrinks (the history was compacted or cut)"))
        elif not request.num_output_tokens:
            faults.flag(call.line.error("nothing was generated"))
        made.append(replace(request, order=order + index, shrinks=shrinks))
    return Stream(name, tuple(made))
