"""What the unaligned ends of prompts cost on recorded sessions, by the size of the unit that can be used again. Arithmetic, no engine.

Accounted as hits without an eviction: a call shares the leading known ids of its session, or where it goes on from the call before it,
that prompt and all of its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from prefix_cache.alignment import head_padding_gain, reused_tokens
from replays.generator import GeneratorSettings, generate_sessions
from replays.traces import Request, Session, TraceSet, session_from_weka

BLOCK, CHUNK = 128, 256
GAP_SECONDS = (60.0, 10.0, 0.0)
"""Calls that come later than this after the one before are served from chunks."""
GENERATED = GeneratorSettings(40, seed=7)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a session."""

    num_prompt_tokens: int
    num_shared_tokens: int
    gap_seconds: float
    """Since the call before it in its stream ended; 0 for the first."""
    shares_head: bool
    """It is a stream's first, and begins like what its session has computed."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Tokens prefilled in a median call and in all, and the share of each that the better setting saves."""

    name: str
    median_before: float
    median_after: float
    total_saved_share: float

    @property
    def saved_share(self) -> float:
        return 1 - self.median_after / self.median_before


def measure(traces: Path | None) -> tuple[list[Alignment], int]:
    """The comparisons, the last one with all hits in chunks; and the number of sessions. Without traces: generated sessions."""
    sessions = list(_sessions(traces))
    calls = [call for session in sessions for call in _calls(session)]
    found = [
        _compare("GPU blocks of 64 for 128", calls, lambda _: BLOCK, lambda _: BLOCK // 2),
        _compare("GPU blocks of 16 for 128", calls, lambda _: BLOCK, lambda _: BLOCK // 8),
    ]
    filled = sum(max(0, head_padding_gain(call.num_shared_tokens, BLOCK, 2)) for call in calls if call.shares_head)
    total = sum(_prefilled(call, BLOCK) for call in calls)
    middle = median(_prefilled(call, BLOCK) for call in calls)
    found.append(Alignment("shared heads filled up to a block", middle, middle, filled / total))
    for gap in GAP_SECONDS:
        name = f"chunks of 128 for 256, calls later than {gap:.0f} s" if gap else "chunks of 128 for 256, every call"
        found.append(_compare(name, calls, partial(_unit_after, gap), lambda _: BLOCK))
    return found, len(sessions)


def _unit_after(gap_seconds: float, call: Call) -> int:
    return CHUNK if call.gap_seconds >= gap_seconds else BLOCK


def _compare(name: str, calls: list[Call], before: Callable[[Call], int], after: Callable[[Call], int]) -> Alignment:
    old = [_prefilled(call, before(call)) for call in calls]
    new = [_prefilled(call, after(call)) for call in calls]
    return Alignment(name, median(old), median(new), 1 - sum(new) / sum(old))


def _prefilled(call: Call, unit: int) -> int:
    return call.num_prompt_tokens - reused_tokens(call.num_shared_tokens, call.num_prompt_tokens, unit)


def _sessions(traces: Path | None) -> Iterator[Session]:
    if traces is not None:
        yield from TraceSet(traces)
    else:
        yield from (session_from_weka(session, Path("generated")) for session in generate_sessions(GENERATED))


def _calls(session: Session) -> Iterator[Call]:
    known: set[int] = set()
    order = sorted(
        (request.start_seconds, request.order, number, index)
        for number, stream in enumerate(session.streams)
        for index, request in enumerate(stream.requests)
    )
    for _, _, number, index in order:
        requests = session.streams[number].requests
        request, previous = requests[index], requests[index - 1] if index else None
        run = next((place for place, block in enumerate(request.hash_ids.tolist()) if block not in known), len(request.hash_ids))
        known.update(request.hash_ids.tolist())
        shared = min(run * session.block_size, request.num_prompt_tokens)
        gap = 0.0
        if previous is not None:
            gap = request.start_seconds - previous.end_seconds
            shared = max(shared, _continued(request, previous, run, session.block_size))
        yield Call(request.num_prompt_tokens, shared, gap, shares_head=index == 0 and shared > 0)


def _continued(request: Request, previous: Request, run: int, block_size: int) -> int:
    """What a call shares with the one before it if it goes on from its answer, whose last token has no KV."""
    if run < previous.num_prompt_tokens // block_size:
        return 0
    return min(previous.num_prompt_tokens + max(0, previous.num_output_tokens - 1), request.num_prompt_tokens)
