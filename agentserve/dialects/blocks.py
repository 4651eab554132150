"""Cuts a turn's deltas into blocks — reasoning, text, one call each — for the dialects whose answers are lists of blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from model.chat import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta, TokenLogprob

Kind: TypeAlias = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, slots=True)
class Block:
    """A whole block. `text` of a call: its arguments as JSON text; `call_id` and `name` are empty for other kinds."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Opened:
    """`block` begins; its text is empty yet."""

    block: Block


@dataclass(frozen=True, slots=True)
class Grown:
    """`fragment` was added to the open block."""

    block: Block
    fragment: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed:
    """`block` is whole."""

    block: Block


Change: TypeAlias = Opened | Grown | Closed


class BlockCutter:
    """Follows the deltas of one turn. `blocks` are those that are whole, in order."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def feed(self, deltas: Iterable[Delta]) -> Iterator[Change]:
        """The changes that `deltas` make."""
        for delta in deltas:
            match delta:
                case TextDelta(text, logprobs):
                    yield from self._text("text", text, logprobs)
                case ReasoningDelta(text):
                    yield from self._text("reasoning", text)
                case CallStart(_, call_id, name):
                    yield from self._begin("call", call_id, name)
                case CallArguments(_, fragment):
                    yield self._grow(fragment)

    def finish(self) -> Iterator[Change]:
        """Close the last block."""
        if self._open is not None:
            block = replace(self._open, text="".join(self._parts), logprobs=tuple(self._logprobs))
            self._open = None
            self.blocks.append(block)
            yield Closed(block)

    def _text(self, kind: Kind, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        self._logprobs += logprobs
        yield self._grow(text, logprobs)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self.finish()
        self._open, self._parts, self._logprobs = Block(len(self.blocks), kind, "", call_id, name), [], []
        yield Opened(self._open)

    def _grow(self, fragment: str, logprobs: tuple[TokenLogprob, ...] = ()) -> Grown:
        assert self._open is not None, "arguments without a call"
        self._parts.append(fragment)
        return Grown(self._open, fragment, logprobs)

    def say_something(self) -> Iterator[Change]:
        """Begin an empty text if nothing has been said, for dialects where an answer without a block would not be sent back."""
        if self._open is None and not self.blocks:
            yield from self._begin("text")


def cut(deltas: Iterable[Delta], *, say_something: bool = False) -> list[Block]:
    """The blocks of a whole turn; with `say_something` at least an empty text."""
    cutter = BlockCutter()
    for _ in cutter.feed(deltas):
        pass
    if say_something:
        for _ in cutter.say_something():
            pass
    for _ in cutter.finish():
        pass
    return cutter.blocks
