"""MiniMax-M3's generated ids as reasoning, text and tool calls, while they arrive.

Only control ids structure the output: text that merely spells a marker stays text. Markup is the namespace token followed by a tag in
text, `]<]minimax[>[<invoke name="f">`; the elements in an invocation are its arguments (vLLM's parser `minimax_m3` reads the same).

What does not fit is treated so, and nothing raises:
- A marker is never shown, what follows it is. Block and other hidden control tokens are dropped.
- `</mm:think>` without `<mm:think>` is dropped (it opens a turn without reasoning). Reasoning may come more than once; it is joined.
- A call may begin without `<tool_call>` and inside reasoning, which it ends.
- Inside a call block, text between tags is dropped, and so is white space that follows the block.
- An invocation that is not closed ends at the next one, at the end of the block, or with the turn (`open_call`): a string argument keeps
  what came, any other unfinished argument is dropped.
- An argument that comes twice keeps its first value. A closing tag of no open element is text of the argument.
- An argument that can only be a string holds tags of inner elements as text. Elements deeper than `arguments.MAX_DEPTH` are text.
"""

from __future__ import annotations

import codecs
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from model.chat import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from model.chat.call_builder import CallBuilder
from model.conversation import AssistantItem, Json, Tool, ToolCall

MAX_TAG_CHARS = 4096
_INVOKE = '<invoke name="'


def random_call_id() -> str:
    """A fresh id for a tool call: "call_" and 24 hexadecimal digits."""
    return "call_" + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class Markers:
    """The control ids that structure output, and those that are never shown."""

    think: int
    think_end: int
    namespace: int
    hidden: frozenset[int]


class _In(Enum):
    """Where the output stands."""

    TEXT = auto()
    REASONING = auto()
    BLOCK = auto()
    """In a call block, between invocations."""
    CALL = auto()
    """In an invocation, between arguments."""
    ARGUMENT = auto()


class MiniMaxM3Parser:
    """One turn's output; `token_bytes` gives the bytes of an ordinary id, `tools` the types of arguments."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        markers: Markers,
        tools: Sequence[Tool],
        new_call_id: Callable[[], str],
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._markers = markers
        self._control = markers.hidden | {markers.think, markers.think_end, markers.namespace}
        self._schemas: Mapping[str, Json] = {tool.name: tool.parameters for tool in tools}
        self._new_call_id = new_call_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in = _In.REASONING if starts_in_reasoning else _In.TEXT
        self._tag: str | None = None
        self._after_block = False
        self._call: CallBuilder | None = None
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._open_call = False
        self._deltas: list[Delta] = []

    @property
    def open_call(self) -> bool:
        return self._open_call or self._call is not None

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        run: list[bytes] = []
        for id in ids:
            if id not in self._control:
                run.append(self._token_bytes(id))
                continue
            self._characters(self._decoder.decode(b"".join(run), True))
            run.clear()
            self._marker(id)
        self._characters(self._decoder.decode(b"".join(run)))
        return self._take()

    def finish(self) -> list[Delta]:
        self._characters(self._decoder.decode(b"", True))
        if self._call is None:
            self._drop_tag()
        self._tag = None
        self._open_call = self._call is not None
        self._end_call()
        return self._take()

    def item(self) -> AssistantItem:
        return AssistantItem("".join(self._text), "".join(self._reasoning) or None, tuple(self._calls))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _marker(self, id: int) -> None:
        self._drop_tag()
        if id == self._markers.namespace:
            self._tag = ""
        elif id not in self._markers.hidden:
            self._thinking(begins=id == self._markers.think, id=id)

    def _thinking(self, begins: bool, id: int) -> None:
        if self._in in (_In.TEXT, _In.REASONING):
            self._in = _In.REASONING if begins else _In.TEXT
        elif self._in is _In.ARGUMENT:  # a model that writes about its own format means the text
            self._show(self._token_bytes(id).decode())

    def _characters(self, text: str) -> None:
        """Text that arrived: of a tag, or of what the output stands in."""
        while text and self._tag is not None:
            tag = self._tag + text
            end = tag.find('">' if tag.startswith(_INVOKE) else ">")
            if not tag.startswith("<") or (end < 0 and len(tag) > MAX_TAG_CHARS):
                self._tag = tag
                self._drop_tag()
                return
            if end < 0:
                self._tag = tag
                return
            end = tag.index(">", end) + 1
            self._tag, text = None, tag[end:]
            self._on_tag(tag[:end])
        if text:
            self._show(text)

    def _drop_tag(self) -> None:
        """A namespace token was not followed by a tag: what followed is text."""
        tag, self._tag = self._tag, None
        if tag:
            self._show(tag)

    def _show(self, text: str) -> None:
        match self._in:
            case _In.TEXT:
                if self._after_block:
                    text = text.lstrip()
                    self._after_block = not text
                if text:
                    self._text.append(text)
                    self._deltas.append(TextDelta(text))
            case _In.REASONING:
                self._reasoning.append(text)
                self._deltas.append(ReasoningDelta(text))
            case _In.ARGUMENT:
                assert self._call is not None
                self._fragment(self._call.text(text))

    def _on_tag(self, tag: str) -> None:
        name = tag[1:-1]
        if self._in is _In.ARGUMENT and self._in_argument(tag, name):
            return
        if tag.startswith(_INVOKE):
            self._begin_call(tag[len(_INVOKE) : -2])
        elif tag == "<tool_call>":
            self._end_call()
            self._in = _In.BLOCK
        elif tag == "</tool_call>" and self._in in (_In.BLOCK, _In.CALL, _In.ARGUMENT):
            self._end_call()
            self._in, self._after_block = _In.TEXT, True
        elif tag == "</invoke>" and self._call is not None:
            self._end_call()
        elif self._in is _In.CALL and name.strip() and not name.startswith("/"):
            self._open_element(name, tag)
        else:
            self._show(tag)

    def _in_argument(self, tag: str, name: str) -> bool:
        """A tag inside an argument: closes or opens an element, or is its text. False if it is not the argument's but the block's."""
        assert self._call is not None
        if name[:1] == "/" and name[1:] in self._call.open_names:
            while self._call.open_names[-1] != name[1:]:
                self._fragment(self._call.close_element())
            self._fragment(self._call.close_element())
            self._in = _In.ARGUMENT if self._call.open_names else _In.CALL
            return True
        if tag in ("</invoke>", "</tool_call>", "<tool_call>") or tag.startswith(_INVOKE):
            return False
        if name[:1] == "/" or not name.strip():
            self._show(tag)
        else:
            self._open_element(name, tag)
        return True

    def _open_element(self, name: str, tag: str) -> None:
        assert self._call is not None
        fragment = self._call.open_element(name)
        self._in = _In.ARGUMENT
        if fragment is None:
            self._show(tag)
        else:
            self._fragment(fragment)

    def _begin_call(self, name: str) -> None:
        self._end_call()
        self._call = CallBuilder(len(self._calls), self._new_call_id(), name, self._schemas.get(name))
        self._in = _In.CALL
        self._deltas.append(CallStart(self._call.index, self._call.id, name))

    def _end_call(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        self._deltas.append(CallArguments(call.index, call.end()))
        self._calls.append(ToolCall(call.id, call.name, call.arguments))
        self._in = _In.BLOCK

    def _fragment(self, fragment: str) -> None:
        assert self._call is not None
        if fragment:
            self._deltas.append(CallArguments(self._call.index, fragment))
