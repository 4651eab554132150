"""A step of the ledger's tree: what it means, and the exact token ids that stood for it."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import xxhash
from msgspec import structs

from model.conversation import AssistantItem, Head, Item, SystemItem, ToolResultItem, UserItem, meaning

Step: TypeAlias = Sequence[Item]

NOTE = b"note"
"""Where the notes behind a node stand among its children; no meaning of an item is as short."""
NO_NOTES: Mapping[str, str] = {}


class Node:
    """One step of a history (or the head), and the ids from the end of its parent to its own end.

    `end` counts the tokens from the start of the prompt to the end of this node. A generated node holds the generation prompt and the
    generated ids as the engine sent them. `holds` counts the turns and session tips that keep it alive, `owner` is the session whose
    turn ended here last. `notes`: by canonicaliser rule, what the notes up to here have told. `said` tells an answer's text from its calls.
    """

    __slots__ = (
        "chains",
        "children",
        "depth",
        "end",
        "generated",
        "head",
        "holds",
        "ids",
        "meaning",
        "notes",
        "num_answers",
        "owner",
        "parent",
        "reasoning",
        "said",
        "shape",
    )

    def __init__(self, parent: Node | None, step: Step | Head, ids: array[int], *, generated: bool = False) -> None:
        self.parent = parent
        self.children: dict[bytes, list[Node]] = {}
        self.meaning = meaning_of(step)
        self.reasoning = reasoning_of(step)
        self.said = said(step)
        self.shape = None if isinstance(step, Head) else shape(step[-1])
        self.head: Head = step if isinstance(step, Head) else parent.head if parent else Head()
        self.ids = ids
        self.end: int = len(ids) + (parent.end if parent else 0)
        self.depth: int = parent.depth + 1 if parent else 0
        self.generated = generated
        is_answer = not isinstance(step, Head) and isinstance(step[0], AssistantItem)
        self.num_answers: int = is_answer + (parent.num_answers if parent else 0)
        self.chains: list[bytes] = []
        self.holds = 0
        self.owner: str | None = None
        self.notes: Mapping[str, str] = parent.notes if parent else NO_NOTES

    def path(self) -> list[Node]:
        """The nodes from the head to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


def shape(item: Item) -> Item:
    """`item` without its texts: what a chat format may ask of the item before."""
    match item:
        case AssistantItem(_, _, calls):
            return AssistantItem(calls=tuple(structs.replace(call, arguments={}) for call in calls))
        case ToolResultItem(call_id, _):
            return ToolResultItem(call_id, "")
        case UserItem():
            return UserItem("")
        case SystemItem():
            return SystemItem("")


def meaning_of(step: Step | Head) -> bytes:
    """Equal for steps that mean the same, however a client wrote them."""
    if isinstance(step, Head):
        return meaning(step)
    if len(step) == 1:
        return meaning(step[0])
    return xxhash.xxh3_128_digest(b"".join(map(meaning, step)))


def reasoning_of(step: Step | Head) -> bytes | None:
    """16 bytes that are equal for answers of equal reasoning; None without one."""
    if isinstance(step, Head) or not isinstance(item := step[0], AssistantItem) or not (item.reasoning or "").strip():
        return None
    assert item.reasoning is not None
    return xxhash.xxh3_128_digest(item.reasoning.strip().encode("utf-8", "surrogatepass"))


def said(step: Step | Head) -> bytes | None:
    """16 bytes that are equal for answers of equal text, whatever they call; None for anything but an answer."""
    if isinstance(step, Head) or not isinstance(item := step[0], AssistantItem):
        return None
    return xxhash.xxh3_128_digest(item.text.strip().encode("utf-8", "surrogatepass"))


def common_ancestor(one: Node, other: Node) -> Node | None:
    """The deepest node on both paths; None if their heads differ."""
    a: Node | None = one
    b: Node | None = other
    while a is not b:
        if a is None or b is None:
            return None
        if a.depth >= b.depth:
            a = a.parent
        else:
            b = b.parent
    return a
