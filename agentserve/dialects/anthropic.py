"""Anthropic Messages: the request side.

As in the chat dialect, messages stay raw bytes until the ledger asks for them. `cache_control`, signatures, `is_error` and other fields
that say nothing to the model are ignored, so they never change a token; `thinking` too, as M3's thinking mode stands in the head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import xxhash

from agentserve.conversation import Onto, TurnOptions, running_digests
from agentserve.dialects.calls import in_call_order, parse_arguments
from agentserve.dialects.json_body import decode_body, decode_part, decode_parts
from agentserve.dialects.sampling import SamplingFields, sampling
from agentserve.dialects.tool_choice import anthropic_tool_choice
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, Tool, ToolCall, ToolResultItem, UserItem


class Diagnostics(msgspec.Struct):
    """What the client wants to know of the cache: what has changed since the answer of this id. None: it has none yet."""

    previous_message_id: str | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/messages and of /v1/messages/count_tokens; `system`, `messages` and `tools` undecoded."""

    messages: list[msgspec.Raw]
    model: str | None = None
    max_tokens: int | None = None
    system: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    output_config: dict[str, Any] | None = None
    diagnostics: Diagnostics | None = None


class ContentBlock(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | str | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentBlock]


class Role(msgspec.Struct):
    role: str


class ToolForm(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


_request = msgspec.json.Decoder(MessagesRequest)
_message = msgspec.json.Decoder(Message)
_messages = msgspec.json.Decoder(list[Message])
_role = msgspec.json.Decoder(Role)
_system = msgspec.json.Decoder(str | list[ContentBlock] | None)
_tools = msgspec.json.Decoder(list[ToolForm] | None)

_SESSION = re.compile(r"_session_([0-9A-Za-z-]{1,255})$")


def parse(body: bytes) -> MessagesRequest:
    """Decode a body. Raises InvalidRequest with the path of what is wrong."""
    request = decode_body(_request, body)
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    return request


def options(request: MessagesRequest, answer_id: str | None = None) -> TurnOptions:
    """What the request asks for beside the history. `answer_id`: the id that its answer gets. Raises InvalidRequest."""
    if request.max_tokens is None:
        raise InvalidRequest("max_tokens is required", param="max_tokens")
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens")
    stop = tuple(request.stop_sequences or ())
    if any(not text for text in stop):
        raise InvalidRequest("stop_sequences must not hold an empty string", param="stop_sequences")
    structured = _structured(request.output_config)
    names = {"messages": "messages", **({"structured_outputs": "output_config.format"} if structured is not None else {})}
    asked = sampling(request, structured, request.max_tokens, names)
    since = request.diagnostics.previous_message_id if request.diagnostics is not None else None
    return TurnOptions(
        max_tokens=request.max_tokens,
        sampling=asked,
        stop=stop,
        priority=request.priority,
        xargs=request.vllm_xargs or {},
        tools=anthropic_tool_choice(request.tool_choice),
        answer_id=answer_id if request.diagnostics is not None else None,
        since=since,
        names=names,
    )


def _structured(config: dict[str, Any] | None) -> dict[str, Json] | None:
    form = (config or {}).get("format")
    if form is None:
        return None
    if isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict):
        return {"json": form["schema"]}
    raise InvalidRequest("output_config.format must be of type json_schema and hold a schema object", param="output_config.format")


def client_session(request: MessagesRequest) -> str | None:
    """The session id that Claude Code writes into `metadata.user_id`: at its end, or as a field of JSON text."""
    user = (request.metadata or {}).get("user_id")
    if not isinstance(user, str):
        return None
    named = parse_arguments(user) if user.startswith("{") else user
    if isinstance(named, dict):
        session = named.get("session_id")
        return session if isinstance(session, str) else None
    found = _SESSION.search(named)
    return found[1] if found else None


class MessagesConversation:
    """The system text, tools and messages of a request as a `Conversation`. With `onto` there is no head: all messages are new ones."""

    first = 0

    def __init__(self, request: MessagesRequest, onto: Onto | None = None) -> None:
        self._system = request.system
        self._tools = request.tools
        self._messages = request.messages
        self._calls = onto.calls if onto is not None else ()
        roles = (_decode_role(raw, index) for index, raw in enumerate(request.messages))
        num_system = next((index for index, role in enumerate(roles) if role != "system"), len(request.messages))
        self._num_head = 0 if onto is not None else num_system
        if self._num_head == len(request.messages):
            raise InvalidRequest("messages must hold a user or assistant message beside the system text", param="messages")
        if _decode_role(request.messages[-1], len(request.messages) - 1) == "assistant":
            raise Unsupported("the last message must not be the assistant's: continuing a given answer is not supported", param="messages")
        digest = xxhash.xxh3_128(b"anthropic" if onto is None else onto.seed)
        for raw in () if onto is not None else (request.system, request.tools, *request.messages[: self._num_head]):
            digest.update(raw)
        self.chain: list[bytes] = [digest.digest()]
        for raw in request.messages[self._num_head :]:
            digest.update(raw)
            self.chain.append(digest.digest())

    def whole(self) -> MessagesConversation:
        """Itself: nothing is left out."""
        return self

    def tail(self) -> list[bytes]:
        """The running digests of the messages behind the head."""
        return running_digests(b"anthropic", self._messages[self._num_head :])

    def head(self) -> Head:
        """The system blocks and leading system messages, joined by a blank line, and the tools."""
        content = decode_part(_system, self._system, "system") if bytes(self._system) else None
        texts = [content] if isinstance(content, str) else [_text(block, f"system[{i}]") for i, block in enumerate(content or ())]
        texts += [_texts(self._read(index), index) for index in range(self._num_head)]
        return Head("\n\n".join(text for text in texts if text), self.tools())

    def tools(self) -> tuple[Tool, ...]:
        """The tools offered, in the client's order."""
        forms = (decode_part(_tools, self._tools, "tools") if bytes(self._tools) else None) or []
        for index, form in enumerate(forms):
            if form.type not in (None, "custom"):
                raise Unsupported(f"tools of type {form.type!r} are not supported: only 'custom'", param="tools")
            if not form.name:
                at = f"tools[{index}].name"
                raise InvalidRequest(f"{at} must not be empty", param=at)
        return tuple(Tool(form.name, form.description or "", form.input_schema) for form in forms)

    def steps(self, start: int) -> list[tuple[int | None, list[Item]]]:
        """Messages after the first `start` behind the head; a user message's results stand before its text, in call order."""
        steps: list[tuple[int | None, list[Item]]] = []
        calls = self._calls_before(start)
        pending: list[ToolResultItem] = []
        base = self._num_head
        first = base + start
        messages = decode_parts(_messages, _message, self._messages[first:], lambda place: f"messages[{first + place}]")
        for index, message in enumerate(messages, first):
            results, item = _user(message, index) if message.role == "user" else ([], _item(message, index))
            pending += results
            if item is None:
                continue
            if pending:
                steps.append((None if results else index - base, list(in_call_order(pending, calls))))
                pending = []
            if isinstance(item, AssistantItem):
                calls = item.calls
            steps.append((index - base + 1, [item]))
        if pending:
            steps.append((len(self._messages) - base, list(in_call_order(pending, calls))))
        return steps

    def _calls_before(self, start: int) -> tuple[ToolCall, ...]:
        """The calls of the message before the first that is read, whose results may follow."""
        index = self._num_head + start - 1
        if start == 0:
            return self._calls
        if _decode_role(self._messages[index], index) != "assistant":
            return ()
        return _assistant(self._read(index), index).calls

    def _read(self, index: int) -> Message:
        return decode_part(_message, self._messages[index], f"messages[{index}]")


def _decode_role(raw: msgspec.Raw, index: int) -> str:
    return decode_part(_role, raw, f"messages[{index}]").role


def _item(message: Message, index: int) -> Item:
    match message.role:
        case "assistant":
            return _assistant(message, index)
        case "system":
            return SystemItem(_texts(message, index))
    at = f"messages[{index}].role"
    raise InvalidRequest(f"{at} {message.role!r} is not known: use user, assistant or system", param=at)


def _user(message: Message, index: int) -> tuple[list[ToolResultItem], UserItem | None]:
    """The tool results in a user message, and its text; None if it holds results only."""
    if isinstance(message.content, str):
        return [], UserItem(message.content)
    results: list[ToolResultItem] = []
    texts: list[str] = []
    for number, block in enumerate(message.content):
        at = f"messages[{index}].content[{number}]"
        if block.type == "tool_result":
            results.append(ToolResultItem(block.tool_use_id or "", _result_text(block.content, at)))
        else:
            texts.append(_text(block, at))
    return results, UserItem("".join(texts)) if texts or not results else None


def _result_text(content: str | Sequence[ContentBlock] | None, at: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_text(block, f"{at}.content[{number}]") for number, block in enumerate(content))


def _assistant(message: Message, index: int) -> AssistantItem:
    if isinstance(message.content, str):
        return AssistantItem(message.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(message.content):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # nothing that this model could read
            case "tool_use":
                arguments = parse_arguments(block.input) if isinstance(block.input, str) else block.input
                calls.append(ToolCall(block.id or "", block.name or "", arguments or {}))
            case _:
                texts.append(_text(block, f"messages[{index}].content[{number}]"))
    return AssistantItem("".join(texts), "".join(thoughts) if thoughts else None, tuple(calls))


def _texts(message: Message, index: int) -> str:
    if isinstance(message.content, str):
        return message.content
    blocks = (_text(block, f"messages[{index}].content[{number}]") for number, block in enumerate(message.content))
    return "\n\n".join(text for text in blocks if text)


def _text(block: ContentBlock, at: str) -> str:
    if block.type != "text":
        raise Unsupported(f"{at} is of type {block.type!r}: only text is supported here", param=at)
    return block.text or ""
