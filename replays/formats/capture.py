"""Reads what a server captured of its own turns (`prefix_cache.captured`): the files of one or more runs, in order of name.

A last line without line break was cut off by a crash or a full disk: it is left out, also of a strict reading, and named. Ids of
different runs are kept apart. A turn whose row is bad is missing for its session's next ones: those that keep more blocks than are
known are bad, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from prefix_cache.captured import VERSION, CapturedTurn, CaptureHeader, CaptureLine, IdSums
from replays.formats.rows import Call, Line, as_ids, read_rows, sessions_of
from replays.row_faults import RowFaults
from replays.traces import Request, Session, TraceError

_DECODER: msgspec.json.Decoder[CaptureLine] = msgspec.json.Decoder(CaptureLine)


def starts_capture(row: Mapping[str, Any]) -> bool:
    """Whether a file that begins with this row is of this form."""
    return row.get("kind") == "capture"


def read_captures(files: Sequence[Path], faults: RowFaults) -> list[Session]:
    """The sessions of all files. Raises TraceError."""
    calls: list[Call] = []
    sizes: set[int] = set()
    for file in files:
        reader = _Reader(faults)
        calls += [call for _, call in read_rows([file], reader.read, faults) if call is not None]
        sizes |= reader.sizes
    if not calls:
        raise TraceError("no turn was captured here", path=files[0])
    if len(sizes) > 1:
        raise TraceError(f"captured with blocks of {sorted(sizes)} tokens; keep one size in a folder", path=files[0])
    return sessions_of(_with_echoes(calls), sizes.pop(), faults)


class _Reader:
    """Makes calls of one file's lines. `sizes`: tokens of a block, of the runs that had a turn."""

    def __init__(self, faults: RowFaults) -> None:
        self.sizes: set[int] = set()
        self._faults = faults
        self._header: CaptureHeader | None = None
        self._sums = IdSums()

    def read(self, line: Line) -> Call | None:
        """The turn that the line holds; None for any other line, and for a last one that was cut off. Raises TraceError."""
        entry = self._decode(line)
        if isinstance(entry, CaptureHeader):
            self._header, self._sums = None, IdSums()  # of a bad header nothing may follow
            if entry.version != VERSION:
                raise line.error(f"version {entry.version}; this program reads {VERSION}", "version")
            self._header = entry
        elif entry is not None and self._header is None:
            raise line.error("no header before it")
        elif isinstance(entry, CapturedTurn) and self._header is not None:
            return self._call(line, self._header, entry)
        return None

    def _call(self, line: Line, header: CaptureHeader, turn: CapturedTurn) -> Call:
        if turn.t < 0:
            raise line.error("a time before the epoch", "t")
        try:
            ids = self._sums.add(turn)
        except ValueError as error:
            raise line.error(str(error), "kept") from None
        self.sizes.add(header.block_size)
        return _call(line, header, turn, ids)

    def _decode(self, line: Line) -> CaptureLine | None:
        try:
            return _DECODER.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem, _, place = str(error).partition(" - at `$")
            found = line.error(problem, place.rstrip("`").lstrip(".") or None)
            if line.is_whole or isinstance(error, msgspec.ValidationError):
                raise found from None
            self._faults.note(line.error("cut off: there is no line break behind it"))
            return None


def _call(line: Line, header: CaptureHeader, turn: CapturedTurn, ids: list[int]) -> Call:
    run = int(header.run, 16)
    request = Request(
        order=0,
        start_seconds=turn.t,
        duration_seconds=turn.seconds,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_output_tokens=turn.num_output_tokens,
        hash_ids=as_ids([block ^ run for block in ids]),
        stop=turn.stop,
        input_types=(turn.relation,),
        tools=tuple(turn.tools),
    )
    return Call(turn.session, turn.parent, request, line)


def _with_echoes(calls: Sequence[Call]) -> list[Call]:
    """Where the next turn of a session is exact, it holds the answer before it as it was generated."""
    later: set[str] = set()
    found: list[Call] = []
    for call in sorted(calls, key=lambda call: call.request.start_seconds, reverse=True):
        exact = call.request.input_types == ("exact",)
        found.append(replace(call, request=replace(call.request, echoed=call.stream in later, input_types=())))
        later.discard(call.stream)
        if exact:
            later.add(call.stream)
    return found[::-1]
