"""A conversation as it comes in: digested by bytes at once, parsed only where the ledger does not know it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from model.conversation import Head, Item, Json


class Conversation(Protocol):
    """A history in some dialect.

    `chain[0]` is the digest of the head as the client sent it, `chain[i]` the running digest up to and with message i after the head.
    """

    @property
    def chain(self) -> Sequence[bytes]: ...

    def head(self) -> Head:
        """Parse the head. Raises InvalidRequest."""
        ...

    def steps(self, start: int) -> list[tuple[int, list[Item]]]:
        """Parse messages after the first `start`: for each step of the ledger, the messages up to its end and its items.

        Raises InvalidRequest naming the message at fault.
        """
        ...


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """What the client asked for beside the history. `sampling` in the engine's own names; `max_tokens` None: what is left."""

    max_tokens: int | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    priority: int | None = None
    xargs: Mapping[str, Json] = field(default_factory=dict)
