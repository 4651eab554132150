"""Chat formats: how a conversation becomes tokens and how generated tokens become a conversation again.

A format renders *incrementally*: `head + item + item + … + open_turn` is the prompt, and what was rendered never changes when more
is appended. Whatever closes a block stands at the start of what follows it, so that generated tokens can be followed directly.
Text is rendered as `str` pieces, control tokens as `int` pieces: outside text can never become a control token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from model.conversation import AssistantItem, Head, Item, Json, Tool

Piece: TypeAlias = "str | int"


class Unrenderable(ValueError):
    """A format has no form for this head or item; the message says why."""


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One generated token's bytes and log probability, and the likeliest tokens in its place, the likeliest first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """`logprobs`: of the tokens that end in this text, where they were asked for."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; `index` counts the calls of this turn from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next fragment of call `index`'s arguments as JSON text; the fragments of a call join to one JSON object."""

    index: int
    fragment: str


Delta: TypeAlias = ReasoningDelta | TextDelta | CallStart | CallArguments


class OutputParser(Protocol):
    """Parses one turn as its tokens arrive, in any chunking, always in whole characters."""

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Take the next generated ids; return what can be shown now. Never raises: odd output becomes text."""
        ...

    def finish(self) -> list[Delta]:
        """Flush what was withheld (an open call, half a character as U+FFFD). Call once, after the last `feed`."""
        ...

    def item(self) -> AssistantItem:
        """The turn as a conversation item; its deltas joined give the same. After `finish`."""
        ...

    @property
    def open_call(self) -> bool:
        """Whether the turn ended inside a tool call (then it was cut, and is not `tool_calls` to the client)."""
        ...


class ChatFormat(Protocol):
    """One model family's format over one tokenizer. Holds no state of a conversation."""

    name: str
    stop_ids: tuple[int, ...]
    call_ids: tuple[int, ...]
    """Ids without one of which no call begins; none where calls are not told from text."""

    def head(self, head: Head) -> list[Piece]:
        """The pieces before the first item: begin of sequence, system text, tools. Raises Unrenderable."""
        ...

    def item(self, item: Item, previous: Item | None) -> list[Piece]:
        """The pieces of `item` when it follows `previous` (None: the head). Closes what `previous` left open.

        An `AssistantItem` here is one the model did not generate on this server (imported history). Raises Unrenderable.
        """
        ...

    def open_turn(self, previous: Item | None) -> list[Piece]:
        """The generation prompt after `previous`; closes what it left open."""
        ...

    def close_turn(self, last_id: int | None) -> list[Piece]:
        """What must follow generated ids that ended in `last_id` so that an item may follow (empty if it ended by itself)."""
        ...

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A fresh parser; `tools` give the argument types by their schemas."""
        ...

    def call_constraint(self, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Json] | None:
        """Structured output, in the engine's terms, that allows calls of `tools` only, at most one with `single`; None: it cannot.

        It holds from the first generated token, reasoning included. With `required` the turn ends with a call, else it may.
        """
        ...
