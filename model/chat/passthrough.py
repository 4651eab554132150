"""For a model whose template cannot be served token by token: nothing is rendered here, the engine does it, and no session is exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from model.chat import Delta, OutputParser, Piece, Unrenderable
from model.conversation import AssistantItem, Head, Item, Json, Tool

NAME = "passthrough"
_WHY = "conversations are passed through to the engine, so nothing can be rendered here"


class PassThrough:
    """A `ChatFormat` that has no form for anything. Whole conversations never come to it: they go to the engine's own chat route."""

    name = NAME
    stop_ids: tuple[int, ...] = ()
    call_ids: tuple[int, ...] = ()

    def head(self, head: Head) -> list[Piece]:
        """Raises Unrenderable."""
        raise Unrenderable(_WHY)

    def item(self, item: Item, previous: Item | None) -> list[Piece]:
        """Raises Unrenderable."""
        raise Unrenderable(_WHY)

    def open_turn(self, previous: Item | None) -> list[Piece]:
        """Nothing: no history ends here."""
        return []

    def close_turn(self, last_id: int | None) -> list[Piece]:
        """Nothing: no history ends here."""
        return []

    def parser(self, tools: Sequence[Tool]) -> OutputParser:
        """A parser of nothing."""
        return _Silent()

    def call_constraint(self, tools: Sequence[Tool], *, required: bool, single: bool) -> Mapping[str, Json] | None:
        """None: the engine knows its own calls."""
        return None


class _Silent:
    open_call = False

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        return []

    def finish(self) -> list[Delta]:
        return []

    def item(self) -> AssistantItem:
        return AssistantItem()
