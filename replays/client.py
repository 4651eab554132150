"""One streamed chat request over gevent: sent, read as it arrives, timed, and reduced to what the report and the next turn need.

Times follow AgentX: the first and the last chunk with content, reasoning or a tool call. Chunks are decoded typed, and their text is
kept only where it will be sent back, because this client shares its cores with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from urllib.parse import urlsplit

import msgspec
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError
from msgspec import Struct

from replays.plan import MESSAGE_TOKENS
from replays.play import Answer

_OVERFLOW_WORDS = ("context length", "maximum context", "context_length_exceeded", "prompt is too long")
_REQUEST_SECONDS = 6 * 3600.0
_CONNECT_SECONDS = 10.0


class Function(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct):
    index: int = 0
    id: str | None = None
    function: Function | None = None


class Delta(Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class Choice(Struct):
    delta: Delta


class PromptDetails(Struct):
    cached_tokens: int | None = None


class SessionUsage(Struct):
    """What agentserve adds to the usage."""

    turn: str | None = None
    ceiling_tokens: int | None = None
    ceiling_block_tokens: int | None = None
    predicted_tokens: int | None = None
    missed_tokens: dict[str, int] | None = None


class UsageChunk(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    agentserve: SessionUsage | None = None


class StreamChunk(Struct):
    choices: list[Choice] = []
    usage: UsageChunk | None = None
    error: object = None


@dataclass(slots=True)
class Reply:
    """What came of one request. `error` None: it ended well."""

    started: float
    ended: float = 0.0
    first_content: float | None = None
    last_content: float | None = None
    usage: UsageChunk | None = None
    error: str | None = None
    overflow: bool = False
    answer: Answer | None = None
    num_bytes: int = 0


@dataclass(slots=True)
class _Collected:
    """The answer as it comes together, in the fields that the server used."""

    content: list[str] = field(default_factory=list)
    reasoning: dict[str, list[str]] = field(default_factory=dict)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)

    def add(self, delta: Delta) -> None:
        if delta.content:
            self.content.append(delta.content)
        # Some servers send both names for clients of either; one is enough to send back.
        if delta.reasoning:
            self.reasoning.setdefault("reasoning", []).append(delta.reasoning)
        elif delta.reasoning_content:
            self.reasoning.setdefault("reasoning_content", []).append(delta.reasoning_content)
        for call in delta.tool_calls or ():
            known = self.calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            known["id"] += call.id or ""
            if call.function is not None:
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""

    def answer(self) -> Answer:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self.content) or None}
        message |= {name: "".join(pieces) for name, pieces in self.reasoning.items()}
        calls = [self.calls[index] for index in sorted(self.calls)]
        if calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}} for call in calls
            ]
        elif message["content"] is None:
            message["content"] = ""
        return Answer(message, tuple(call["id"] for call in calls))


class ChatClient:
    """Sends chat requests to one base URL, each on a kept-alive connection of its own while it runs."""

    def __init__(self, base_url: str, *, concurrency: int, keep_answers: bool) -> None:
        url = urlsplit(base_url)
        self._http = HTTPClient.from_url(
            f"{url.scheme}://{url.netloc}", concurrency=concurrency, connection_timeout=_CONNECT_SECONDS, network_timeout=_REQUEST_SECONDS
        )
        self._path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._keep_answers = keep_answers
        self._decoder = msgspec.json.Decoder(StreamChunk)

    def close(self) -> None:
        self._http.close()

    def template_tokens(self, model: str, fields: dict[str, object]) -> int:
        """Tokens that stand in front of the first message, by a request with one word. Raises OSError when it is not answered.

        `fields` are those of every request that add to its prompt (tools). The request also makes the blocks of the template warm,
        so that of two servers on one engine the second has no start over the first.
        """
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 1,
            "ignore_eos": True,
            **fields,
        }
        reply = self.send(msgspec.json.encode(body), {})
        if reply.usage is None or reply.usage.prompt_tokens is None:
            raise OSError(f"a first request was not answered: {reply.error or 'no count of prompt tokens'}")
        return max(0, reply.usage.prompt_tokens - MESSAGE_TOKENS - 1)

    def send(self, body: bytes, headers: dict[str, str]) -> Reply:
        """POST `body` and read the stream to its end. Never raises for what the server or the network does: see `Reply.error`."""
        reply = Reply(started=monotonic())
        try:
            with self._post(body, {"content-type": "application/json", "accept": "text/event-stream", **headers}) as response:
                if response.status_code == 200:
                    self._read_stream(response, reply)
                else:
                    self._read_error(response.status_code, response.read(), reply)
        except (OSError, HTTPParseError) as error:
            reply.error = f"connection: {type(error).__name__}: {error}"
        except msgspec.DecodeError as error:
            reply.error = f"malformed chunk: {error}"
        reply.ended = monotonic()
        return reply

    def _post(self, body: bytes, headers: dict[str, str]) -> HTTPClient:
        """The response. Where the server closed the connection without a word, the request goes out once more: servers close idle
        connections (vLLM after 5 s), and one may do so at the moment when it is used again.
        """
        try:
            return self._http.post(self._path, body=body, headers=headers)
        except (HTTPConnectionClosed, ConnectionResetError, BrokenPipeError):
            return self._http.post(self._path, body=body, headers=headers)

    def _read_error(self, status: int, body: bytes, reply: Reply) -> None:
        text = body.decode(errors="replace")
        reply.error = f"HTTP {status}: {text[:300]}"
        reply.overflow = any(words in text.lower() for words in _OVERFLOW_WORDS)

    def _read_stream(self, response: HTTPClient, reply: Reply) -> None:
        collected = _Collected() if self._keep_answers else None
        while line := response.readline(b"\n"):
            reply.num_bytes += len(line)
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                response.read()
                if reply.usage is None:
                    reply.error = "the stream had no usage"
                reply.answer = collected.answer() if collected else None
                return
            self._take(self._decoder.decode(data), reply, collected)
            if reply.error:
                return
        reply.error = "the stream ended before [DONE]"

    @staticmethod
    def _take(chunk: StreamChunk, reply: Reply, collected: _Collected | None) -> None:
        if chunk.error is not None:
            reply.error = f"error event: {msgspec.json.encode(chunk.error).decode()[:300]}"
            return
        if chunk.usage is not None:
            reply.usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            if delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls:
                now = monotonic()
                reply.first_content = reply.first_content or now
                reply.last_content = now
                if collected is not None:
                    collected.add(delta)
