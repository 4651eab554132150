"""What a conversation means, apart from any dialect and any token.

Three dialects are parsed into these items, one chat format renders them. Items are values: two items with equal fields mean the
same thing to the model. `meaning()` is the identity that the ledger matches by; it leaves out what clients are known to lose.

Items are Structs and not dataclasses: a long history makes thousands in a turn, and a frozen dataclass takes several times as long to make.
`msgspec.structs.replace` changes a field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import xxhash

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Json] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """One call by the model. `arguments` is the parsed JSON object, or the raw text where the model's text is not JSON."""

    id: str
    name: str
    arguments: dict[str, Json] | str


class SystemItem(msgspec.Struct, frozen=True):
    """A system message that is not part of the head (a later one keeps its place)."""

    text: str


class UserItem(msgspec.Struct, frozen=True):
    """Text by the user, byte for byte."""

    text: str


class AssistantItem(msgspec.Struct, frozen=True):
    """What the model said in one turn: reasoning, then text, then calls. `reasoning` None means the client did not say."""

    text: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()


class ToolResultItem(msgspec.Struct, frozen=True):
    """The result of one call, byte for byte. Results of one assistant turn stand in call order."""

    call_id: str
    text: str


Item: TypeAlias = SystemItem | UserItem | AssistantItem | ToolResultItem


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the first item: leading system text (already joined) and the tools offered."""

    system: str = ""
    tools: tuple[Tool, ...] = ()


_CANONICAL = msgspec.json.Encoder(order="deterministic")


def canonical_json(value: Json) -> str:
    """`value` with sorted keys and no spaces, so that equal values give equal text. True and 1 stay different, and so do 1 and 1.0."""
    try:
        text = _CANONICAL.encode(value)
    except UnicodeEncodeError:
        text = b"null"
    if b"null" not in text:
        return text.decode()
    # It stands for NaN and infinities, too: those keep names of their own, as half a surrogate pair keeps its place.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _call_key(call: ToolCall) -> list[str]:
    if isinstance(call.arguments, dict):
        return [call.name, canonical_json(call.arguments)]
    return [call.name, "text", call.arguments]


_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    UserItem: lambda item: ["user", item.text],
    ToolResultItem: lambda item: ["tool", item.text],
    AssistantItem: lambda item: ["assistant", item.text.strip(), [_call_key(call) for call in item.calls]],
    SystemItem: lambda item: ["system", item.text],
    Head: lambda head: ["head", head.system, [[t.name, t.description, json.dumps(t.parameters)] for t in head.tools]],
}
"""What is told of each kind; by table, as a history has thousands of items."""


def meaning(item: Item | Head) -> bytes:
    """16 bytes that are equal for items of equal meaning.

    Left out: an assistant's reasoning (compared apart, as clients drop it), the ids of calls and outer white space of assistant text. A
    head means what it is rendered as, down to the order of keys in its schemas: what may differ there is the canonicaliser's to say.
    """
    return xxhash.xxh3_128_digest(msgspec.json.encode(_PARTS[type(item)](item)))
