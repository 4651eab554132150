"""Builds a server from its settings, and takes it down again. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import math
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

from admission.lifecycle import Lifecycle
from admission.policies import ADMISSION_POLICIES
from admission.requests import Limits
from admission.returns import ReturnModel
from admission.tickets import TicketBook
from admission.twins import TwinGate
from agentserve.cache import CacheBooks
from agentserve.canonical.canonicaliser import choose
from agentserve.capture import Capture, CaptureOptions
from agentserve.deliveries import Deliveries
from agentserve.dialects.responses_store import ResponseStore
from agentserve.engines import ChatEngine, Engine
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.hints import EngineHints, NoHints
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.lmcache import LmcacheServer
from agentserve.engines.lmcache_command import LmcacheOptions
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions
from agentserve.errors import SetupError
from agentserve.media import MediaTurns
from agentserve.metrics import Metrics
from agentserve.policies import Policies, chosen
from agentserve.records import TurnLog
from agentserve.retention import Retention
from agentserve.server import Server
from agentserve.sessions import Namespaces
from agentserve.settings import EngineSettings, Settings, StateSettings
from agentserve.state.breaker import Failure
from agentserve.state.link import RedisLink
from agentserve.state.stored import Listeners, StoredSessions
from agentserve.turns import Turns
from agentserve.twins import TwinRoom
from agentserve.waiting import WaitingRoom
from model.chat import ChatFormat
from model.chat.formats import chat_format
from model.tokenizer import Tokenizer, verify
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.chunks import Watermark
from prefix_cache.tiers.offload import Offload

DEFAULT_BLOCK_SIZE = 128
"""For block hashes where the engine does not say its size; no block figure is reported then."""

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def running_server(settings: Settings, progress: Callable[[str], None]) -> AsyncIterator[Server]:
    """A server whose engine answers. Raises SetupError, or EngineUnavailable if the engine never does."""
    async with AsyncExitStack() as stack:
        tier = await start_offload(settings, progress, stack)
        engine, events, replay, nano = make_engine(settings, progress, tier)
        stack.push_async_callback(engine.close)
        await engine.start()
        tokenizer, chat = await asyncio.to_thread(load_model_files, settings.engine, model_folder(settings, engine, nano))
        mirror, offload = None, None
        if events is not None and engine.info.block_size is not None:
            mirror = Mirror(engine.info.block_size)
            offload = follow_offload(settings, mirror, tier)
            subscriber = KvEventSubscriber(events, replay, settings.engine.events_topic, mirror)
            stack.push_async_callback(subscriber.close)
            await subscriber.start()
            await subscriber.caught_up()  # else the first predictions would not know an older engine's blocks
            if isinstance(engine, EmbeddedEngine):
                engine.on_restart = mirror.restarted
        server = build(settings, engine, tokenizer, chat, mirror, offload)
        if server.turns.capture is not None:
            server.turns.capture.start()
            stack.push_async_callback(asyncio.to_thread, server.turns.capture.close)
        if server.turns.stored is not None:
            stack.push_async_callback(server.turns.stored.close)
            await server.turns.stored.start()
        yield server


async def start_offload(settings: Settings, progress: Callable[[str], None], stack: AsyncExitStack) -> LmcacheServer | None:
    """The cache server beside the embedded engine, if the settings ask for one. Raises SetupError."""
    options = settings.offload
    if options.tier == "off" or settings.engine.url is not None:
        return None
    url = options.url.get_secret_value() if options.url else None
    tier = LmcacheServer(LmcacheOptions(options.bytes, options.chunk_tokens, settings.engine.block_size, url), progress=progress)
    stack.push_async_callback(tier.close)
    await tier.start()
    return tier


def follow_offload(settings: Settings, mirror: Mirror, tier: LmcacheServer | None) -> Offload | None:
    """The books of the tiers behind the engine, fed by what the mirror hears. Raises SetupError."""
    options = settings.offload
    if options.tier == "off":
        return None
    if options.chunk_tokens % mirror.block_size:
        raise SetupError(f"--offload-chunk-tokens must be a multiple of the engine's block of {mirror.block_size} tokens")
    memory = None if options.capacity_tokens is None else Watermark(options.capacity_tokens // options.chunk_tokens)
    offload = Offload(mirror.block_size, options.chunk_tokens, has_remote=options.url is not None, memory=memory)
    mirror.on_batch = offload.apply
    if tier is not None:
        tier.on_change = lambda is_up: offload.started() if is_up else offload.stopped()
    return offload


def make_engine(
    settings: Settings, progress: Callable[[str], None], tier: LmcacheServer | None = None
) -> tuple[Engine, str | None, str | None, Path | None]:
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
            tensor_parallel=options.tensor_parallel,
            start_timeout_seconds=options.start_seconds,
            extra_args=tier.engine_args if tier is not None else (),
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


def build(
    settings: Settings,
    engine: Engine,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    mirror: Mirror | None,
    offload: Offload | None = None,
    hints: EngineHints | None = None,
) -> Server:
    """A server over parts that are ready. `hints`: the engine's plugin, where it has one."""
    clock = time.monotonic
    limits = Limits(
        max_running=settings.limits.running_turns,
        max_waiting=settings.limits.queued_turns,
        capacity_tokens=engine.info.kv_capacity_tokens,
        tier_tokens=settings.admission.tier_tokens or None,
    )
    metrics = Metrics()
    retention, policies = admission(settings, limits, engine.info.max_model_len, hints or NoHints(), metrics, clock)
    room = retention.room
    twins = TwinRoom(
        TwinGate(settings.alignment.twin_blocks), limit_seconds=settings.alignment.twin_seconds, clock=clock, held=metrics.held
    )
    namespaces = Namespaces(
        block_size=engine.info.block_size or DEFAULT_BLOCK_SIZE,
        max_tokens=settings.sessions.ledger_tokens,
        idle_seconds=settings.sessions.idle_seconds,
        share=settings.share_prefixes,
    )
    books = CacheBooks(block_size=engine.info.block_size, ceiling_tokens=settings.sessions.ceiling_tokens, mirror=mirror, offload=offload)
    turns = Turns(
        engine=engine,
        tokenizer=tokenizer,
        chat=chat,
        namespaces=namespaces,
        books=books,
        retention=retention,
        twins=twins,
        canonicaliser=choose(settings.canonicalise.mode, settings.canonicalise.on, settings.canonicalise.off),
        clock=clock,
        new_id=lambda: token_hex(12),
        log=TurnLog(settings.sessions.turn_records),
        wall_clock=_wall_clock,
        stored=stored_sessions(settings.state, partial(deployment, engine.info.model, tokenizer, chat), books, metrics, clock),
        capture=captured_turns(settings, engine, metrics, clock),
    )
    metrics.count("engine_retries", "Requests sent to the engine twice, as nothing came of the first", lambda: engine.num_retries)
    metrics.watch("waiting_turns", "Turns that wait for a ticket", lambda: room.num_waiting)
    metrics.watch("held_turns", "Turns that wait for a twin", lambda: twins.num_held)
    metrics.watch("sessions", "Sessions that are known", lambda: namespaces.num_sessions)
    metrics.watch("ledger_tokens", "Tokens that all ledgers hold", lambda: namespaces.num_tokens)
    metrics.watch("ceiling_index_tokens", "Tokens that the ceiling index holds", lambda: books.tree.num_tokens)
    if mirror is not None:
        metrics.watch("kv_resident_tokens", "Tokens resident in the engine's KV cache, by its events", lambda: mirror.num_resident_tokens)
        metrics.watch("mirror_suspect", "1 while the mirror may not know all that is resident", lambda: mirror.is_suspect)
    if offload is not None:
        metrics.watch(
            "offload_resident_tokens", "Tokens whole in the offload tier's memory, by its events", lambda: offload.num_resident_tokens
        )
        metrics.watch("offload_up", "0 while the offload tier's server is known not to run", lambda: offload.is_up)
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
    return Server(settings, engine, turns, namespaces, books, metrics, responses, deliveries, media, policies, created)


def admission(
    settings: Settings, limits: Limits, context_tokens: int, hints: EngineHints, metrics: Metrics, clock: Callable[[], float]
) -> tuple[Retention, Policies]:
    """Who may start, and what is known of those who may come back. Raises SetupError."""
    returns = ReturnModel()
    lifecycle = Lifecycle(returns, context_tokens=context_tokens)
    picked = chosen(settings.admission.policy, settings.admission.parameters)
    gate = ADMISSION_POLICIES[picked.policy](TicketBook(), limits, picked.parameters, lifecycle)
    room = WaitingRoom(gate, clock, metrics.queue.observe)
    retention = Retention(room, returns, lifecycle, hints, clock, lambda how: metrics.ended_sessions.labels(how).inc())
    metrics.watch("admission_in_use_tokens", "What counts against the admission policy's budget", lambda: room.state().in_use_tokens)
    metrics.watch("admission_budget_tokens", "The budget; +Inf without one", lambda: room.state().budget_tokens or math.inf)
    metrics.watch("admission_members", "Sessions that have a place, running or idle", lambda: room.state().num_members)
    metrics.watch("lost_hints", "Hints that the engine's plugin did not get", lambda: hints.num_lost)
    return retention, Policies(room, limits, lifecycle, hints, picked)


def captured_turns(settings: Settings, engine: Engine, metrics: Metrics, clock: Callable[[], float]) -> Capture | None:
    """The capture, if the settings name a folder for one."""
    if settings.capture is None:
        return None
    options = CaptureOptions(settings.capture, settings.capture_file_bytes, settings.capture_total_bytes)
    capture = Capture(options, engine.info.block_size or DEFAULT_BLOCK_SIZE, engine.info.model, clock, _wall_clock)
    metrics.count("captured_lines", "Turns and ends that the capture has written", lambda: capture.counts.written)
    metrics.count("capture_dropped_lines", "Turns and ends that could not be written", lambda: capture.counts.dropped)
    metrics.watch("capture_writing", "1 while the capture's disk takes what it is given", lambda: capture.is_writing)
    return capture


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
