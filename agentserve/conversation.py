"""A conversation as it comes in: digested by bytes at once, parsed only where the ledger does not know it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from msgspec import Raw
from xxhash import xxh3_128

from model.conversation import Head, Item, Json, ToolCall


def running_digests(seed: bytes, parts: Iterable[bytes | Raw]) -> list[bytes]:
    """16 bytes for `seed` alone, then for it and each longer run of `parts`."""
    digest = xxh3_128(seed)
    digests = [digest.digest()]
    for part in parts:
        digest.update(part)
        digests.append(digest.digest())
    return digests


class Conversation(Protocol):
    """A history in some dialect.

    `chain[0]` is the digest of the head and the first `first` messages after it, as the client sent them; `chain[i]` also covers the i
    messages that follow. `first` is above zero where the beginning was recognised by its bytes and not parsed.
    """

    @property
    def chain(self) -> Sequence[bytes]: ...

    @property
    def first(self) -> int: ...

    def whole(self) -> Conversation:
        """The same history with `first` zero."""
        ...

    def tail(self) -> list[bytes]:
        """The running digests of the messages behind the head alone, from none of them to all; only where `first` is zero.

        Those of different dialects, which may mean different things by the same bytes, never meet.
        """
        ...

    def head(self) -> Head:
        """Parse the head; only where `first` is zero. Raises InvalidRequest."""
        ...

    def steps(self, start: int) -> Sequence[tuple[int | None, list[Item]]]:
        """Parse messages after the first `start` (at least `first`): for each step of the ledger, the messages up to its end and its items.

        The end is None inside a message that holds more than one step.
        Raises InvalidRequest naming the message at fault.
        """
        ...


APPEND = "x-agentserve-append"
"""Request header: "true" says that the messages are only those that follow the session's latest answer."""


@dataclass(frozen=True, slots=True)
class Onto:
    """What an appended conversation follows: `seed` keeps its digests apart from all others, `calls` may be answered by its results."""

    seed: bytes
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the model may or must call: `names` only (None: any tool that is offered), one call at most with `single`."""

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] | None = None
    single: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the model may call what it likes."""
        return self == ToolChoice()


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What the client asked for beside the history. `sampling` in the engine's own names; `max_tokens` None: what is left.

    `answer_id`: the answer's, under which a later turn may ask what has changed since. `since`: the id of such an answer.
    """

    max_tokens: int | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    priority: int | None = None
    xargs: Mapping[str, Json] = field(default_factory=dict)
    tools: ToolChoice = ToolChoice()
    logprobs: int | None = None
    """How many likely tokens to name beside each token of the text; None: no log probabilities."""
    num_choices: int = 1
    """Answers to generate for the one prompt."""
    answer_id: str | None = None
    since: str | None = None
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The client's names of the engine's fields, where they differ."""
