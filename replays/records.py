"""What a replay writes down: one record a request, a sample of the engine's metrics now and then, one header a run. JSON lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

Phase: TypeAlias = Literal["warmup", "profiling"]


class Record(Struct, tag_field="kind", tag="request", omit_defaults=True, kw_only=True):
    """One request. Times are seconds on one monotonic clock of the machine; None is "not known", never zero."""

    phase: Phase
    session: str
    play: int
    stream: str
    index: int
    number: int = 0
    """Of the call in its session's tree."""
    follows: int | None = None
    """The call whose prompt and answer this prompt continues."""
    started: float
    ended: float
    first_content: float | None = None
    last_content: float | None = None
    error: str | None = None
    overflow: bool = False
    """The prompt was longer than the model's context: the session ends there, and it is not a failure of the server."""
    planned_prompt_tokens: float = 0
    num_theoretical_blocks: int = 0
    num_blocks: int = 0
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    turn: str | None = None
    ceiling_tokens: int | None = None
    ceiling_block_tokens: int | None = None
    predicted_tokens: int | None = None
    missed_tokens: dict[str, int] | None = None
    num_tool_calls: int | None = None
    """Calls in the answer; not known where answers are not kept."""
    edited: bool = False
    """The client changed its history in this turn (the trace says so)."""


class Sample(Struct, tag_field="kind", tag="sample", omit_defaults=True, kw_only=True):
    """The engine's own metrics at one moment; counters are totals since the engine started."""

    time: float
    phase: Phase
    kv_usage: float | None = None
    kv_resident_tokens: float | None = None
    kv_capacity_tokens: int | None = None
    block_size: int | None = None
    """Tokens of a KV block."""
    num_computed_tokens: float | None = None
    num_gpu_hit_tokens: float | None = None
    num_external_hit_tokens: float | None = None
    num_preemptions: float | None = None


class Header(Struct, tag_field="kind", tag="header", omit_defaults=True, kw_only=True):
    """What was run. `engine` is what answered: name, version and model."""

    engine: str
    trace: str
    seed: int
    concurrency: int
    scale: float
    time_scale: float
    assistant: str
    url: str
    marker: str = "on"
    """Whether each play had a marker of its own in front of its first user message."""
    delays: str = "kept"
    """Idle times: `kept` (over the time scale), or `zero`."""


class End(Struct, tag_field="kind", tag="end", omit_defaults=True, kw_only=True):
    """The profiling phase as measured."""

    started: float
    ended: float
    num_cancelled: int = 0
    """Requests still in flight when the grace period was over; neither counted as done nor as failed."""


Entry: TypeAlias = Record | Sample | Header | End


class RecordsError(ValueError):
    """A file of records cannot be read; the message says which and where."""


@dataclass(frozen=True, slots=True)
class Run:
    """All that one replay wrote down."""

    header: Header
    records: tuple[Record, ...]
    samples: tuple[Sample, ...]
    end: End | None


def write_entries(path: Path, entries: Iterable[Entry]) -> None:
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for entry in entries:
            file.write(encoder.encode(entry) + b"\n")


def read_run(path: Path) -> Run:
    """The run in a file of records. Raises RecordsError when it is unreadable, malformed or has no header."""
    decoder: msgspec.json.Decoder[Entry] = msgspec.json.Decoder(Entry)
    entries: list[Entry] = []
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                entries.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise RecordsError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise RecordsError(f"{path}: cannot be read: {error.strerror}") from None
    header = next((entry for entry in entries if isinstance(entry, Header)), None)
    if header is None:
        raise RecordsError(f"{path}: no header; the replay ended before it began")
    return Run(
        header,
        tuple(entry for entry in entries if isinstance(entry, Record)),
        tuple(entry for entry in entries if isinstance(entry, Sample)),
        next((entry for entry in reversed(entries) if isinstance(entry, End)), None),
    )
