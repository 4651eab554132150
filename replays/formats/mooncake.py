"""Mooncake's trace form: one request a row, with its arrival and the ids of its prompt's blocks. Dynamo and AIPerf write it too.

`timestamp` and `delay` are milliseconds; `input_length`, `output_length`, `timestamp` and `delay` may be called `input_tokens`,
`output_tokens`, `created_time` and `delay_ms`. Ids are of global scope. Rows without `session_id` are sessions of one request. In rows of
one session each later prompt is given whole, or as what it adds (AIPerf): it is whole where it begins with the ids of the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from replays.formats.rows import Call, Line, as_ids, read_rows, sessions_of
from replays.row_faults import RowFaults
from replays.traces import HashIds, Request, Session, TraceError

BLOCK_SIZE = 512
"""Tokens of a block, as in Mooncake's own traces, where the file's rows do not need another."""
_BLOCK_SIZES = (512, 256, 128, 64, 32, 16)
_MILLI = 1000.0
_FRESH = 1 << 62

Count = Annotated[int, Meta(ge=0)]


class MooncakeRow(Struct, kw_only=True):
    """One row on the wire. Fields that are not named here say nothing of blocks or time and are passed over."""

    session_id: str | None = None
    input_length: Count | None = None
    input_tokens: Count | None = None
    output_length: Count | None = None
    output_tokens: Count | None = None
    hash_ids: list[int] = []
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None


_DECODER = msgspec.json.Decoder(MooncakeRow)


def starts_mooncake(row: Mapping[str, Any]) -> bool:
    """Whether a file that begins with this row is of this form."""
    return ("input_length" in row or "input_tokens" in row) and "requests" not in row


def read_mooncake(files: Sequence[Path], faults: RowFaults) -> list[Session]:
    """The sessions of all rows. Bad are rows without lengths or a time, that ask for nothing, that repeat the one before them in their
    session, or whose ids the block size of the others does not explain. What follows a bad row of a session follows the last sound one.
    Raises TraceError.
    """
    rows = list(read_rows(files, _row, faults))
    size = _block_size([row for _, row in rows])
    last: dict[str, tuple[MooncakeRow, Request]] = {}
    calls: list[Call] = []
    for number, (line, row) in enumerate(rows):
        name = row.session_id or f"row-{number + 1:06d}"
        try:
            request = _request(line, row, size, last.get(name), number)
        except TraceError as error:
            faults.skip(error)
            continue
        last[name] = row, request
        calls.append(Call(name, None, request, line))
    if not calls:
        raise TraceError("no row here is sound", path=files[0])
    return sessions_of(calls, size, faults)


def _row(line: Line) -> MooncakeRow:
    row = line.decode(_DECODER)
    _either(line, "input_length", row.input_length, row.input_tokens)
    if not _either(line, "output_length", row.output_length, row.output_tokens):
        raise line.error("nothing is generated", "output_length")
    stamp = row.timestamp if row.timestamp is not None else row.created_time
    delay = row.delay if row.delay is not None else row.delay_ms
    for field, value in (("timestamp", stamp), ("delay", delay)):
        if value is not None and value < 0:
            raise line.error("is negative", field)
    return row


def _block_size(rows: Sequence[MooncakeRow]) -> int:
    """The usual size whose blocks hold the prompts of most rows in as many ids as those have; of several the largest."""
    fits = [sum(_fits(row, size) for row in rows if row.hash_ids) for size in _BLOCK_SIZES]
    return _BLOCK_SIZES[fits.index(max(fits))] if any(fits) else BLOCK_SIZE


def _fits(row: MooncakeRow, size: int) -> bool:
    tokens = row.input_length if row.input_length is not None else row.input_tokens
    return not row.hash_ids or tokens is None or tokens // size <= len(row.hash_ids) <= -(-tokens // size)


def _either(line: Line, field: str, value: int | None, other: int | None) -> int:
    found = value if value is not None else other
    if found is None:
        raise line.error("is missing", field)
    return found


def _request(line: Line, row: MooncakeRow, size: int, before: tuple[MooncakeRow, Request] | None, number: int) -> Request:
    tokens = _either(line, "input_length", row.input_length, row.input_tokens)
    if not _fits(row, size):
        raise line.error(f"{len(row.hash_ids)} ids for {tokens} tokens fit no block size that the other rows have", "hash_ids")
    if before is not None and row == before[0] and (row.timestamp is not None or row.created_time is not None):
        raise line.error(f"the row before it in session {row.session_id!r} again")
    previous = before[1] if before is not None else None
    output = _either(line, "output_length", row.output_length, row.output_tokens)
    ids = as_ids(row.hash_ids)
    if previous is not None and not _begins_with(ids, previous.hash_ids):
        tokens, ids = _added(previous, tokens, size, number)
    return Request(0, _start(line, row, previous), 0.0, tokens, output, ids, "")


def _begins_with(ids: HashIds, before: HashIds) -> bool:
    """Whether a later prompt stands there whole: then its first block is that of the one before it."""
    return bool(len(before) == 0 or (len(ids) and ids[0] == before[0]))


def _added(previous: Request, tokens: int, size: int, number: int) -> tuple[int, HashIds]:
    """(tokens, ids) of a prompt that adds `tokens` to the one before it and its answer; what is new is shared with nobody."""
    total = previous.num_prompt_tokens + previous.num_output_tokens + tokens
    kept = previous.hash_ids[: previous.num_prompt_tokens // size]
    fresh = _FRESH + number * (1 << 24) + np.arange(total // size - len(kept), dtype=np.int64)
    return total, np.concatenate([kept, fresh])


def _start(line: Line, row: MooncakeRow, previous: Request | None) -> float:
    """Seconds on the trace's clock. `delay` counts from the request before, whose own duration these rows do not know."""
    stamp = row.timestamp if row.timestamp is not None else row.created_time
    delay = row.delay if row.delay is not None else row.delay_ms
    if stamp is not None:
        return stamp / _MILLI
    if delay is not None and previous is not None:
        return previous.start_seconds + delay / _MILLI
    if previous is None:
        return 0.0
    raise line.error("a later row of a session needs a timestamp or a delay", "timestamp")
