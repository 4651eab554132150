"""OpenAI chat completions: the request side.

Only the fields around the history are decoded at once; messages stay raw bytes until the ledger asks for them. Unknown fields are
ignored, as the API does; wrong types are refused with the path of the field.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

from agentserve.conversation import Onto, TurnOptions, running_digests
from agentserve.dialects.calls import in_call_order
from agentserve.dialects.chat_message import Message, item_of, text_of
from agentserve.dialects.json_body import decode_body, decode_part, decode_parts
from agentserve.dialects.known_bodies import BodyScan, KnownBodies
from agentserve.dialects.logprob_form import num_top
from agentserve.dialects.sampling import SamplingFields, sampling
from agentserve.dialects.tool_choice import openai_tool_choice
from agentserve.errors import InvalidRequest, Unsupported
from model.conversation import AssistantItem, Head, Item, Json, Tool, ToolCall, ToolResultItem

T = TypeVar("T")
HEAD_ROLES = ("system", "developer")
TOOL_ROLES = ("tool", "function")
MAX_CHOICES = 128


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class ChatRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/chat/completions; `messages` and `tools` undecoded."""

    messages: list[msgspec.Raw]
    model: str | None = None
    tools: msgspec.Raw = msgspec.Raw()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None


class Role(msgspec.Struct):
    role: str


class FunctionForm(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolForm(msgspec.Struct):
    function: FunctionForm
    type: str = "function"


_request = msgspec.json.Decoder(ChatRequest)
_message = msgspec.json.Decoder(Message)
_messages = msgspec.json.Decoder(list[Message])
_role = msgspec.json.Decoder(Role)
_tools = msgspec.json.Decoder(list[ToolForm] | None)


def parse(body: bytes) -> ChatRequest:
    """Decode a whole body. Raises InvalidRequest with the path of what is wrong."""
    request = decode_body(_request, body)
    if not request.messages:
        raise InvalidRequest("messages must hold at least one message", param="messages")
    _refuse_unsupported(request)
    return request


def read(body: bytes, bodies: KnownBodies) -> tuple[ChatRequest, ChatConversation]:
    """The request and its conversation, parsing only what follows the longest known beginning. Raises InvalidRequest."""
    scan = bodies.scan(body)
    parsed = scan.shortened()
    request = _decoded(parsed)
    if request is None or not (request.messages or scan.known):
        request = parse(body)  # which mends it, or names the place in the whole body; a mended body has other offsets
        return request, ChatConversation(request)
    _refuse_unsupported(request)
    conversation = ChatConversation(request, scan)
    if request.messages:
        start, end = scan.span(request.messages[0], request.messages[-1], parsed)
        conversation.remember(scan, start, end)
    return request, conversation


def _decoded(body: bytes) -> ChatRequest | None:
    try:
        return _request.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _refuse_unsupported(request: ChatRequest) -> None:
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be from 1 to {MAX_CHOICES}, not {request.n}", param="n")
    if request.prompt_logprobs is not None:  # the engine would have to compute the whole prompt again
        raise Unsupported("prompt_logprobs are not supported: a prompt's cached part has none", param="prompt_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is for streams only: leave it out, or send stream: true", param="stream_options")
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"{name} must be at least 1, not {value}", param=name)


def options(request: ChatRequest) -> TurnOptions:
    """What the request asks for beside the history. Raises InvalidRequest."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    if any(not text for text in stop):
        raise InvalidRequest("stop must not hold an empty string", param="stop")
    limit = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    structured = _structured(request.response_format)
    names = {"structured_outputs": "response_format"} if structured is not None else {}
    said = sampling(request, structured, limit, names)
    choice = openai_tool_choice(request.tool_choice, request.parallel_tool_calls)
    top = num_top(bool(request.logprobs), request.top_logprobs)
    return TurnOptions(limit, said, stop, request.priority, request.vllm_xargs or {}, choice, top, request.n or 1, names=names)


def _structured(form: dict[str, Any] | None) -> dict[str, Json] | None:
    if form is None or form.get("type") == "text":
        return None
    if form.get("type") == "json_object":
        return {"json_object": True}
    if form.get("type") == "json_schema":
        schema = form.get("json_schema")
        if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
            return {"json": schema["schema"]}
        raise InvalidRequest("response_format.json_schema must hold a schema object", param="response_format")
    known = "text, json_object or json_schema"
    raise InvalidRequest(f"response_format.type {form.get('type')!r} is not known: use {known}", param="response_format")


class ChatConversation:
    """The messages of a chat request as a `Conversation`.

    With a `scan` whose beginning is known, `request` holds only what follows it. With `onto` there is no head: all messages are new ones.
    """

    def __init__(self, request: ChatRequest, scan: BodyScan | None = None, onto: Onto | None = None) -> None:
        known = scan.known if scan is not None else None
        self._scan = scan
        self._tools = request.tools
        self._messages = request.messages
        self._num_before = known.num_messages if known else 0
        self._num_head = known.num_head_messages if known else 0
        self._calls = onto.calls if onto else ()
        beginning = xxhash.xxh3_128(onto.seed) if onto else known.chain if known else None
        digest = beginning.copy() if beginning else self._digest_head(request)
        self.first = self._num_before - self._num_head if known else 0
        self.chain: list[bytes] = [digest.digest()]
        for raw in request.messages[0 if known else self._num_head :]:
            digest.update(raw)
            self.chain.append(digest.digest())
        self._digest = digest
        self._check_last()

    def _digest_head(self, request: ChatRequest) -> xxhash.xxh3_128:
        digest = xxhash.xxh3_128(bytes(request.tools))
        for raw in request.messages:
            if _decode(_role, raw, self._num_head).role not in HEAD_ROLES:
                return digest
            self._num_head += 1
            digest.update(raw)
        raise InvalidRequest("messages must hold a user, assistant or tool message beside the system text", param="messages")

    def _check_last(self) -> None:
        if self._messages and self._at(len(self._messages) - 1, _role).role == "assistant":
            raise Unsupported("the last message must not be the assistant's: continuing a given answer is not supported", param="messages")

    def _at(self, index: int, decoder: msgspec.json.Decoder[T]) -> T:
        return _decode(decoder, self._messages[index], self._num_before + index)

    def _read(self, start: int) -> list[Message]:
        """The messages from the `start`-th at hand on."""
        first = self._num_before + start
        return decode_parts(_messages, _message, self._messages[start:], lambda place: f"messages[{first + place}]")

    def remember(self, scan: BodyScan, start: int, end: int) -> None:
        """Let a later body that begins like this one be read from its end on."""
        num_messages = self._num_before + len(self._messages)
        scan.remember(start, end, num_messages=num_messages, num_head_messages=self._num_head, chain=self._digest)

    @property
    def messages(self) -> list[msgspec.Raw]:
        """The messages at hand, as they were sent."""
        return self._messages

    def whole(self) -> ChatConversation:
        """The same conversation with every message at hand."""
        return ChatConversation(parse(self._scan.body)) if self._scan is not None else self

    def tail(self) -> list[bytes]:
        """The running digests of the messages behind the head."""
        return running_digests(b"chat", self._messages[self._num_head :])

    def head(self) -> Head:
        """The leading system texts, joined by a blank line, and the tools."""
        texts = [text_of(_decode(_message, raw, i), i) for i, raw in enumerate(self._messages[: self._num_head])]
        return Head("\n\n".join(text for text in texts if text), self.tools())

    def tools(self) -> tuple[Tool, ...]:
        """The tools offered, in the client's order."""
        if not bytes(self._tools):
            return ()
        forms = decode_part(_tools, self._tools, "tools") or []
        for index, form in enumerate(forms):
            if form.type != "function":
                raise Unsupported(f"tools of type {form.type!r} are not supported: only 'function'", param="tools")
            if not form.function.name:
                at = f"tools[{index}].function.name"
                raise InvalidRequest(f"{at} must not be empty", param=at)
        return tuple(Tool(f.function.name, f.function.description or "", f.function.parameters) for f in forms)

    def steps(self, start: int) -> list[tuple[int, list[Item]]]:
        """Messages after the first `start` behind the head; neighbouring tool results are one step, put in call order."""
        assert start >= self.first
        steps: list[tuple[int, list[Item]]] = []
        results: list[ToolResultItem] = []
        base = self._num_head - self._num_before  # index of the first message behind the head in what is at hand
        calls = self._calls_before(base + start)
        for index, message in enumerate(self._read(base + start), base + start):
            if message.role in TOOL_ROLES:
                results.append(ToolResultItem(message.tool_call_id or "", text_of(message, self._num_before + index)))
                continue
            if results:
                steps.append((index - base, list(in_call_order(results, calls))))
                results = []
            item = item_of(message, self._num_before + index)
            if isinstance(item, AssistantItem):
                calls = item.calls
            steps.append((index - base + 1, [item]))
        if results:
            steps.append((len(self._messages) - base, list(in_call_order(results, calls))))
        return steps

    def _calls_before(self, index: int) -> tuple[ToolCall, ...]:
        """The calls of the message before `index`, whose results may follow; a known beginning never ends in calls."""
        if index <= max(0, self._num_head - self._num_before):
            return self._calls
        if self._at(index - 1, _role).role != "assistant":
            return ()
        item = item_of(self._at(index - 1, _message), self._num_before + index - 1)
        return item.calls if isinstance(item, AssistantItem) else ()


def _decode(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, index: int) -> T:
    return decode_part(decoder, raw, f"messages[{index}]")
