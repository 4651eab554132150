"""Recorded sessions as values, and the readers that make them from files.

A session is a tree of streams: the root and its sub-agents. Times are seconds on the session's own clock, whatever the file said.
Files are listed cheaply and read one at a time, when a session is wanted: a corpus need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray

from replays.row_faults import RowFaults
from replays.weka import WekaCall, WekaSession, WekaSubagent

HashIds: TypeAlias = NDArray[np.int64]

# Recorders round; an inner time this much before its marker still counts as absolute.
_CLOCK_SLACK_SECONDS = 0.001


class TraceError(ValueError):
    """A trace cannot be used. Says the file, the row (line of a .jsonl file, else None) and the field, such as `requests[3].in`."""

    def __init__(self, problem: str, *, path: Path, row: int | None = None, field: str | None = None) -> None:
        where = str(path) + (f", line {row}" if row is not None else "") + (f", {field}" if field else "")
        super().__init__(f"{where}: {problem}")
        self.problem = problem
        self.path = path
        self.row = row
        self.field = field

    def __reduce__(self) -> tuple[Callable[[str, Path, int | None, str | None], TraceError], tuple[str, Path, int | None, str | None]]:
        """Errors travel between processes."""
        return _trace_error, (self.problem, self.path, self.row, self.field)


def _trace_error(problem: str, path: Path, row: int | None, field: str | None) -> TraceError:
    return TraceError(problem, path=path, row=row, field=field)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One model call. `hash_ids` names its prompt's blocks, whole or partial; where it is short, the rest is shared with nothing."""

    order: int
    """Position in the file's outer list (a sub-agent's calls share their marker's), which settles equal times."""
    start_seconds: float
    duration_seconds: float
    """Time in the server; 0 where it was not recorded."""
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: HashIds
    stop: str
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    shrinks: bool = False
    """The prompt is smaller than the one before it in its stream: the client compacted or cut its history."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the answer called, where the recorder knew them."""
    echoed: bool = False
    """The next prompt of the stream holds the answer as it was generated, so that its blocks can be hit."""

    @property
    def end_seconds(self) -> float:
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True, slots=True)
class Stream:
    """One line of calls, each after the other: the root (name "") or a sub-agent (its agent id)."""

    name: str
    requests: tuple[Request, ...]
    head_tokens: int = 0
    """Declared tool and system tokens at the front of each prompt."""


@dataclass(frozen=True, slots=True)
class Session:
    id: str
    block_size: int
    root: Stream
    subagents: tuple[Stream, ...] = ()
    scope: Literal["local", "global"] = "local"
    """Whether equal ids mean equal blocks within this session only, or in all sessions of the trace."""
    has_clock: bool = False
    """Times are on one clock with the other sessions of the trace, so that its start is an arrival."""

    @property
    def streams(self) -> tuple[Stream, ...]:
        return (self.root, *self.subagents)

    @property
    def num_requests(self) -> int:
        return sum(len(stream.requests) for stream in self.streams)


@dataclass(frozen=True, slots=True)
class _Row:
    """Where a session came from, for messages."""

    path: Path
    number: int | None

    def error(self, problem: str, field: str | None = None) -> TraceError:
        return TraceError(problem, path=self.path, row=self.number, field=field)


def _one_of(row: _Row, field: str, names: tuple[str, str], values: tuple[int | UnsetType, int | UnsetType]) -> int:
    given = [value for value in values if not isinstance(value, UnsetType)]
    if len(given) == 1:
        return given[0]
    problem = "is missing" if not given else "is given twice"
    raise row.error(f"{names[0]!r} (or its alias {names[1]!r}) {problem}", f"{field}.{names[0]}")


def _request(row: _Row, field: str, call: WekaCall, order: int, shift_seconds: float, block_size: int, previous: Request | None) -> Request:
    num_prompt_tokens = _one_of(row, field, ("in", "input_length"), (call.in_, call.input_length))
    num_output_tokens = _one_of(row, field, ("out", "output_length"), (call.out, call.output_length))
    most = -(-num_prompt_tokens // block_size)
    if len(call.hash_ids) > most:
        problem = f"{len(call.hash_ids)} ids for {num_prompt_tokens} tokens; {most} blocks of {block_size} hold them"
        raise row.error(problem, f"{field}.hash_ids")
    try:
        hash_ids = np.array(call.hash_ids, dtype=np.int64)
    except OverflowError:
        raise row.error("an id does not fit in 63 bits", f"{field}.hash_ids") from None
    return Request(
        order=order,
        start_seconds=call.t + shift_seconds,
        duration_seconds=call.api_time or 0.0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        hash_ids=hash_ids,
        stop=call.stop,
        input_types=tuple(call.input_types),
        output_types=tuple(call.output_types),
        shrinks=previous is not None and num_prompt_tokens < previous.num_prompt_tokens,
    )


def _subagent(row: _Row, field: str, marker: WekaSubagent, order: int, block_size: int) -> Stream:
    requests: list[Request] = []
    for index, call in enumerate(marker.requests):
        # Some recorders count a sub-agent's time from its marker: such a time lies before the marker itself.
        shift = marker.t if call.t + _CLOCK_SLACK_SECONDS < marker.t else 0.0
        previous = requests[-1] if requests else None
        requests.append(_request(row, f"{field}.requests[{index}]", call, order, shift, block_size, previous))
    return Stream(marker.agent_id, tuple(sorted(requests, key=_by_time)), marker.tool_tokens + marker.system_tokens)


def _by_time(request: Request) -> tuple[float, int]:
    return request.start_seconds, request.order


def session_from_weka(weka: WekaSession, path: Path, row_number: int | None = None) -> Session:
    """The session that `weka` records. Sub-agents before the first root call have no parent turn and are left out, as AgentX does.

    Raises TraceError for what the schema cannot say: counts missing or given twice, more ids than blocks, one agent id twice.
    """
    row = _Row(path, row_number)
    root: list[Request] = []
    subagents: list[Stream] = []
    for order, entry in enumerate(weka.requests):
        field = f"requests[{order}]"
        if isinstance(entry, WekaCall):
            root.append(_request(row, field, entry, order, 0.0, weka.block_size, root[-1] if root else None))
        elif root:
            if any(stream.name == entry.agent_id for stream in subagents):
                raise row.error(f"agent id {entry.agent_id!r} is used twice", f"{field}.agent_id")
            subagents.append(_subagent(row, field, entry, order, weka.block_size))
    head_tokens = weka.tool_tokens + weka.system_tokens
    return Session(weka.id, weka.block_size, Stream("", tuple(sorted(root, key=_by_time)), head_tokens), tuple(subagents))


_DECODER = msgspec.json.Decoder(WekaSession)


def _read_weka(data: bytes, path: Path, row_number: int | None) -> Session:
    try:
        weka = _DECODER.decode(data)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".") or None
        raise TraceError(problem, path=path, row=row_number, field=field) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not valid JSON: {error}", path=path, row=row_number) from None
    return session_from_weka(weka, path, row_number)


TRACE_FORMATS: dict[str, Callable[[bytes, Path, int | None], Session]] = {"weka": _read_weka}
"""Readers by name: (one session's JSON text, its file, its line or None) → Session, or TraceError."""

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """Where one session's text lies: a whole .json file, or `length_bytes` at `offset_bytes` of a .jsonl file."""

    path: Path
    row: int | None = None
    offset_bytes: int = 0
    length_bytes: int | None = None

    def read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset_bytes)
                return file.read(-1 if self.length_bytes is None else self.length_bytes).removeprefix(_BOM)
        except OSError as error:
            raise TraceError(f"cannot be read: {error.strerror}", path=self.path) from None


def _lines(path: Path) -> Iterator[TraceEntry]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b" \t\r\n" + _BOM):
                    yield TraceEntry(path, number, offset, len(line))
                offset += len(line)
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}", path=path) from None


def find_entries(path: Path) -> list[TraceEntry]:
    """The sessions of `path`, unread: a .json file, a .jsonl file (one session a line) or a folder of either, in order of name.

    Raises TraceError if there is nothing there.
    """
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in {".json", ".jsonl"})
    elif path.exists():
        files = [path]
    else:
        raise TraceError("no such file or folder", path=path)
    entries: list[TraceEntry] = []
    for file in files:
        entries.extend(_lines(file) if file.suffix == ".jsonl" else [TraceEntry(file)])
    if not entries:
        raise TraceError("no sessions here (expected .json files, or .jsonl with one session a line)", path=path)
    return entries


class TraceSet(Sequence[Session]):
    """The sessions of a path, read when asked for and not kept.

    Raises TraceError when a session is not valid, and in `checked` also when two sessions share an id: there `faults` decides, who is
    strict if none is given.
    """

    def __init__(self, path: Path, trace_format: str = "weka", faults: RowFaults | None = None) -> None:
        self.path = path
        self._faults = faults or RowFaults(strict=True)
        self._entries = find_entries(path)
        self._read = TRACE_FORMATS[trace_format]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Session:  # type: ignore[override]  # no slices: a slice would read all of it
        entry = self._entries[index]
        return self._read(entry.read(), entry.path, entry.row)

    def odd(self, index: int, session: Session) -> TraceError | None:
        """What is worth a word in this session, which is read all the same; None if nothing is."""
        requests = [request for stream in session.streams for request in stream.requests]
        kinds = {
            "prompts shrink (the history was compacted or cut)": sum(request.shrinks for request in requests),
            "calls generated nothing": sum(not request.num_output_tokens for request in requests),
        }
        problem = "; ".join(f"{number} {what}" for what, number in kinds.items() if number)
        return self.error(index, problem) if problem else None

    def error(self, index: int, problem: str, field: str | None = None) -> TraceError:
        """What is wrong with a session, by its number."""
        return TraceError(problem, path=self._entries[index].path, row=self._entries[index].row, field=field)

    def checked(self) -> Iterator[Session]:
        """Every session once, in order. A bad one, or one whose id was used before, goes to the faults: in a strict reading, TraceError."""
        seen: dict[str, int] = {}
        for index in range(len(self)):
            try:
                session = self[index]
                first = seen.setdefault(session.id, index)
                if first != index:
                    line = "" if (row := self._entries[first].row) is None else f", line {row}"
                    raise self.error(index, f"session id {session.id!r} is already used by {self._entries[first].path}{line}", "id")
            except TraceError as error:
                self._faults.skip(error)
                continue
            if (odd := self.odd(index, session)) is not None:
                self._faults.flag(odd)
            yield session
