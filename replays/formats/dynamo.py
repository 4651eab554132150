"""NVIDIA Dynamo's request trace (`DYN_REQUEST_TRACE=1`, schema dynamo.request.trace.v1): one `request_end` event a request.

Read is what its own replay reads: `request.replay` (block size, prompt length, one sequence hash a block, the last one partial),
`output_tokens`, the times, and the session with its parent. A request without session is a session of its own. Events may stand inside an
envelope (`{"event": {…}}`). Payloads and tool events are passed over: the time that a tool took is in the gap between two requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from replays.formats.rows import Call, Line, as_ids, read_rows, sessions_of
from replays.row_faults import RowFaults
from replays.traces import Request, Session

SCHEMA = "dynamo.request.trace.v1"
_MILLI = 1000.0

Count = Annotated[int, Meta(ge=0)]


class ToolCallName(Struct, kw_only=True):
    name: str | None = None


class FinishReason(Struct, kw_only=True):
    finish_reason: str | None = None
    tool_calls: list[ToolCallName] = []


class ReplayHashes(Struct, kw_only=True):
    """What a replay needs of a prompt."""

    trace_block_size: Annotated[int, Meta(gt=0)]
    input_length: Count
    input_sequence_hashes: list[int]
    completion_sequence_hashes: list[int] | None = None


class RequestMetrics(Struct, kw_only=True):
    request_id: str
    output_tokens: Count | None = None
    request_received_ms: Count | None = None
    total_time_ms: Annotated[float, Meta(ge=0)] | None = None
    replay: ReplayHashes | None = None
    finish_reason_metadata: FinishReason | None = None


class AgentContext(Struct, kw_only=True):
    session_id: str
    parent_session_id: str | None = None


class TraceEvent(Struct, kw_only=True):
    """One event on the wire; what is not named here is passed over."""

    schema: str = ""
    event_type: str = ""
    event_time_unix_ms: Count = 0
    agent_context: AgentContext | None = None
    request: RequestMetrics | None = None


class Envelope(Struct, kw_only=True):
    event: TraceEvent


_EVENT = msgspec.json.Decoder(TraceEvent)
_ENVELOPE = msgspec.json.Decoder(Envelope)
_KNOWN_EVENTS = ("request_end", "request_payload", "tool_start", "tool_end", "tool_error")


def starts_dynamo(row: Mapping[str, Any]) -> bool:
    """Whether a file that begins with this row is of this form."""
    event = row.get("event", row)
    return isinstance(event, dict) and event.get("schema") == SCHEMA


def read_dynamo(files: Sequence[Path], faults: RowFaults) -> list[Session]:
    """The sessions of all events. A `request_end` that its own replay would refuse is a bad row, too. Raises TraceError."""
    reader = _Reader()
    calls = [call for _, call in read_rows(files, reader.read, faults) if call is not None]
    if not reader.size:
        raise Line(files[0], 1, b"").error("no request_end event here")
    return sessions_of(calls, reader.size, faults)


class _Reader:
    """Makes calls of lines. What a sound row brings holds for those behind it: its block size, and that its id is taken."""

    def __init__(self) -> None:
        self.size = 0
        self._seen: set[str] = set()

    def read(self, line: Line) -> Call | None:
        """The call that the line ends; None for another event. Raises TraceError."""
        event = _event(line)
        if event.event_type != "request_end":
            return None
        request, replay = event.request, event.request.replay if event.request else None
        if request is None or replay is None:
            raise line.error("a request_end without replay hashes", "request.replay")
        if request.request_id in self._seen:
            raise line.error(f"request {request.request_id!r} is there twice", "request.request_id")
        if self.size and replay.trace_block_size != self.size:
            raise line.error(f"blocks of {replay.trace_block_size} tokens after blocks of {self.size}", "request.replay.trace_block_size")
        made = _request(line, event.event_time_unix_ms, request, replay)
        self.size = replay.trace_block_size
        self._seen.add(request.request_id)
        context = event.agent_context or AgentContext(session_id=request.request_id)
        return Call(context.session_id, context.parent_session_id, made, line)


def _event(line: Line) -> TraceEvent:
    event = line.decode(_ENVELOPE).event if line.text.lstrip().startswith((b'{"event":', b'{ "event":')) else line.decode(_EVENT)
    if event.event_type not in _KNOWN_EVENTS:
        raise line.error(f"{event.event_type!r} is no event of {SCHEMA}", "event_type")
    return event


def _request(line: Line, ended_ms: int, request: RequestMetrics, replay: ReplayHashes) -> Request:
    if request.output_tokens is None:
        raise line.error("is missing", "request.output_tokens")
    if request.request_received_ms is None:
        raise line.error("is missing", "request.request_received_ms")
    wanted = -(-replay.input_length // replay.trace_block_size)
    if len(replay.input_sequence_hashes) != wanted:
        problem = f"{len(replay.input_sequence_hashes)} hashes for {replay.input_length} tokens in blocks of {replay.trace_block_size}"
        raise line.error(f"{problem}; {wanted} are needed", "request.replay.input_sequence_hashes")
    start = request.request_received_ms / _MILLI
    duration = request.total_time_ms / _MILLI if request.total_time_ms is not None else max(0.0, ended_ms / _MILLI - start)
    finish = request.finish_reason_metadata or FinishReason()
    tools = tuple(call.name for call in finish.tool_calls if call.name)
    return Request(
        order=0,
        start_seconds=start,
        duration_seconds=duration,
        num_prompt_tokens=replay.input_length,
        num_output_tokens=request.output_tokens,
        hash_ids=as_ids(replay.input_sequence_hashes),
        stop=_stop(finish),
        tools=tools,
    )


def _stop(finish: FinishReason) -> str:
    """In the words of weka traces."""
    if finish.tool_calls or finish.finish_reason == "tool_calls":
        return "tool_use"
    return "end_turn" if finish.finish_reason == "stop" else ""
