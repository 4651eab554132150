"""One tool call in markup as it grows: elements become arguments, and arguments fragments of one JSON object."""

from __future__ import annotations

import json
from dataclasses import dataclass

from model.chat.arguments import MAX_DEPTH, MIXED_TEXT, Element, convert, is_plain_string, property_schema
from model.conversation import Json


@dataclass(slots=True)
class _Node:
    """An element that is open: its text so far and its finished children."""

    name: str
    text: list[str]
    children: list[tuple[str, Element]]

    def content(self) -> Element:
        text = "".join(self.text)
        if not self.children:
            return text
        return [*self.children, (MIXED_TEXT, text)] if text.strip() else self.children


class CallBuilder:
    """One call: its arguments so far, and the JSON fragments that show them.

    Each method returns the fragment to show next ("" if nothing can be shown yet); the fragments of a call join to one JSON object that
    equals `arguments`. Strings are shown while they grow, other values once they are whole.
    """

    def __init__(self, index: int, id: str, name: str, schema: Json) -> None:
        self.index, self.id, self.name = index, id, name
        self.arguments: dict[str, Json] = {}
        self._open: list[_Node] = []
        self._schema = schema
        self._streams = False
        self._skipped = False

    @property
    def open_names(self) -> list[str]:
        """The names of the open elements, the innermost last."""
        return [node.name for node in self._open]

    def open_element(self, name: str) -> str | None:
        """An element begins: an argument, or one inside. None if it cannot: then its tag is text of what is open."""
        if self._open and (self._streams or len(self._open) >= MAX_DEPTH):
            return None
        self._open.append(_Node(name, [], []))
        if len(self._open) > 1:
            return ""
        self._skipped = name in self.arguments
        self._streams = not self._skipped and is_plain_string(property_schema(self._schema, name))
        if not self._streams:
            return ""
        key = self._key(name)
        self.arguments[name] = ""
        return key + '"'

    def close_element(self) -> str:
        """The innermost element ends."""
        node = self._open.pop()
        if self._open:
            self._open[-1].children.append((node.name, node.content()))
            return ""
        if self._streams:
            self._streams = False
            self.arguments[node.name] = "".join(node.text)
            return '"'
        if self._skipped:
            return ""
        value = convert(node.content(), property_schema(self._schema, node.name))
        key = self._key(node.name)
        self.arguments[node.name] = value
        return key + json.dumps(value, ensure_ascii=False)

    def text(self, text: str) -> str:
        """Text of the innermost element."""
        self._open[-1].text.append(text)
        return json.dumps(text, ensure_ascii=False)[1:-1] if self._streams else ""

    def end(self) -> str:
        """The call ends, whatever is open: a string keeps what came, another open argument is dropped."""
        fragment = self.close_element() if self._streams else ""
        self._open.clear()
        return fragment + ("}" if self.arguments else "{}")

    def _key(self, name: str) -> str:
        return ("{" if not self.arguments else ", ") + json.dumps(name, ensure_ascii=False) + ": "
