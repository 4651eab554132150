"""A running vLLM over HTTP: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
import structlog
from aiohttp.abc import AbstractStreamWriter

from agentserve.engines import ChatChunk, ChatRequest, Chunk, EngineInfo, GenerateRequest
from agentserve.engines.prometheus import samples
from agentserve.engines.sse import SseParser
from agentserve.engines.vllm_chat import CHAT_PATH, read_chat_event
from agentserve.engines.vllm_wire import COMPLETIONS, GENERATE, Body, Route, read_event, read_refusal
from agentserve.errors import ConnectionEnded, EngineError, EngineRefused, EngineUnavailable, SetupError

# uvicorn closes an idle connection after 5 s; letting go first means never writing into one that is being closed.
KEEPALIVE_SECONDS: Final = 4.0
CONNECT_SECONDS: Final = 10.0
HEALTH_SECONDS: Final = 1.0
POLL_SECONDS: Final = 0.25
SAY_FIRST_SECONDS: Final = 0.5
SAY_SECONDS: Final = 15.0
# What a route answers to an empty body when the engine does not have it (403: vLLM without --enable-scale-out).
_ROUTE_ABSENT: Final = (403, 404, 405, 501)

_FILES_USED_UP: Final = (errno.EMFILE, errno.ENFILE)

T = TypeVar("T")

_log = structlog.get_logger(__name__)


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _Payload(aiohttp.Payload):
    """Pieces of JSON written one after the other: a long prompt is neither copied into one body nor warned of for its size."""

    def __init__(self, body: Body) -> None:
        super().__init__(body, content_type="application/json")
        self._body = body
        self._size = sum(map(len, body))

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._body).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._body:
            await writer.write(piece)


class VllmEngine:
    """The vLLM server at `url` (scheme, host and port).

    `model` picks one of several served names (default: the first), `route` one way to send ids (default: the best that is there).
    `progress` hears what is waited for at a start.
    """

    info: EngineInfo

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        route: Route | None = None,
        start_timeout_seconds: float = 600.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._model = model
        self._start_timeout_seconds = start_timeout_seconds
        self._progress = progress
        self._waits_for = "no answer yet"
        self._session: aiohttp.ClientSession | None = None
        self.num_retries = 0
        """Requests sent a second time, as their connection had ended before anything arrived."""
        self._asked_route = route
        self._route = route or COMPLETIONS
        self._warned_of_unknown_cached_tokens = False

    async def start(self) -> None:
        """Wait until the engine answers, then learn its model, sizes and route. Safe to call again after the engine restarted.

        Raises `EngineUnavailable` after `start_timeout_seconds`, `SetupError` where waiting would not help (key or model refused).
        """
        if self._session is None:
            self._session = self._open_session()
        saying = asyncio.create_task(self._say_waiting())
        try:
            models = await self._wait_for_models()
        finally:
            saying.cancel()
        served = next((m for m in models if self._model in (None, m.id)), None)
        if served is None:
            names = ", ".join(repr(m.id) for m in models)
            raise SetupError(f"The engine at {self.url} does not serve {self._model!r}. It serves {names}: choose one of these.")
        if served.max_model_len is None:
            raise SetupError(f"The engine at {self.url} does not say max_model_len in /v1/models. Use the URL of vLLM itself.")
        version = msgspec.json.decode(await self._get("/version"), type=_Version).version
        block_size, num_blocks = _kv_pool(await self.metrics())
        self.info = EngineInfo(f"vllm {version}", served.id, served.max_model_len, block_size, num_blocks, served.root)
        if block_size is not None and block_size > served.max_model_len:
            cure = "start the engine with a smaller --block-size"
            _log.warning("no prefix can be cached: a block is longer than the context", block_size=block_size, cure=cure)
        self._route = self._asked_route or await self._find_route()
        _log.info("engine ready", url=self.url, engine=self.info.name, model=served.id, route=self._route.path, num_blocks=num_blocks)

    async def close(self) -> None:
        """Close every connection; requests that still run are aborted at the engine."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def healthy(self) -> bool:
        """Whether /health answers 200 within a second."""
        try:
            async with self._http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, EngineUnavailable):
            return False

    async def metrics(self) -> bytes:
        """The engine's /metrics, unchanged. Raises `EngineUnavailable`."""
        return await self._get("/metrics")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Run `request`; the last chunk carries the usage (vLLM says cached tokens only there).

        Closing the generator closes the connection, which is how vLLM learns that it must abort: use `contextlib.aclosing`.
        Raises `EngineUnavailable` where nothing had arrived and the engine is gone, `EngineRefused` where it said no, and
        `EngineError` where it broke off later, `EngineUnavailable` among them where it says that it died.
        """
        body = self._route.body(request, self.info.model)
        async with aclosing(self._events(self._route.path, body, request.session_id, read_event)) as chunks:
            async for chunk in chunks:
                self._warn_of_unknown_cached_tokens(chunk)
                yield chunk

    async def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        """Run `request` on vLLM's own chat route, which renders the conversation and parses the answer by itself. Else as `generate`."""
        async with aclosing(self._events(CHAT_PATH, (request.body,), request.session_id, read_chat_event)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _events(self, path: str, body: Body, session_id: str | None, read: Callable[[bytes], T]) -> AsyncGenerator[T, None]:
        """The events of one request. Where the connection ended before the first, nobody has seen anything: once more then, and no more."""
        started = False
        try:
            async with aclosing(self._attempt(path, body, session_id, read)) as events:
                async for event in events:
                    started = True
                    yield event
            return
        except ConnectionEnded as error:
            if started:
                raise
            self.num_retries += 1
            _log.warning("connection ended before the first token, sent once more", url=self.url, error=error.message)
        async with aclosing(self._attempt(path, body, session_id, read)) as events:
            async for event in events:
                yield event

    async def _attempt(self, path: str, body: Body, session_id: str | None, read: Callable[[bytes], T]) -> AsyncGenerator[T, None]:
        response = await self._post(path, body, session_id)
        try:
            async for chunk in self._chunks(response, read):
                yield chunk
        finally:
            # Does nothing after a stream that ended by itself: its connection is back in the pool by then.
            response.close()

    async def _post(self, path: str, body: Body, session_id: str | None) -> aiohttp.ClientResponse:
        headers = {"Content-Type": "application/json"}
        if session_id is not None:
            headers["X-Session-ID"] = quote(session_id, safe="/:@-._~")
        response = await self._sent(path, body, headers)
        if response.status != 200:
            async with response:
                refusal = read_refusal(await response.read(), response.status)
            asked = response.headers.get("Retry-After", "")
            refusal.retry_after_seconds = float(asked) if asked.isascii() and asked.isdigit() else None  # a date would need equal clocks
            raise refusal
        return response

    async def _sent(self, path: str, body: Body, headers: dict[str, str]) -> aiohttp.ClientResponse:
        deadline = asyncio.get_running_loop().time() + CONNECT_SECONDS
        while True:
            try:
                return await self._http.post(f"{self.url}{path}", data=_Payload(body), headers=headers)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if getattr(error, "errno", None) not in _FILES_USED_UP or asyncio.get_running_loop().time() > deadline:
                    raise self._ended(error) from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise self._unavailable(error) from error
            await asyncio.sleep(POLL_SECONDS)  # not the engine's fault, and over as soon as those have left who are refused

    async def _chunks(self, response: aiohttp.ClientResponse, read: Callable[[bytes], T]) -> AsyncGenerator[T, None]:
        parser = SseParser()
        started = done = False
        try:
            async for piece in response.content.iter_any():
                for data in parser.feed(piece):
                    if data == b"[DONE]":
                        done = True
                        continue
                    chunk = self._read(data, started, read)
                    started = True
                    yield chunk
        except aiohttp.ClientError as error:
            if not started:
                raise self._ended(error) from error
            raise EngineError(f"The engine at {self.url} broke off in the middle of its answer ({error!r}).") from error
        if not done and not started:
            raise ConnectionEnded(f"The engine at {self.url} closed the connection before its first token. Try again.")
        if not done:
            raise EngineError(f"The engine at {self.url} ended its answer without saying that it was complete.")

    def _read(self, data: bytes, started: bool, read: Callable[[bytes], T]) -> T:
        try:
            return read(data)
        except EngineRefused as error:
            if not started:
                raise
            broken = EngineUnavailable if error.status == EngineUnavailable.status else EngineError
            raise broken(f"The engine failed in the middle of its answer: {error.message}") from error
        except msgspec.MsgspecError as error:
            raise EngineError(f"The engine at {self.url} sent an event that is not vLLM's: {error}: {data[:200]!r}") from error

    def _warn_of_unknown_cached_tokens(self, chunk: Chunk) -> None:
        if chunk.usage is not None and chunk.usage.num_cached_tokens is None and not self._warned_of_unknown_cached_tokens:
            self._warned_of_unknown_cached_tokens = True
            _log.warning("cached tokens unknown", url=self.url, cure="start vLLM with --enable-prompt-tokens-details")

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailable(f"The engine at {self.url} is not started.")
        return self._session

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    def _ended(self, error: Exception) -> ConnectionEnded:
        return ConnectionEnded(self._unavailable(error).message)

    def _unavailable(self, error: Exception) -> EngineUnavailable:
        return EngineUnavailable(f"The engine at {self.url} does not answer ({error or type(error).__name__}). Is it running?")

    async def _get(self, path: str) -> bytes:
        try:
            async with self._http.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=CONNECT_SECONDS)) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        if response.status != 200:
            raise read_refusal(body, response.status)
        return body

    async def _wait_for_models(self) -> list[_Model]:
        """The served models, once the engine says them; a server that loads its model refuses connections or says 503."""
        deadline = asyncio.get_running_loop().time() + self._start_timeout_seconds
        while True:
            try:
                return msgspec.json.decode(await self._get("/v1/models"), type=_Models).data
            except EngineRefused as error:
                if error.status in (401, 403):
                    raise SetupError(f"The engine at {self.url} refuses the API key: {error.message}") from error
                reason: EngineError = error
            except EngineUnavailable as error:
                reason = error
            except msgspec.MsgspecError as error:
                raise SetupError(f"The server at {self.url} is not a vLLM: /v1/models says something else ({error}).") from error
            self._waits_for = reason.message
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineUnavailable(f"Gave up after {self._start_timeout_seconds:.0f} s: {reason.message}") from reason
            await asyncio.sleep(POLL_SECONDS)

    async def _say_waiting(self) -> None:
        """Until it is cancelled: says what is waited for, soon and then now and again."""
        seconds = SAY_FIRST_SECONDS
        while True:
            await asyncio.sleep(seconds)
            limit = f"for {self._start_timeout_seconds:.0f} s at most"
            self._progress(f"waiting for the engine at {self.url} to answer, {limit}: {self._waits_for}")
            seconds = SAY_SECONDS

    async def _find_route(self) -> Route:
        """An empty body is refused by a route that is there, before any work."""
        try:
            async with self._http.post(f"{self.url}{GENERATE.path}", data=b"{}", headers={"Content-Type": "application/json"}) as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unavailable(error) from error
        return COMPLETIONS if response.status in _ROUTE_ABSENT else GENERATE


def _kv_pool(metrics: bytes) -> tuple[int | None, int | None]:
    """Block size in tokens, and usable blocks summed over data-parallel ranks: vLLM keeps block 0 of each rank as its null block."""
    ranks = [sample.labels for sample in samples(metrics, "vllm:cache_config_info")]
    try:
        sizes = [(int(rank["block_size"]), int(rank["num_gpu_blocks"]) - 1) for rank in ranks]
    except (KeyError, ValueError):
        return None, None
    return (sizes[0][0], sum(num_blocks for _, num_blocks in sizes)) if sizes else (None, None)
