"""How one session is played: what each call's prompt is made of, what it waits for, and for how long.

Everything here follows from the trace alone, before anything is sent.

*Prompts.* A call extends the earlier prompt of its tree with which it shares most blocks (nearly always its stream's last). Where it
holds all whole blocks of that prompt, and that call had ended, it appends: an assistant part as long as its output, then a user part.
Where it shares less, the history is cut at the last shared block and goes on from there with another message: an edit, as a client does
that compacts. What the server's template puts in front of every prompt is taken off the first parts, as far as they are that long.

*Order.* A call waits for the previous call of its stream and, in each other stream, for the last call that had ended before it began
(so parents join their sub-agents). Its recorded idle time is counted from the completion of whichever of these ended last.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np

from replays.text import Words, scaled
from replays.theoretical import TheoreticalHit, theoretical_hits
from replays.traces import HashIds, Request, Session

Role: TypeAlias = Literal["system", "user", "assistant"]

MESSAGE_TOKENS = 6
"""Control tokens that a chat format spends on one message; written text is shortened by as much."""
CACHE_BUST_TOKENS = 14
"""About what the marker line costs in a byte-level vocabulary."""

_MAX_TIPS = 24


@dataclass(frozen=True, slots=True)
class Part:
    """One message of a prompt. Its words come from the ids of call `writer`, which was the first to send it."""

    role: Role
    writer: int
    start_tokens: int
    words: Words
    answer_to: int | None = None
    """For an assistant part that was not cut: the call whose output it stands for."""


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One call of the tree. Calls are numbered over the tree in recorded order; `stream`, `index` say where it stands."""

    number: int
    stream: int
    index: int
    request: Request
    parts: tuple[Part, ...]
    max_tokens: int
    waits_for: tuple[int, ...]
    anchor: int | None
    """The one of `waits_for` whose completion starts the idle time; None: the start of the play."""
    delay_seconds: float
    theoretical: TheoreticalHit
    edits: bool
    """The prompt does not hold all of the one before it."""

    @property
    def follows(self) -> int | None:
        """The call whose answer stands last in the prompt."""
        return next((part.answer_to for part in reversed(self.parts) if part.answer_to is not None), None)


@dataclass(frozen=True, slots=True)
class TreePlan:
    session: Session
    scale: float
    calls: tuple[PlannedCall, ...]
    streams: tuple[tuple[int, ...], ...]
    """Call numbers of each stream, in order."""
    answered: frozenset[int]
    """Calls whose output stands in a later prompt."""

    @property
    def start_seconds(self) -> float:
        return self.calls[0].request.start_seconds

    @property
    def duration_seconds(self) -> float:
        return max(call.request.end_seconds for call in self.calls) - self.start_seconds


def num_shared(left: HashIds, right: HashIds) -> int:
    """Length of the common prefix of two id lists."""
    shared = min(len(left), len(right))
    differs = left[:shared] != right[:shared]
    return int(differs.argmax()) if differs.any() else shared


@dataclass(frozen=True, slots=True)
class _Tip:
    """A prompt that later ones may extend."""

    number: int
    request: Request
    parts: tuple[Part, ...]

    def held_by(self, shared: int, block_size: int) -> bool:
        """Whether a prompt that shares this many blocks holds the whole of it. A partial last block is re-named when it fills up."""
        return shared >= min(len(self.request.hash_ids), self.request.num_prompt_tokens // block_size)


class _Prompts:
    """Builds the parts of each call, in recorded order."""

    def __init__(self, session: Session, scale: float, template_tokens: int) -> None:
        self._block_size = session.block_size
        self._scale = scale
        self._template_tokens = template_tokens
        self._tips: list[_Tip] = []

    def add(self, number: int, request: Request, head_tokens: int, previous: int | None) -> tuple[tuple[Part, ...], bool]:
        """(parts of call `number`, whether it edits its history). `previous` is the call before it in its stream."""
        tip, shared = self._base(request, previous)
        appends = tip is not None and self._appends(tip, shared, request, previous)
        if tip is None:
            kept: list[Part] = []
        elif appends:
            kept = list(tip.parts)
        else:
            kept = self._cut(tip.parts, min(shared * self._block_size, request.num_prompt_tokens))
        if not kept and head_tokens:
            kept.append(self._part("system", number, [], 0, min(head_tokens, request.num_prompt_tokens)))
        parts = self._extend(kept, number, request, tip if appends else None)
        self._tips = [other for other in self._tips if not (appends and other is tip)][-_MAX_TIPS:]
        self._tips.append(_Tip(number, request, parts))
        return parts, previous is not None and not appends

    def _appends(self, tip: _Tip, shared: int, request: Request, previous: int | None) -> bool:
        """Whether the prompt holds the whole of `tip`, and its answer was there: of two calls at once none can hold the other's."""
        ended = tip.number == previous or tip.request.end_seconds <= request.start_seconds
        longer = request.num_prompt_tokens > tip.request.num_prompt_tokens
        return ended and longer and tip.held_by(shared, self._block_size)

    def _base(self, request: Request, previous: int | None) -> tuple[_Tip | None, int]:
        best: _Tip | None = None
        most = 0
        for tip in sorted(self._tips, key=lambda tip: (tip.number == previous, tip.number), reverse=True):
            shared = num_shared(request.hash_ids, tip.request.hash_ids)
            whole = tip.held_by(shared, self._block_size)
            if tip.number == previous and whole:
                return tip, shared
            if shared > most:
                best, most = tip, shared
        return best, most

    def _cut(self, parts: Sequence[Part], end_tokens: int) -> list[Part]:
        kept: list[Part] = []
        for part in parts:
            if part.words.end_tokens <= end_tokens:
                kept.append(part)
                continue
            left = int(np.searchsorted(part.words.token_positions(self._scale), end_tokens))
            if left and part.start_tokens < end_tokens:
                kept.append(Part(part.role, part.writer, part.start_tokens, Words(part.words.start, left, end_tokens)))
            break
        return kept

    def _extend(self, kept: list[Part], number: int, request: Request, answered: _Tip | None) -> tuple[Part, ...]:
        parts = list(kept)
        start = parts[-1].words.end_tokens if parts else 0
        if answered is not None:
            end = start + min(answered.request.num_output_tokens, max(0, request.num_prompt_tokens - start - 1))
            parts.append(self._part("assistant", number, parts, start, end, answered.number))
            start = end
        elif parts and parts[-1].role == "user":
            # The same words as far as the ids are shared, so the message is only left where the history is.
            start = parts.pop().start_tokens
        parts.append(self._part("user", number, parts, start, max(start, request.num_prompt_tokens)))
        return tuple(parts)

    def _part(self, role: Role, number: int, before: list[Part], start_tokens: int, end_tokens: int, answer_to: int | None = None) -> Part:
        overhead = MESSAGE_TOKENS if before else MESSAGE_TOKENS + self._template_tokens
        if role == "user" and not any(part.role == "user" for part in before):
            overhead += CACHE_BUST_TOKENS
        start = (before[-1].words.start + before[-1].words.count if before else 0) + overhead
        num_words = max(1, scaled(end_tokens, self._scale) - start)
        return Part(role, number, start_tokens, Words(start, num_words, end_tokens), answer_to)


class _Order:
    """Finds what each call waits for: sorted ends per stream, searched by time, and the last call among the first so many to end."""

    def __init__(self, numbered: Sequence[tuple[int, int, Request]]) -> None:
        self._ends: dict[int, list[tuple[float, float, int]]] = {}
        for number, stream, request in numbered:
            self._ends.setdefault(stream, []).append((request.end_seconds, request.start_seconds, number))
        self._last: dict[int, list[tuple[int, float]]] = {}
        for stream, ends in self._ends.items():
            ends.sort()
            self._last[stream] = list(accumulate(((number, end) for end, _, number in ends), max))

    def frontier(self, stream: int, request: Request) -> list[tuple[float, int]]:
        """(recorded end, number) of the last call of each other stream that had ended when `request` began.

        Last by start, as the calls of a stream are played one after the other even where the recording overlaps itself.
        """
        found: list[tuple[float, int]] = []
        for other, ends in self._ends.items():
            if other == stream:
                continue
            place = bisect_right(ends, (request.start_seconds, float("inf"), 0))
            while place and ends[place - 1][1] >= request.start_seconds:
                place -= 1
            if place:
                number, end = self._last[other][place - 1]
                found.append((end, number))
        return found


def plan_session(session: Session, scale: float, template_tokens: int = 0) -> TreePlan:
    """The plan of `session` with token counts times `scale` (0 < scale ≤ 1). Raises ValueError when it has no calls.

    `template_tokens` stand in front of every prompt of the server, unscaled.
    """
    if not session.root.requests:
        raise ValueError(f"session {session.id!r} has no calls to play")
    recorded = sorted(
        ((stream, index, request) for stream, line in enumerate(session.streams) for index, request in enumerate(line.requests)),
        key=lambda entry: (entry[2].start_seconds, entry[2].order, entry[0], entry[1]),
    )
    numbered = [(number, stream, request) for number, (stream, _, request) in enumerate(recorded)]
    order = _Order(numbered)
    prompts = _Prompts(session, scale, template_tokens)
    hits = theoretical_hits(session)
    last: dict[int, tuple[float, int]] = {}
    calls: list[PlannedCall] = []
    for number, (stream, index, request) in enumerate(recorded):
        own = last.get(stream)
        waits = order.frontier(stream, request) + ([own] if own else [])
        end, anchor = max(waits, default=(recorded[0][2].start_seconds, None))
        parts, edits = prompts.add(number, request, session.streams[stream].head_tokens, own[1] if own else None)
        calls.append(
            PlannedCall(
                number=number,
                stream=stream,
                index=index,
                request=request,
                parts=parts,
                max_tokens=max(1, round(request.num_output_tokens * scale)),
                waits_for=tuple(sorted({call for _, call in waits})),
                anchor=anchor,
                delay_seconds=max(0.0, request.start_seconds - end),
                theoretical=hits[stream][index],
                edits=edits,
            )
        )
        last[stream] = (request.end_seconds, number)
    streams = tuple(tuple(call.number for call in calls if call.stream == stream) for stream in range(len(session.streams)))
    answered = frozenset(part.answer_to for call in calls for part in call.parts if part.answer_to is not None)
    return TreePlan(session, scale, tuple(calls), streams, answered)
