"""A chat server for the replay's tests: streams like vLLM, counts words as tokens, and remembers every prompt it has seen.

It keeps what it was sent, so that tests can look at the bodies and their times. With `sessions` it also says what agentserve says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

import msgspec
from aiohttp import web
from msgspec import Struct

from replays.plan import MESSAGE_TOKENS

BLOCK_TOKENS = 16
CAPACITY_TOKENS = 65_536


class Message(Struct, omit_defaults=True):
    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, object]] | None = None
    tool_call_id: str | None = None


class ChatBody(Struct, forbid_unknown_fields=True):
    messages: list[Message]
    model: str
    stream: bool
    stream_options: dict[str, bool]
    max_completion_tokens: int
    ignore_eos: bool = False
    tools: list[dict[str, object]] = []
    structured_outputs: dict[str, list[str]] = {}
    logit_bias: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came; times are of the monotonic clock."""

    body: ChatBody
    headers: dict[str, str]
    num_cached_tokens: int
    started: float
    ended: float


@dataclass(slots=True)
class ChatUpstream:
    """Answers every request with as many words as asked. `fail` and `overflow` pick requests by their number, from 0.

    A request of no stream is the replay's look at the template, which is `template_tokens` long; it is kept apart, in `probes`.
    """

    sessions: bool = True
    template_tokens: int = 0
    engine_url: str | None = None
    seconds: float = 0.0
    fail: frozenset[int] = frozenset()
    overflow: frozenset[int] = frozenset()
    break_off: frozenset[int] = frozenset()
    tool_calls: bool = False
    received: list[Received] = field(default_factory=list)
    probes: list[ChatBody] = field(default_factory=list)
    url: str = ""
    _num_requests: int = 0
    _seen: set[int] = field(default_factory=set)
    _hits: int = 0
    _computed: int = 0

    def _cached(self, words: list[str]) -> int:
        """Whole blocks of the prompt that were seen before, at most all but one token."""
        hit, whole, chain = 0, True, 0
        for start in range(0, len(words) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            chain = hash((chain, *words[start : start + BLOCK_TOKENS]))
            whole = whole and chain in self._seen and start + BLOCK_TOKENS < len(words)
            hit = start + BLOCK_TOKENS if whole else hit
            self._seen.add(chain)
        return hit

    async def chat(self, request: web.Request) -> web.StreamResponse:
        started = monotonic()
        body = msgspec.json.decode(await request.read(), type=ChatBody)
        if "x-correlation-id" not in request.headers:
            return await self._probe(request, body)
        number, self._num_requests = self._num_requests, self._num_requests + 1
        if number in self.fail:
            return web.json_response({"error": {"message": "boom"}}, status=500)
        if number in self.overflow:
            return web.json_response({"error": {"message": "This model's maximum context length is 10 tokens"}}, status=400)
        words = [word for message in body.messages for word in (message.role, *(message.content or "").split())]
        cached = self._cached(words)
        self._hits += cached
        self._computed += len(words) - cached
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.seconds)
        await self._stream(response, body, len(words), cached, broken=number in self.break_off)
        self.received.append(Received(body, {name.lower(): value for name, value in request.headers.items()}, cached, started, monotonic()))
        return response

    async def _probe(self, request: web.Request, body: ChatBody) -> web.StreamResponse:
        self.probes.append(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        usage = {"prompt_tokens": self.template_tokens + MESSAGE_TOKENS + 1, "completion_tokens": 1}
        await self._event(response, {"object": "chat.completion.chunk", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _stream(self, response: web.StreamResponse, body: ChatBody, num_words: int, cached: int, *, broken: bool) -> None:
        deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}, {"reasoning": "well "}]
        deltas += [{"content": f"word{index} "} for index in range(body.max_completion_tokens)]
        if self.tool_calls:
            deltas += [
                {"tool_calls": [{"index": 0, "id": "call-1", "type": "function", "function": {"name": "look", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": '{"at":1}'}}]},
            ]
        for delta in deltas:
            await self._event(response, {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]})
        if broken:
            await self._event(response, {"error": {"message": "engine died"}})
            return
        usage: dict[str, object] = {
            "prompt_tokens": num_words,
            "completion_tokens": body.max_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if self.sessions:
            ceiling = min(num_words, cached + 3)
            usage["agentserve"] = {
                "session_id": "s",
                "turn": "first" if len(body.messages) <= 2 else "exact",
                "ceiling_tokens": ceiling,
                "ceiling_block_tokens": cached,
                "predicted_tokens": cached,
                "missed_tokens": {"new": num_words - ceiling, "tail": ceiling - cached},
            }
        await self._event(response, {"object": "chat.completion.chunk", "choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")

    @staticmethod
    async def _event(response: web.StreamResponse, value: dict[str, object]) -> None:
        await response.write(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def metrics(self, _: web.Request) -> web.Response:
        lines = [
            "# TYPE vllm:kv_cache_usage_perc gauge",
            'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
            f'vllm:prompt_tokens_by_source_total{{source="local_compute",model_name="m"}} {float(self._computed)}',
            f'vllm:prompt_tokens_by_source_total{{source="local_cache_hit",model_name="m"}} {float(self._hits)}',
            'vllm:prompt_tokens_by_source_total{source="external_kv_transfer",model_name="m"} 0.0',
            'vllm:num_preemptions_total{engine="0"} 0.0',
            f'vllm:cache_config_info{{block_size="{BLOCK_TOKENS}",num_gpu_blocks="{CAPACITY_TOKENS // BLOCK_TOKENS + 1}"}} 1.0',
            f"agentserve_kv_resident_tokens {CAPACITY_TOKENS / 2}",
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "nano"}]})

    async def version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.0.1", "engine_url": self.engine_url})

    def application(self) -> web.Application:
        application = web.Application(client_max_size=64 * 2**20)
        application.router.add_post("/v1/chat/completions", self.chat)
        application.router.add_get("/metrics", self.metrics)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/version", self.version)
        return application


@contextmanager
def serving(upstream: ChatUpstream) -> Iterator[ChatUpstream]:
    """Serve `upstream` on a free port of the loopback, in a thread of its own, until the block ends."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(upstream.application(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        upstream.url = f"http://{host}:{port}"
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(10)
    try:
        yield upstream
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
