"""OpenAI Responses: the request side.

Input items stay raw bytes until the ledger asks for them. Neighbouring items of the assistant — reasoning, message, function calls — are
one turn of it, whether they carry ids or not. Hosted tools that clients offer by default but this server cannot run are not offered to
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, Literal, TypeAlias

import msgspec
import xxhash

from agentserve.conversation import TurnOptions, running_digests
from agentserve.dialects.calls import in_call_order, parse_arguments
from agentserve.dialects.json_body import decode_body, decode_part, decode_parts
from agentserve.dialects.logprob_form import num_top
from agentserve.dialects.sampling import SamplingFields, sampling
from agentserve.dialects.tool_choice import openai_tool_choice
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem

LOGPROBS = "message.output_text.logprobs"
"""What `include` names to get log probabilities."""
HEAD_ROLES = ("system", "developer")
TEXT_PARTS = frozenset({"input_text", "output_text", "text", "refusal", "reasoning_text"})
HOSTED_TOOLS = ("web_search", "image_generation")
"""Beginnings of tool types that are left out."""

Kind: TypeAlias = Literal["assistant", "result", "message"]
_KINDS: dict[str, Kind] = {"reasoning": "assistant", "function_call": "assistant", "function_call_output": "result"}


class ResponsesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/responses; input items and `tools` undecoded."""

    input: str | list[msgspec.Raw]
    model: str | None = None
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    stop: str | list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    top_logprobs: int | None = None
    include: list[str] | None = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class ToolForm(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


_request = msgspec.json.Decoder(ResponsesRequest)
_item = msgspec.json.Decoder(InputItem)
_items = msgspec.json.Decoder(list[InputItem])
_tools = msgspec.json.Decoder(list[ToolForm] | None)


def parse(body: bytes) -> ResponsesRequest:
    """Decode a body. Raises InvalidRequest with the path of what is wrong."""
    request = decode_body(_request, body)
    if request.max_output_tokens is not None and request.max_output_tokens < 1:
        raise InvalidRequest(f"max_output_tokens must be at least 1, not {request.max_output_tokens}", param="max_output_tokens")
    _refuse_unsupported(request)
    return request


def _refuse_unsupported(request: ResponsesRequest) -> None:
    if request.background:
        raise Unsupported("background responses are not supported: wait for the answer, or stream it", param="background")
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise Unsupported(f"{name} objects are not kept here: send the items as input, or use previous_response_id", param=name)


def options(request: ResponsesRequest) -> TurnOptions:
    """What the request asks for beside the history. Raises InvalidRequest."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if any(not text for text in stop):
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    structured = _structured(request.text)
    names = {"messages": "input", **({"structured_outputs": "text.format"} if structured is not None else {})}
    asked = sampling(request, structured, request.max_output_tokens, names)
    choice = openai_tool_choice(request.tool_choice, request.parallel_tool_calls)
    top = num_top(bool(request.top_logprobs) or LOGPROBS in (request.include or ()), request.top_logprobs)
    return TurnOptions(request.max_output_tokens, asked, stop, request.priority, request.vllm_xargs or {}, choice, top, names=names)


def _structured(text: dict[str, Any] | None) -> dict[str, Json] | None:
    form = (text or {}).get("format")
    kind = form.get("type") if isinstance(form, dict) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema" and isinstance(form, dict) and isinstance(form.get("schema"), dict):
        return {"json": form["schema"]}
    raise InvalidRequest("text.format must be of type text, json_object, or json_schema with a schema object", param="text.format")


def input_items(request: ResponsesRequest, kept: Callable[[str], bytes]) -> list[bytes]:
    """The request's own input items as JSON text, free of its body; input that is a text is one message by the user.

    `kept` gives an item that the request only refers to, by its id.
    """
    if isinstance(request.input, str):
        return [msgspec.json.encode({"type": "message", "role": "user", "content": request.input})]
    items = [bytes(raw) for raw in request.input]
    for index, item_id in item_references(request).items():
        items[index] = kept(item_id)
    return items


def item_references(request: ResponsesRequest) -> dict[int, str]:
    """The ids of items that the request only refers to, by their place in its input."""
    found: dict[int, str] = {}
    for index, raw in enumerate(() if isinstance(request.input, str) else request.input):
        if b"item_reference" in bytes(raw):  # also in a text that only speaks of one
            item = decode_part(_item, raw, f"input[{index}]")
            if item.type == "item_reference":
                found[index] = item.id or ""
    return found


class ResponsesConversation:
    """A request as a `Conversation`: the items of what it goes on from, then its own, each as JSON text."""

    first = 0

    def __init__(self, request: ResponsesRequest, history: Sequence[bytes], own: Sequence[bytes]) -> None:
        self._instructions = request.instructions
        self._tools = request.tools
        self._items = [msgspec.Raw(item) for item in (*history, *own)]
        self._num_before = len(history)
        self._num_head = sum(1 for _ in takewhile(self._is_head, range(len(self._items))))
        if self._num_head == len(self._items):
            raise InvalidRequest("input must hold a user message or a tool's output beside the system text", param="input")
        if self._read(len(self._items) - 1).kind == "assistant":
            raise Unsupported("the last input item must not be the assistant's: continuing a given answer is not supported", param="input")
        digest = xxhash.xxh3_128(b"responses" + msgspec.json.encode(request.instructions))
        for raw in (request.tools, *self._items[: self._num_head]):
            digest.update(raw)
        self.chain: list[bytes] = [digest.digest()]
        for raw in self._items[self._num_head :]:
            digest.update(raw)
            self.chain.append(digest.digest())

    def whole(self) -> ResponsesConversation:
        """Itself: nothing is left out."""
        return self

    def tail(self) -> list[bytes]:
        """The running digests of the items behind the head."""
        return running_digests(b"responses", self._items[self._num_head :])

    def head(self) -> Head:
        """Instructions and leading system messages, joined by a blank line, and the tools."""
        texts = [self._instructions or "", *(entry.text(entry.item.content) for entry in map(self._read, range(self._num_head)))]
        return Head("\n\n".join(text for text in texts if text), self.tools())

    def tools(self) -> tuple[Tool, ...]:
        """The functions offered, in the client's order."""
        tools: list[Tool] = []
        for form in (decode_part(_tools, self._tools, "tools") if bytes(self._tools) else None) or ():
            if form.type == "function":
                if not form.name:
                    raise InvalidRequest("a tool of type 'function' must have a name", param="tools")
                tools.append(Tool(form.name, form.description or "", form.parameters))
            elif not form.type.startswith(HOSTED_TOOLS):
                raise Unsupported(f"tools of type {form.type!r} are not supported: only 'function'", param="tools")
        return tuple(tools)

    def steps(self, start: int) -> list[tuple[int | None, list[Item]]]:
        """Items after the first `start` behind the head: a turn of the assistant and neighbouring tool results are one step each."""
        steps: list[tuple[int | None, list[Item]]] = []
        base = self._num_head
        calls = self._calls_before(base + start)
        first = base + start
        items = decode_parts(_items, _item, self._items[first:], lambda place: self._name(first + place))
        entries = [self._entry(index, item) for index, item in enumerate(items, first)]
        for kind, group in groupby(entries, lambda entry: entry.kind):
            run = list(group)
            end = run[-1].index + 1 - base
            match kind:
                case "assistant":
                    said = _assistant(run)
                    calls = said.calls
                    steps.append((end, [said]))
                case "result":
                    results = [ToolResultItem(entry.item.call_id or "", entry.text(entry.item.output)) for entry in run]
                    steps.append((end, list(in_call_order(results, calls))))
                case "message":
                    steps.extend((entry.index + 1 - base, [_message(entry)]) for entry in run)
        return steps

    def _calls_before(self, index: int) -> tuple[ToolCall, ...]:
        """The calls of the assistant's turn that ends before `index`, whose results may follow."""
        before = (self._read(i) for i in range(index - 1, self._num_head - 1, -1))
        return _assistant(list(takewhile(lambda entry: entry.kind == "assistant", before))[::-1]).calls

    def _is_head(self, index: int) -> bool:
        entry = self._read(index)
        return entry.kind == "message" and entry.item.role in HEAD_ROLES

    def _read(self, index: int) -> Entry:
        return self._entry(index, decode_part(_item, self._items[index], self._name(index)))

    def _entry(self, index: int, item: InputItem) -> Entry:
        name = self._name(index)
        return Entry(index, name, item, _kind(item, name))

    def _name(self, index: int) -> str:
        return f"input[{index - self._num_before}]" if index >= self._num_before else f"item {index} of the previous response"


@dataclass(frozen=True, slots=True)
class Entry:
    """A decoded item and how errors name it: by its place in the request's own input."""

    index: int
    name: str
    item: InputItem
    kind: Kind

    def text(self, content: str | Sequence[Part] | None) -> str:
        """The text of the item's content or output. Raises Unsupported for anything else."""
        if content is None or isinstance(content, str):
            return content or ""
        for part in content:
            if part.type not in TEXT_PARTS:
                at = f"{self.name}.content"
                raise Unsupported(f"{at} holds a part of type {part.type!r}: only text is supported", param=at)
        return "".join(part.text or part.refusal or "" for part in content)


def _kind(item: InputItem, name: str) -> Kind:
    if item.type in (None, "message"):
        if item.role == "assistant":
            return "assistant"
        if item.role in ("user", *HEAD_ROLES):
            return "message"
        at = f"{name}.role"
        raise InvalidRequest(f"{at} {item.role!r} is not known: use user, assistant, system or developer", param=at)
    kind = _KINDS.get(item.type or "")
    if kind is None:
        raise Unsupported(f"{name} is of type {item.type!r}: only message, {', '.join(_KINDS)} are supported", param=name)
    return kind


def _message(entry: Entry) -> Item:
    text = entry.text(entry.item.content)
    return UserItem(text) if entry.item.role == "user" else SystemItem(text)


def _assistant(run: Sequence[Entry]) -> AssistantItem:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for entry in run:
        item = entry.item
        match item.type:
            case "reasoning":
                thoughts.append(entry.text(item.content) or "\n\n".join(part.text or "" for part in item.summary or ()))
            case "function_call":
                calls.append(ToolCall(item.call_id or item.id or "", item.name or "", parse_arguments(item.arguments or "")))
            case _:
                texts.append(entry.text(item.content))
    return AssistantItem("".join(texts), "".join(thoughts) or None, tuple(calls))
