"""What of a stored answer still stands where the client has only a part of it, or has it in a form that no dialect knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from model.chat import Delta, OutputParser, ReasoningDelta, TextDelta
from model.conversation import AssistantItem, Item

_THOUGHT = re.compile(r"\s*<(think|thinking|mm:think)>(.*?)</\1>(.*)", re.DOTALL)


def without_inline_thought(step: Sequence[Item]) -> Sequence[Item] | None:
    """An answer whose text begins with its reasoning in a tag, as some clients keep it: with that in its place. None for others."""
    item = step[0]
    if not isinstance(item, AssistantItem) or item.reasoning is not None:
        return None
    found = _THOUGHT.fullmatch(item.text)
    return None if found is None else (structs.replace(item, text=found[3], reasoning=found[2]),)


@dataclass(frozen=True, slots=True)
class Kept:
    """A beginning of generated ids, and the text behind it that ends inside the next id."""

    num_ids: int
    rest: str


def kept_of(ids: Sequence[int], item: AssistantItem, parser: OutputParser) -> Kept | None:
    """How many of the generated `ids` say no more than `item`, whose text the answer begins with; None where it is another answer.

    Outer white space does not count. Reasoning must be the same where `item` has one. Calls belong to whole answers only.
    """
    wanted = item.text.strip()
    if not wanted or item.calls:
        return None
    said, reasoning = "", ""
    kept = Kept(0, wanted)
    for number, token in enumerate(ids, 1):
        deltas = parser.feed((token,))
        said += _joined(deltas, TextDelta)
        reasoning += _joined(deltas, ReasoningDelta)
        shown = said.lstrip()
        # An id that shows nothing yet holds a part of a character, or stands before the text: it is kept with what follows it.
        if deltas and shown and wanted.startswith(shown.rstrip()):
            kept = Kept(number, wanted[len(shown) :])
        if len(shown.rstrip()) >= len(wanted):
            same_thought = item.reasoning is None or item.reasoning.strip() == reasoning.strip()
            return kept if shown.startswith(wanted) and same_thought else None
    return None


def _joined(deltas: Sequence[Delta], kind: type[TextDelta | ReasoningDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta | ReasoningDelta) and isinstance(delta, kind))
