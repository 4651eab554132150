"""The upstream's HTTP side."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec
from aiohttp import web

from tests.upstream.cache import Allocation, KvModel, NoRoom
from tests.upstream.dialects import DIALECTS, Answer, BadRequest, Body, Dialect
from tests.upstream.engine import ScriptedEngine, Work
from tests.upstream.script import ByteRenderer, Renderer, Script, generate
from tests.upstream.wire import cut, error, send, unauthorized

_MAX_BODY_BYTES = 256 * 2**20


@dataclass(slots=True)
class LoggedRequest:
    """One generating request. Times are `time.monotonic()` seconds; None: it did not happen."""

    path: str
    headers: Mapping[str, str]
    body: Body
    raw: bytes
    received_at: float
    prompt_ids: tuple[int, ...] = ()
    generated_ids: tuple[int, ...] = ()
    """The ids of this request's whole generation, sent or not."""
    num_sent_chunks: int = 0
    num_cached_tokens: int | None = None
    first_chunk_at: float | None = None
    finished_at: float | None = None
    aborted_at: float | None = None
    """When the client was seen to be gone."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One request on its way to an answer."""

    request: web.Request
    logged: LoggedRequest
    script: Script
    dialect: Dialect
    answer: Answer


@dataclass
class Upstream:
    """An async context manager: between enter and exit it listens on a free loopback port.

    Generating requests take `scripts` in order, then `default`. `by_last_user` goes first: the key that occurs last in the prompt's
    text chooses the script.
    """

    scripts: Iterable[Script] = ()
    default: Script = field(default_factory=Script)
    by_last_user: Mapping[str, Script] = field(default_factory=dict)
    renderer: Renderer = field(default_factory=ByteRenderer)
    model: str = "demo-model"
    max_model_len: int = 131_072
    kv: KvModel | None = None
    healthy: bool = True
    api_key: str | None = None

    def __post_init__(self) -> None:
        self.url = ""
        self.requests: list[LoggedRequest] = []
        self.other_paths: list[str] = []
        """Requests that generate nothing, in order."""
        self.engine = ScriptedEngine(self.kv)
        self._queue = deque(self.scripts)
        self._numbers = itertools.count(1)

    def script(self, *scripts: Script) -> None:
        """Queue more answers."""
        self._queue.extend(scripts)

    async def __aenter__(self) -> Self:
        await self.engine.start()
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.post(path, self._handle) for path in DIALECTS])
        app.add_routes([web.get("/health", self._health), web.get("/version", self._version), web.get("/v1/models", self._models)])
        app.add_routes([web.get("/metrics", self._metrics), web.get("/kv_event_sources", self._kv_event_sources)])
        app.add_routes([web.post("/tokenize", self._tokenize)])
        # Cancelling the handler is how aiohttp tells that the client is gone, while nothing is being written too.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self.engine.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        if not self._authorized(request):
            return unauthorized()
        try:
            body = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as refusal:
            return error(400, f"JSON decode error: {refusal}")
        logged = LoggedRequest(request.path, dict(request.headers), body, raw, time.monotonic())
        self.requests.append(logged)
        try:
            response = await self._answer(request, logged)
        except (asyncio.CancelledError, ConnectionResetError):
            logged.aborted_at = time.monotonic()
            raise
        logged.finished_at = time.monotonic()
        return response

    async def _answer(self, request: web.Request, logged: LoggedRequest) -> web.StreamResponse:
        body, dialect = logged.body, DIALECTS[request.path]
        if body.get("model") not in (None, self.model):
            return error(404, f"The model `{body['model']}` does not exist.", param="model")
        try:
            logged.prompt_ids = tuple(dialect.prompt_ids(body, self.renderer))
            sampling = dialect.sampling(body)
        except BadRequest as refusal:
            return error(400, str(refusal))
        room = self.max_model_len - len(logged.prompt_ids)
        asked = sampling.get("max_tokens")
        max_tokens = asked if isinstance(asked, int) else room
        if room < 1 or max_tokens > room:
            return error(400, self._too_long(len(logged.prompt_ids), max_tokens))
        script = self._choose(logged.prompt_ids)
        if script.status != 200:
            headers = {} if script.retry_after_seconds is None else {"Retry-After": str(script.retry_after_seconds)}
            return error(script.status, script.message, headers=headers)
        generation = generate(script, self.renderer, sampling, max_tokens)
        logged.generated_ids = generation.ids
        request_id = request.headers.get("X-Request-Id") or str(body.get("request_id") or next(self._numbers))
        chunks, created = tuple(generation.chunks(script.ids_per_chunk)), time.time_ns() // 1_000_000_000
        answer = Answer(request_id, self.model, created, generation, chunks, script.drop_ids_in_chunks, logged.prompt_ids, self.renderer)
        return await self._run(_Exchange(request, logged, script, dialect, answer))

    async def _run(self, exchange: _Exchange) -> web.StreamResponse:
        logged, body = exchange.logged, exchange.logged.body
        session_id = body.get("session_id") or exchange.request.headers.get("X-Session-ID")
        work = Work(logged.prompt_ids, len(logged.generated_ids), body.get("cache_salt"), session_id)
        await asyncio.sleep(exchange.script.ttft_seconds)
        try:
            async with self.engine.run(work) as allocation:
                logged.num_cached_tokens = None if allocation is None else allocation.num_cached_tokens
                if body.get("stream"):
                    return await self._stream(exchange, allocation)
                return await self._full(exchange, allocation)
        except NoRoom as refusal:
            return error(400, str(refusal))

    def _choose(self, prompt_ids: tuple[int, ...]) -> Script:
        if self.by_last_user:
            text = self.renderer.decode_bytes(prompt_ids).decode("utf-8", "replace")
            place, key = max((text.rfind(key), key) for key in self.by_last_user)
            if place >= 0:
                return self.by_last_user[key]
        return self._queue.popleft() if self._queue else self.default

    async def _full(self, exchange: _Exchange, allocation: Allocation | None) -> web.Response:
        logged, answer = exchange.logged, exchange.answer
        for number in range(len(answer.chunks)):
            await self._step(exchange, number, allocation)
        logged.first_chunk_at, logged.num_sent_chunks = time.monotonic(), len(answer.chunks)
        return web.json_response(exchange.dialect.full(logged.body, answer, _usage(exchange)))

    async def _stream(self, exchange: _Exchange, allocation: Allocation | None) -> web.StreamResponse:
        script, logged = exchange.script, exchange.logged
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(exchange.request)
        if script.raw_sse is not None:
            for piece in script.raw_sse:
                await response.write(piece)
            return response
        for number, event in enumerate(exchange.dialect.events(logged.body, exchange.answer)):
            if script.cut is not None and number == script.cut_after_chunks:
                return cut(exchange.request, response, script.cut)
            if number == script.error_after_chunks:
                failure = {"message": script.message, "type": "InternalServerError", "param": None, "code": 500}
                await send(response, script, msgspec.json.encode({"error": failure}), b"[DONE]")
                return response
            await self._step(exchange, number, allocation)
            logged.first_chunk_at = logged.first_chunk_at or time.monotonic()
            await send(response, script, msgspec.json.encode(event))
            logged.num_sent_chunks = number + 1
        await self._end(exchange, response)
        return response

    async def _end(self, exchange: _Exchange, response: web.StreamResponse) -> None:
        script, body = exchange.script, exchange.logged.body
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage") and not script.omit_usage:
            await send(response, script, msgspec.json.encode(exchange.dialect.usage_event(body, exchange.answer, _usage(exchange))))
        if script.cut is not None:
            cut(exchange.request, response, script.cut)
        else:
            await send(response, script, b"[DONE]")

    async def _step(self, exchange: _Exchange, number: int, allocation: Allocation | None) -> None:
        """Generate chunk `number`."""
        if number:
            await asyncio.sleep(exchange.script.itl_seconds)
        if allocation is not None and number == exchange.script.preempt_after_chunks:
            num_left = sum(map(len, exchange.answer.chunks[number:]))
            await self.engine.preempt(allocation, num_left, keep_blocks=exchange.script.preempted_blocks_stay)
        await self.engine.decode(allocation, exchange.answer.chunks[number])

    def _authorized(self, request: web.Request) -> bool:
        return self.api_key is None or request.headers.get("Authorization") == f"Bearer {self.api_key}"

    async def _health(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        return web.json_response({"version": "0.32.0"})

    async def _models(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        if not self._authorized(request):
            return unauthorized()
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "vllm", "root": self.model, "parent": None}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self.max_model_len, "permission": []}]})

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        events = self.engine.events
        if events is None:
            return web.json_response({})
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events.endpoint, "topic": events.topic.decode()}
        return web.json_response({"0": source | {"replay_endpoint": events.replay_endpoint}})

    async def _metrics(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text=self.engine.metrics_text(self.model), headers=headers)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.other_paths.append(request.path)
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
        dialect = DIALECTS["/v1/completions" if isinstance(body.get("prompt"), str) else "/v1/chat/completions"]
        try:
            ids = dialect.prompt_ids(body, self.renderer)
        except BadRequest as refusal:
            return error(400, str(refusal))
        return web.json_response({"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": None})

    def _too_long(self, num_prompt_tokens: int, num_output_tokens: int) -> str:
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {num_output_tokens} output "
            f"tokens and your prompt contains {num_prompt_tokens} input tokens."
        )


def _usage(exchange: _Exchange) -> Body:
    logged, override = exchange.logged, exchange.script.usage
    prompt = len(logged.prompt_ids) if override.num_prompt_tokens is None else override.num_prompt_tokens
    generated = len(logged.generated_ids) if override.num_generated_tokens is None else override.num_generated_tokens
    cached = logged.num_cached_tokens if override.num_cached_tokens is None else override.num_cached_tokens
    usage: Body = {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
    return usage if cached is None else usage | {"prompt_tokens_details": {"cached_tokens": cached}}


@contextmanager
def in_thread(upstream: Upstream) -> Iterator[Upstream]:
    """Run `upstream` in a thread with its own event loop, for synchronous callers. Its log may be read at any time."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="upstream", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(upstream.__aenter__(), loop).result(10)
        try:
            yield upstream
        finally:
            asyncio.run_coroutine_threadsafe(upstream.__aexit__(None, None, None), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
