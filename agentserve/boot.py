"""Builds a server from its settings, and takes it down again. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from secrets import token_hex

import msgspec
import structlog
import xxhash

from admission.policies import ADMISSION_POLICIES
from admission.requests import Limits
from admission.tickets import TicketBook
from agentserve.cache import CacheBooks
from agentserve.canonical.canonicaliser import choose
from agentserve.deliveries import Deliveries
from agentserve.dialects.responses_store import ResponseStore
from agentserve.engines import ChatEngine, Engine
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, plugin_options
from agentserve.errors import SetupError
from agentserve.media import MediaTurns
from agentserve.metrics import Metrics
from agentserve.records import TurnLog
from agentserve.server import Server
from agentserve.sessions import Namespaces
from agentserve.settings import EngineSettings, Settings, StateSettings
from agentserve.state.breaker import Failure
from agentserve.state.link import RedisLink
from agentserve.state.stored import Listeners, StoredSessions
from agentserve.turns import Turns
from agentserve.waiting import WaitingRoom
from model.chat import ChatFormat
from model.chat.formats import chat_format
from model.tokenizer import Tokenizer, verify
from prefix_cache.mirror import Mirror

DEFAULT_BLOCK_SIZE = 128
"""For block hashes where the engine does not say its size; no block figure is reported then."""

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def running_server(settings: Settings, progress: Callable[[str], None]) -> AsyncIterator[Server]:
    """A server whose engine answers. Raises SetupError, or EngineUnavailable if the engine never does."""
    async with AsyncExitStack() as stack:
        engine, events, replay, nano = make_engine(settings, progress)
        stack.push_async_callback(engine.close)
        await engine.start()
        tokenizer, chat = await asyncio.to_thread(load_model_files, settings.engine, model_folder(settings, engine, nano))
        mirror = None
        if events is not None and engine.info.block_size is not None:
            mirror = Mirror(engine.info.block_size)
            subscriber = KvEventSubscriber(events, replay, settings.engine.events_topic, mirror)
            stack.push_async_callback(subscriber.close)
            await subscriber.start()
            await subscriber.caught_up()  # else the first predictions would not know an older engine's blocks
            if isinstance(engine, EmbeddedEngine):
                engine.on_restart = mirror.restarted
        server = build(settings, engine, tokenizer, chat, mirror)
        if server.turns.stored is not None:
            stack.push_async_callback(server.turns.stored.close)
            await server.turns.stored.start()
        yield server


def make_engine(settings: Settings, progress: Callable[[str], None]) -> tuple[Engine, str | None, str | None, Path | None]:
    """The engine that the settings name, its event endpoints, and the embedded engine's model folder."""
    options = settings.engine
    if options.url is not None:
        key = options.api_key.get_secret_value() if options.api_key else None
        engine = VllmEngine(options.url, api_key=key, start_timeout_seconds=options.start_seconds)
        return engine, options.events, options.events_replay, None
    embedded = EmbeddedEngine(
        EmbeddedOptions(
            cache_folder=settings.cache_folder,
            kv_tokens=options.kv_tokens,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            plugin=plugin_options(options.plugin),
            start_timeout_seconds=options.start_seconds,
        ),
        progress=progress,
    )
    return embedded, embedded.events_endpoint, embedded.replay_endpoint, embedded.model_folder


def model_folder(settings: Settings, engine: Engine, nano: Path | None) -> Path:
    """The folder with the served model's tokenizer. Raises SetupError if nothing names one."""
    folder = settings.engine.model_folder or nano or (Path(engine.info.root) if engine.info.root else None)
    if folder is None:
        raise SetupError("name the folder that holds the served model's tokenizer with --engine-model-folder")
    return folder


def load_model_files(options: EngineSettings, folder: Path) -> tuple[Tokenizer, ChatFormat]:
    """Tokenizer and chat format of a model folder, checked against the tokenizers library. Raises SetupError."""
    if not folder.is_dir():
        raise SetupError(
            f"no model folder at {str(folder)!r}: name the folder that holds the served model's tokenizer with --engine-model-folder"
        )
    try:
        tokenizer = Tokenizer.load(folder)
        verify(tokenizer, folder)
        return tokenizer, chat_format(options.chat_format, tokenizer, folder)
    except (OSError, ValueError) as error:
        raise SetupError(f"the model folder {str(folder)!r} cannot be used: {error}") from error


def build(settings: Settings, engine: Engine, tokenizer: Tokenizer, chat: ChatFormat, mirror: Mirror | None) -> Server:
    """A server over parts that are ready."""
    clock = time.monotonic
    limits = Limits(
        max_running=settings.limits.running_turns,
        max_waiting=settings.limits.queued_turns,
        capacity_tokens=engine.info.kv_capacity_tokens,
    )
    metrics = Metrics()
    room = WaitingRoom(ADMISSION_POLICIES["fcfs"](TicketBook(), limits), clock, metrics.queue.observe)
    namespaces = Namespaces(
        block_size=engine.info.block_size or DEFAULT_BLOCK_SIZE,
        max_tokens=settings.sessions.ledger_tokens,
        idle_seconds=settings.sessions.idle_seconds,
        share=settings.share_prefixes,
    )
    books = CacheBooks(block_size=engine.info.block_size, ceiling_tokens=settings.sessions.ceiling_tokens, mirror=mirror)
    turns = Turns(
        engine=engine,
        tokenizer=tokenizer,
        chat=chat,
        namespaces=namespaces,
        books=books,
        room=room,
        canonicaliser=choose(settings.canonicalise.mode, settings.canonicalise.on, settings.canonicalise.off),
        clock=clock,
        new_id=lambda: token_hex(12),
        log=TurnLog(settings.sessions.turn_records),
        wall_clock=_wall_clock,
        stored=stored_sessions(settings.state, partial(deployment, engine.info.model, tokenizer, chat), books, metrics, clock),
    )
    metrics.watch("waiting_turns", "Turns that wait for a ticket", lambda: room.num_waiting)
    metrics.watch("sessions", "Sessions that are known", lambda: namespaces.num_sessions)
    metrics.watch("ledger_tokens", "Tokens that all ledgers hold", lambda: namespaces.num_tokens)
    metrics.watch("ceiling_index_tokens", "Tokens that the ceiling index holds", lambda: books.tree.num_tokens)
    if mirror is not None:
        metrics.watch("kv_resident_tokens", "Tokens resident in the engine's KV cache, by its events", lambda: mirror.num_resident_tokens)
        metrics.watch("mirror_suspect", "1 while the mirror may not know all that is resident", lambda: mirror.is_suspect)
    created = int(_wall_clock())
    responses = ResponseStore(settings.limits.stored_response_bytes)
    metrics.watch("stored_response_bytes", "JSON of stored Responses", lambda: responses.num_bytes)
    media = MediaTurns(
        engine=engine if isinstance(engine, ChatEngine) else None,
        model=engine.info.model,
        namespaces=namespaces,
        room=room,
        clock=clock,
        new_id=turns.new_id,
    )
    deliveries = Deliveries(
        settings.limits.kept_answer_bytes, settings.limits.kept_answer_seconds, clock, lambda outcome: metrics.retries.labels(outcome).inc()
    )
    metrics.watch("kept_answer_bytes", "Whole answers that are kept for clients that ask again", lambda: deliveries.num_bytes)
    return Server(settings, engine, turns, namespaces, books, metrics, responses, deliveries, media, created)


def _wall_clock() -> float:
    """Seconds since 1970."""
    return datetime.now(UTC).timestamp()


def deployment(model: str, tokenizer: Tokenizer, chat: ChatFormat) -> bytes:
    """16 bytes that are equal on servers whose sessions may be mixed: of one model, chat format and vocabulary."""
    digest = xxhash.xxh3_128(msgspec.json.encode([model, chat.name, dict(tokenizer.control)]))
    for number in range(tokenizer.vocab_size):
        digest.update(tokenizer.token_bytes(number) + b"\0")
    return digest.digest()


def stored_sessions(
    options: StateSettings, deployed: Callable[[], bytes], books: CacheBooks, metrics: Metrics, clock: Callable[[], float]
) -> StoredSessions | None:
    """The sessions in Redis, if the settings name one. Raises SetupError."""
    if options.url is None:
        return None

    def failed(failure: Failure) -> None:
        metrics.state_failures.labels(failure.value).inc()

    link = RedisLink(options.url.get_secret_value(), failed)
    listeners = Listeners(
        computed=books.computed,
        loaded=lambda is_new: metrics.state_loads.labels("found" if is_new else "nothing").inc(),
        saved=metrics.state_saves.inc,
        failed=failed,
    )
    metrics.watch("state_breaker_open", "1 while Redis is not asked, as it refused or did not answer", lambda: link.is_open)
    stored = StoredSessions(link, deployed(), listeners, clock, ttl_seconds=options.ttl_seconds, timeout_seconds=options.timeout_seconds)
    metrics.watch("state_unsaved_sessions", "Sessions whose latest turn is not stored yet", lambda: stored.writer.num_waiting)
    return stored
