"""A simulated engine behind vLLM's HTTP: token ids in and out, /metrics, /health, /v1/models, and where its KV events are."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from array import array
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import msgspec
from aiohttp import web

from model.chat.formats import detect_chat_format
from model.tokenizer import Tokenizer
from replays.sim_engine.answers import Said, Speaker
from replays.sim_engine.core import Live, SimulatedEngine
from replays.sim_engine.events import TOPIC, EventPublisher
from replays.sim_engine.exposition import metrics_text
from replays.sim_engine.wire import ROUTES, AnyRequest, Body, Route, choice_of, usage_of
from replays.simulator.profiles import find_profile

_MAX_BODY_BYTES = 256 << 20
_KEEPALIVE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What to serve, and where. Port 0 takes a free one."""

    profile: str
    model_folder: Path
    model: str = ""
    """Served name; the profile's where it is empty."""
    host: str = "127.0.0.1"
    port: int = 0
    speed: float = 1.0
    policy: str = "lru"
    capacity_tokens: int | None = None
    max_model_len: int | None = None
    steps_at_once: int = 1
    events: str = "tcp://127.0.0.1:*"
    events_replay: str = "tcp://127.0.0.1:*"


@dataclass(eq=False)
class SimulatedServer:
    """The routes over one engine."""

    options: ServeOptions
    engine: SimulatedEngine
    speaker: Speaker
    publisher: EventPublisher
    url: str = ""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def model(self) -> str:
        return self.options.model or self.options.profile

    @property
    def max_model_len(self) -> int:
        return min(self.options.max_model_len or self.engine.max_model_len, self.engine.max_model_len)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes([web.post(path, self._generate) for path in ROUTES])
        app.add_routes([web.get("/health", self._health), web.get("/version", self._version), web.get("/v1/models", self._models)])
        app.add_routes([web.get("/metrics", self._metrics), web.get("/kv_event_sources", self._event_sources)])
        return app

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        route = ROUTES[http.path]
        try:
            request = route.read(await http.read())
            prompt = array("I", request.ids)
        except (msgspec.MsgspecError, OverflowError) as error:
            return _refusal(400, str(error))
        if not prompt:
            return _refusal(400, "the prompt has no token ids; text is not understood here")
        if request.model not in (None, self.model):
            return _refusal(404, f"The model `{request.model}` does not exist.")
        room = self.max_model_len - len(prompt)
        max_tokens = room if request.sampling.max_tokens is None else request.sampling.max_tokens
        if not 1 <= max_tokens <= room:
            return _refusal(400, _too_long(self.max_model_len, len(prompt), max_tokens))
        request.request_id = request.request_id or f"sim-{next(self._numbers)}"
        ignore_eos = request.sampling.ignore_eos or request.sampling.min_tokens >= max_tokens
        said = self.speaker.say(prompt, max_tokens, ignore_eos=ignore_eos, seed=request.sampling.seed or 0)
        session = request.session_id or http.headers.get("X-Session-ID") or ""
        answer = self.engine.generate(prompt, said, salt=request.cache_salt or "", session_id=session)
        async with aclosing(answer):
            if request.stream:
                return await self._stream(http, _Exchange(route, request, prompt, said), answer)
            live = [each async for each, _ in answer][-1]
        choice = self._choice(_Exchange(route, request, prompt, said), range(len(said.ids)), is_first=True)
        return web.json_response(route.body(request, choice, self._usage(live, len(prompt)), stream=False), dumps=_dumps)

    async def _stream(self, http: web.Request, exchange: _Exchange, answer: AsyncIterator[tuple[Live, range]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        usage: Body = {}
        async for live, places in answer:
            choice = self._choice(exchange, places, is_first=places.start == 0)
            await response.write(_event(exchange.route.body(exchange.request, choice, None, stream=True)))
            usage = self._usage(live, len(exchange.prompt))
        await response.write(_event(exchange.route.body(exchange.request, {}, usage, stream=True)) + b"data: [DONE]\n\n")
        return response

    def _choice(self, exchange: _Exchange, places: range, *, is_first: bool) -> Body:
        said = exchange.said
        text = self.speaker.text(said.ids[places.start : places.stop])
        echo = exchange.prompt if is_first and exchange.request.return_token_ids else None
        return choice_of(said, places, text, is_last=places.stop == len(said.ids), prompt=echo)

    def _usage(self, live: Live, num_prompt_tokens: int) -> Body:
        request = live.request
        cached = request.num_hit_blocks * self.engine.options.block_size + request.num_external_tokens
        return usage_of(num_prompt_tokens, request.num_generated, cached)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": f"0.32.0-simulated-{version('agentserve')}"})

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "vllm", "root": str(self.options.model_folder), "parent": None}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self.max_model_len}]})

    async def _metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(text=metrics_text(self.engine, self.model), headers=headers)

    async def _event_sources(self, _: web.Request) -> web.Response:
        source = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.publisher.endpoint, "topic": TOPIC}
        return web.json_response({"0": source | {"replay_endpoint": self.publisher.replay_endpoint}})


@dataclass(frozen=True, slots=True)
class _Exchange:
    route: Route
    request: AnyRequest
    prompt: array[int]
    said: Said


@asynccontextmanager
async def simulated_server(options: ServeOptions) -> AsyncIterator[SimulatedServer]:
    """Listens between enter and exit. Raises ValueError for a profile that cannot be served, OSError or ZMQError for an address in use."""
    profile = find_profile(options.profile)
    if profile.prefill is not None:
        raise ValueError(f"profile {profile.name!r} has prefill and decode apart; one engine is served: take its aggregated profile")
    tokenizer = await asyncio.to_thread(Tokenizer.load, options.model_folder)
    chat = detect_chat_format(tokenizer, options.model_folder)
    publisher = EventPublisher(options.events, options.events_replay)
    await publisher.start()
    engine = SimulatedEngine(
        profile,
        speed=options.speed,
        policy=options.policy,
        capacity_tokens=options.capacity_tokens,
        steps_at_once=options.steps_at_once,
        on_events=publisher.publish,
    )
    server = SimulatedServer(options, engine, Speaker(tokenizer, chat.stop_ids[0]), publisher)
    # Cancelling the handler is how aiohttp tells that the client is gone, while nothing is being written too.
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1, keepalive_timeout=_KEEPALIVE_SECONDS)
    steps = asyncio.create_task(engine.run(), name="simulated steps")
    try:
        await runner.setup()
        await web.TCPSite(runner, options.host, options.port).start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()
        steps.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await steps
        await publisher.close()


def _dumps(body: Body) -> str:
    return msgspec.json.encode(body).decode()


def _event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _refusal(status: int, message: str) -> web.Response:
    kinds = {400: "BadRequestError", 404: "NotFoundError"}
    return web.json_response({"error": {"message": message, "type": kinds[status], "param": None, "code": status}}, status=status)


def _too_long(most: int, num_prompt_tokens: int, num_output_tokens: int) -> str:
    return (
        f"This model's maximum context length is {most} tokens. However, you requested {num_output_tokens} output tokens and your prompt "
        f"contains {num_prompt_tokens} input tokens."
    )
