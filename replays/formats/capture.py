"""Reads what a server captured of its own turns (`prefix_cache.captured`): the files of one or more runs, in order of name.

A last line without line break was cut off by a crash or a full disk, and is left out. Ids of different runs are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from prefix_cache.captured import VERSION, CapturedTurn, CaptureHeader, CaptureLine, IdSums
from replays.formats.rows import Call, Line, as_ids, lines_of, sessions_of
from replays.traces import Request, Session, TraceError

_DECODER: msgspec.json.Decoder[CaptureLine] = msgspec.json.Decoder(CaptureLine)


def starts_capture(row: Mapping[str, Any]) -> bool:
    """Whether a file that begins with this row is of this form."""
    return row.get("kind") == "capture"


def read_captures(files: Sequence[Path]) -> list[Session]:
    """The sessions of all files. Raises TraceError."""
    calls: list[Call] = []
    sizes: set[int] = set()
    for file in files:
        for header, turn, ids in _turns(file):
            sizes.add(header.block_size)
            calls.append(_call(header, turn, ids))
    if not calls:
        raise TraceError("no turn was captured here", path=files[0])
    if len(sizes) > 1:
        raise TraceError(f"captured with blocks of {sorted(sizes)} tokens; keep one size in a folder", path=files[0])
    return sessions_of(_with_echoes(calls), sizes.pop())


def _turns(file: Path) -> Iterator[tuple[CaptureHeader, CapturedTurn, list[int]]]:
    header: CaptureHeader | None = None
    sums = IdSums()
    for line in lines_of(file):
        entry = _decode(line)
        if isinstance(entry, CaptureHeader):
            if entry.version != VERSION:
                raise line.error(f"version {entry.version}; this program reads {VERSION}", "version")
            header, sums = entry, IdSums()
        elif entry is None:
            return
        elif header is None:
            raise line.error("no header before it")
        elif isinstance(entry, CapturedTurn):
            try:
                yield header, entry, sums.add(entry)
            except ValueError as error:
                raise line.error(str(error), "kept") from None


def _decode(line: Line) -> CaptureLine | None:
    """The line's entry; None for a last one that was cut off."""
    try:
        return _DECODER.decode(line.text)
    except msgspec.DecodeError as error:
        if not line.is_whole and not isinstance(error, msgspec.ValidationError):
            return None
        problem, _, place = str(error).partition(" - at `$")
        raise line.error(problem, place.rstrip("`").lstrip(".") or None) from None


def _call(header: CaptureHeader, turn: CapturedTurn, ids: list[int]) -> Call:
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
    return Call(turn.session, turn.parent, request)


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
