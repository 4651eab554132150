"""Where a prompt leaves a history, and what kind of difference that is. Kinds, places, counts and names of tools: never a word of the text.

The ledger keeps digests of what was said and not what was said, so a kind is told from digests and token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from agentserve.heads import changed_tools, num_equal
from agentserve.nodes import NOTE, Node, common_ancestor
from model.conversation import AssistantItem, Item, SystemItem, ToolResultItem, UserItem

_MAX_LOOKED_AT = 64
"""Items behind the difference that are searched for the one that stands at it on the other side."""


class Difference(StrEnum):
    """What the client changed at the place where its prompt leaves its history."""

    SYSTEM_CHANGED = "system_changed"
    """The system text in front of all."""
    TOOLS_CHANGED = "tools_changed"
    """The tools offered, also where the system text has changed too."""
    VOLATILE_CHANGED = "volatile_changed"
    """Something in the system text or the tools that a canonicaliser rule would have taken out, but the rule is off."""
    TEXT_CHANGED = "text_changed"
    """A message has another text."""
    ARGUMENTS_CHANGED = "arguments_changed"
    """An answer's calls have other names or arguments; its text is the same."""
    REASONING_CHANGED = "reasoning_changed"
    """An answer came back with another reasoning."""
    ITEM_MISSING = "item_missing"
    """One or more items were left out; the history goes on behind them."""
    ITEM_INSERTED = "item_inserted"
    """One or more items were put in."""
    ITEM_REPLACED = "item_replaced"
    """An item of another kind stands there, as after a compaction."""
    TURNS_TAKEN_BACK = "turns_taken_back"
    """The prompt ends before its history does: a retry, or an answer that is asked for again."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """`item` counts from 1 (0: the head; results of one answer count once), `item_kind` is what stood there, in tokens the rest.

    `token`: where the first other token stands in the prompt. `lost_tokens`: of the history behind it, which no longer serve this prompt.
    """

    difference: Difference
    item: int
    item_kind: str
    token: int
    lost_tokens: int
    tools: tuple[str, ...] = ()
    """Of other tools: the names that came (+), went (-) or changed (~)."""


def divergence(history: Node, prompt: Node) -> Divergence | None:
    """Where `prompt` leaves `history`, both given by their last nodes; None if it goes on from it."""
    shared = common_ancestor(history, prompt)
    if shared is history:
        return None
    old, new = _behind(shared, history), _behind(shared, prompt)
    if shared is None:
        return _of_heads(old[0], new[0], history.end)
    token = shared.end + (num_equal(old[0].ids, new[0].ids) if new else 0)
    item = sum(node.meaning != NOTE for node in old[0].path()) - 1
    return Divergence(_difference(old, new), item, kind_of(old[0].shape), token, history.end - token)


def volatile(token: int, lost_tokens: int) -> Divergence:
    """A prompt whose head differs from a known one by what a rule that is off would have taken out."""
    return Divergence(Difference.VOLATILE_CHANGED, 0, kind_of(None), token, lost_tokens)


def kind_of(shape: Item | None) -> str:
    """The kind of an item as records name it; None is the head."""
    match shape:
        case None:
            return "head"
        case AssistantItem():
            return "assistant"
        case UserItem():
            return "user"
        case SystemItem():
            return "system"
        case ToolResultItem():
            return "tool"
    assert_never(shape)


def _behind(shared: Node | None, end: Node) -> list[Node]:
    """The nodes from behind `shared` to `end`, in order."""
    nodes: list[Node] = []
    node: Node | None = end
    while node is not None and node is not shared:
        nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def _of_heads(old: Node, new: Node, history_tokens: int) -> Divergence:
    token = num_equal(old.ids, new.ids)
    tools = changed_tools(old.head, new.head)
    changed = Difference.TOOLS_CHANGED if tools else Difference.SYSTEM_CHANGED
    return Divergence(changed, 0, kind_of(None), token, history_tokens - token, tools)


def _difference(old: Sequence[Node], new: Sequence[Node]) -> Difference:
    """Of two paths that part: `old` is never empty, and `new` is where the prompt ends there."""
    if not new:
        return Difference.TURNS_TAKEN_BACK
    was, now = old[0], new[0]
    if now.meaning == was.meaning and now.reasoning != was.reasoning:
        return Difference.REASONING_CHANGED
    # What follows is the same again: then one stands for the other, also where a client says the same words often.
    in_place = len(old) > 1 and len(new) > 1 and old[1].meaning == new[1].meaning
    if not in_place and was.meaning in _meanings(new[1:]):
        return Difference.ITEM_INSERTED
    if not in_place and now.meaning in _meanings(old[1:]):
        return Difference.ITEM_MISSING
    if kind_of(was.shape) != kind_of(now.shape):
        return Difference.ITEM_REPLACED
    same_text = was.said is not None and was.said == now.said
    return Difference.ARGUMENTS_CHANGED if same_text else Difference.TEXT_CHANGED


def _meanings(nodes: Sequence[Node]) -> set[bytes]:
    return {node.meaning for node in nodes[:_MAX_LOOKED_AT]}
