"""Generated ids as reasoning, text and tool calls, for models that mark them with control tokens: `<think>…</think>`, `<tool_call>{JSON}`.

What a model marks is seen from how its template writes a turn; what is not seen there is text. Only control ids structure the output.

What does not fit is treated so, and nothing raises:
- White space at either end of reasoning, behind it, and around calls is the template's and dropped.
- A call is shown once it is whole. A block that is not one JSON object with a name is text, markers and all.
- A block that the turn cuts off is a call if it is whole by then, else text (`open_call`).
- End markers of nothing and hidden control tokens are dropped.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec

from model.chat import CallArguments, CallStart, Delta, Piece, ReasoningDelta, TextDelta
from model.chat.arguments import is_shallow
from model.conversation import AssistantItem, Json, ToolCall

REASONING_MARKERS = (("<think>", "</think>"), ("<mm:think>", "</mm:think>"), ("[THINK]", "[/THINK]"))
CALL_MARKERS = (("<tool_call>", "</tool_call>"),)
"""Calls as Hermes and Qwen write them: one JSON object with `name` and `arguments` between each pair."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The control ids that begin and end reasoning and a call; None where the model marks none."""

    reasoning: tuple[int, int] | None = None
    call: tuple[int, int] | None = None

    @property
    def ids(self) -> frozenset[int]:
        return frozenset((*(self.reasoning or ()), *(self.call or ())))


def find_markup(spoken: Sequence[Piece], reasoning: str, control: Mapping[str, int]) -> Markup:
    """What a template writes around `reasoning` and around a call, in the pieces of a turn that has both."""
    thinks = [pair for pair in _pairs(REASONING_MARKERS, control) if reasoning in (_between(spoken, pair) or "")]
    calls = [pair for pair in _pairs(CALL_MARKERS, control) if _call(_between(spoken, pair) or "") is not None]
    return Markup(thinks[0] if thinks else None, calls[0] if calls else None)


def _pairs(markers: Sequence[tuple[str, str]], control: Mapping[str, int]) -> list[tuple[int, int]]:
    return [(control[begin], control[end]) for begin, end in markers if begin in control and end in control]


def _between(pieces: Sequence[Piece], pair: tuple[int, int]) -> str | None:
    """The text between two control ids that have only text between them."""
    for number, piece in enumerate(pieces[:-2]):
        between = pieces[number + 1]
        if (piece, pieces[number + 2]) == pair and isinstance(between, str):
            return between
    return None


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


_call_decoder = msgspec.json.Decoder(_Call)
_object_decoder = msgspec.json.Decoder(dict[str, Any])


def _call(body: str) -> tuple[str, str, dict[str, Json]] | None:
    """Name, arguments as JSON text and as an object; None if `body` is not a call. Arguments may be an object as text in a string."""
    try:
        call = _call_decoder.decode(body)
        text = bytes(call.arguments)
        if text.startswith(b'"'):
            text = msgspec.json.decode(text, type=str).encode()
        arguments = _object_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return (call.name, text.decode(), arguments) if call.name and is_shallow(arguments) else None


class _In(Enum):
    TEXT = auto()
    REASONING = auto()
    CALL = auto()


class TaggedParser:
    """One turn's output. `token_bytes` gives the bytes of an id, `hidden` are ids that are never shown."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        markup: Markup,
        hidden: frozenset[int],
        new_call_id: Callable[[], str],
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        no_pair: tuple[int | None, int | None] = (None, None)
        self._think, self._think_end = markup.reasoning or no_pair
        self._begin, self._end = markup.call or no_pair
        self._control = markup.ids | hidden
        self._hidden = hidden
        self._new_call_id = new_call_id
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._in = _In.REASONING if starts_in_reasoning else _In.TEXT
        self._drops_space = starts_in_reasoning
        self._space = ""
        self._block: list[str] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._open_call = False
        self._deltas: list[Delta] = []

    @property
    def open_call(self) -> bool:
        return self._open_call or self._in is _In.CALL

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        run: list[bytes] = []
        for id in ids:
            if id not in self._control:
                run.append(self._token_bytes(id))
                continue
            self._show(self._decoder.decode(b"".join(run), True))
            run.clear()
            if id not in self._hidden:
                self._marker(id)
        self._show(self._decoder.decode(b"".join(run)))
        return self._take()

    def finish(self) -> list[Delta]:
        self._show(self._decoder.decode(b"", True))
        if self._in is _In.CALL:
            self._open_call = not self._end_block("")
        elif self._in is _In.TEXT and self._space:
            self._add(self._space)
        self._space = ""
        return self._take()

    def item(self) -> AssistantItem:
        return AssistantItem("".join(self._text), "".join(self._reasoning) or None, tuple(self._calls))

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def _marker(self, id: int) -> None:
        spelled = self._token_bytes(id).decode("utf-8", "replace")
        if self._in is _In.CALL and id != self._end:
            if id == self._begin:
                self._end_block("")
                self._block.append(spelled)
                self._in = _In.CALL
            else:  # a model that writes about its own format means the text
                self._block.append(spelled)
        elif id == self._end and self._in is _In.CALL:
            self._end_block(spelled)
        elif id == self._begin:
            self._enter(_In.CALL)
            self._block.append(spelled)
        elif id == self._think:
            self._enter(_In.REASONING)
        elif id == self._think_end and self._in is _In.REASONING:
            self._enter(_In.TEXT)

    def _enter(self, state: _In) -> None:
        """Go on to another part; white space between parts is dropped, except of text that goes on as reasoning."""
        self._in, self._space, self._drops_space = state, "", True

    def _show(self, text: str) -> None:
        """Text that arrived. White space at its end is held back until something follows it."""
        if self._in is _In.CALL:
            self._block.append(text)
            return
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._add(shown)

    def _add(self, text: str) -> None:
        if self._in is _In.REASONING:
            self._reasoning.append(text)
            self._deltas.append(ReasoningDelta(text))
        else:
            self._text.append(text)
            self._deltas.append(TextDelta(text))

    def _end_block(self, end: str) -> bool:
        """The block of a call ends: whether it was one. Else it is text."""
        begin, *body = self._block
        self._block = []
        self._enter(_In.TEXT)
        call = _call("".join(body))
        if call is None:
            self._add("".join((begin, *body, end)))
            self._drops_space = False
            return False
        name, text, arguments = call
        id, index = self._new_call_id(), len(self._calls)
        self._calls.append(ToolCall(id, name, arguments))
        self._deltas += [CallStart(index, id, name), CallArguments(index, text)]
        return True
