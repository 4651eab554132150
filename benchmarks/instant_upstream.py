"""An upstream as fast as Python allows, so that what a benchmark measures is the server in front of it.

It reads nothing of a request but its length, and answers every POST at once with the same streamed turn: one token, usage, [DONE].
The GET routes are those that routers and agentserve ask of a vLLM or SGLang worker before they trust it.

    python -m benchmarks.instant_upstream --model demo-model --token-ids 104,2
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec
import uvloop

ANSWER_TEXT = "ok"
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answers:
    """Whole HTTP responses by path, built once."""

    get: dict[bytes, bytes]
    post: dict[bytes, bytes]
    not_found: bytes = field(default=b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


def answers(model: str, token_ids: list[int]) -> Answers:
    """The fixed answers. `token_ids` is the turn that token routes give: what the text encodes to, then the stop id."""
    usage = {"prompt_tokens": 1, "completion_tokens": len(token_ids), "total_tokens": 1 + len(token_ids)}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": model}
    opening = {"index": 0, "delta": {"role": "assistant", "content": ANSWER_TEXT}, "finish_reason": None}
    chat = [
        head | {"choices": [opening]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        head | {"choices": [], "usage": usage},
    ]
    cmpl = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": model}
    choice = {"index": 0, "text": ANSWER_TEXT, "token_ids": token_ids, "finish_reason": "stop", "stop_reason": None}
    completion = [cmpl | {"choices": [choice]}, cmpl | {"choices": [], "usage": usage}]
    tokens = {"index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": token_ids, "logprobs": None}
    generate: list[dict[str, object]] = [{"request_id": "1", "choices": [tokens]}, {"request_id": "1", "choices": [], "usage": usage}]
    card = {"id": model, "object": "model", "created": 0, "owned_by": "vllm", "root": model, "max_model_len": 1 << 20}
    info = {"model_path": model, "served_model_name": model, "tokenizer_path": "", "is_generation": True}
    metrics = 'vllm:cache_config_info{block_size="128",num_gpu_blocks="48945"} 1.0\nvllm:kv_cache_usage_perc 0.0\n'
    return Answers(
        get={
            b"/health": _json({}),
            b"/health_generate": _json({}),
            b"/v1/models": _json({"object": "list", "data": [card]}),
            b"/version": _json({"version": "0.32.0"}),
            b"/get_model_info": _json(info),
            b"/model_info": _json(info),
            b"/get_server_info": _json({"model_path": model, "dp_size": 1, "max_total_num_tokens": 6_264_960}),
            b"/server_info": _json({"model_path": model, "dp_size": 1, "max_total_num_tokens": 6_264_960}),
            b"/metrics": _response(b"text/plain; version=0.0.4", metrics.encode()),
        },
        post={
            b"/v1/chat/completions": _stream(chat),
            b"/v1/completions": _stream(completion),
            b"/inference/v1/generate": _stream(generate),
        },
    )


def _response(content_type: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (content_type, len(body), body)


def _json(value: object) -> bytes:
    return _response(b"application/json", msgspec.json.encode(value))


def _stream(events: Sequence[Mapping[str, object]]) -> bytes:
    payloads = [*[msgspec.json.encode(event) for event in events], b"[DONE]"]
    chunks = [b"data: %b\n\n" % payload for payload in payloads]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + _LAST_CHUNK


class InstantProtocol(asyncio.Protocol):
    """One connection: heads are found, bodies are counted."""

    def __init__(self, ready: Answers) -> None:
        self._ready = ready
        self._head = b""
        self._answer = b""
        self._num_left = 0
        """Body bytes still to come; −1 in a chunked body, whose end is recognised by its last bytes."""
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class, not a subclass

    def data_received(self, data: bytes) -> None:
        while data:
            data = self._body(data) if self._num_left else self._read_head(data)

    def _read_head(self, data: bytes) -> bytes:
        head, found, rest = (self._head + data).partition(_HEAD_END)
        if not found:
            self._head = head
            return b""
        self._head = b""
        method, path, _ = head.split(b" ", 2)
        path = path.partition(b"?")[0]
        self._answer = (self._ready.post if method == b"POST" else self._ready.get).get(path, self._ready.not_found)
        fields = head.lower()
        self._num_left = -1 if b"transfer-encoding: chunked" in fields else _content_length(fields)
        if b"expect: 100-continue" in fields:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self._num_left:
            self._transport.write(self._answer)
        return rest

    def _body(self, data: bytes) -> bytes:
        if self._num_left < 0:
            self._tail = (self._tail + data[-7:])[-7:]
            if self._tail.endswith(b"\r\n" + _LAST_CHUNK):
                self._num_left, self._tail = 0, b""
                self._transport.write(self._answer)
            return b""
        taken = min(self._num_left, len(data))
        self._num_left -= taken
        if not self._num_left:
            self._transport.write(self._answer)
        return data[taken:]


def _content_length(fields: bytes) -> int:
    _, found, rest = fields.partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else 0


async def serve(model: str, token_ids: list[int], port: int) -> None:
    """Listen on loopback until cancelled; the port is printed when connections are taken."""
    ready = answers(model, token_ids)
    server = await asyncio.get_running_loop().create_server(lambda: InstantProtocol(ready), "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="An upstream that answers at once.")
    parser.add_argument("--model", default="demo-model")
    parser.add_argument("--token-ids", default="111,107,2", help="generated ids of the token routes, stop id last")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    uvloop.run(serve(options.model, [int(token) for token in options.token_ids.split(",")], options.port))


if __name__ == "__main__":
    main()
