"""Builds a server from its settings, and takes it down again. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
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
from agentserve.engines import Engine
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.hints import EngineHints, NoHints, engine_hints
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.lmcache import LmcacheServer
from agentserve.engines.lmcache_command import LmcacheOptions
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, plugin_options
from agentserve.errors import SetupError
from agentserve.media import MediaTurns
from agentserve.metrics import Metrics
from agentserve.policies import Chosen, Policies, chosen
from agentserve.records import TurnLog
from agentserve.replicas import Replica, Replicas
from agentserve.retention import Retention
from agentserve.server import Server
from agentserve.sessions import Namespaces
from agentserve.settings import EngineSettings, Settings, StateSettings
from agentserve.state import responses as response_state
from agentserve.state.breaker import Failure
from agentserve.state.link import RedisLink
from agentserve.state.stored import Listeners, StoredSessions
from agentserve.turns import Turns
from agentserve.twins import TwinRoom
from agentserve.waiting import WaitingRoom
from model.chat import ChatFormat
from model.chat.formats import chat_format
from model.chat.jinja import UnstableTemplate
from model.chat.jinja_template import TemplateRefused
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
        made = make_engines(settings, progress, tier)
        for each in made:
            stack.push_async_callback(each.engine.close)
        await asyncio.gather(*(each.engine.start() for each in made))
        first, *others = [await follow(settings, each, tier, stack) for each in made]
        check_alike(first.engine, [other.engine for other in others])
        folder = model_folder(settings, first.engine, made[0].nano)
        tokenizer, chat = await asyncio.to_thread(load_model_files, settings.engine, folder)
        server = build(settings, first.engine, tokenizer, chat, first.mirror, first.offload, others, first.hints)
        if server.turns.capture is not None:
            server.turns.capture.start()
            stack.push_async_callback(asyncio.to_thread, server.turns.capture.close)
        if server.turns.stored is not None:
            stack.push_async_callback(server.turns.stored.close)
            await server.turns.stored.start()
        yield server


@dataclass(frozen=True, slots=True)
class Made:
    """An engine that is not started yet, the ZMQ endpoints of its KV events and their replay, and the embedded engine's model folder."""

    engine: Engine
    events: str | None = None
    replay: str | None = None
    nano: Path | None = None


@dataclass(frozen=True, slots=True)
class Followed:
    """A started engine, and what hears its events."""

    engine: Engine
    mirror: Mirror | None = None
    offload: Offload | None = None
    hints: EngineHints = field(default_factory=NoHints)
    """Its plugin, where it has one."""


async def follow(settings: Settings, made: Made, tier: LmcacheServer | None, stack: AsyncExitStack) -> Followed:
    """Follow the KV events of an engine that has started, and find its plugin."""
    engine = made.engine
    hints = await start_hints(settings, engine, stack)
    if made.events is None or engine.info.block_size is None:
        return Followed(engine, hints=hints)
    mirror = Mirror(engine.info.block_size)
    offload = follow_offload(settings, mirror, tier)
    subscriber = KvEventSubscriber(made.events, made.replay, settings.engine.events_topic, mirror)
    stack.push_async_callback(subscriber.close)
    await subscriber.start()
    await subscriber.caught_up()  # else the first predictions would not know an older engine's blocks
    if isinstance(engine, EmbeddedEngine):
        engine.on_restart = mirror.restarted
    return Followed(engine, mirror, offload, hints)


async def start_hints(settings: Settings, engine: Engine, stack: AsyncExitStack) -> EngineHints:
    """The way to the engine's plugin, where the settings say that it has one."""
    options = settings.engine
    key = options.api_key.get_secret_value() if options.url is not None and options.api_key is not None else None
    hints = engine_hints(options.plugin, engine.url, key)
    stack.push_async_callback(hints.close)
    await hints.start()
    return hints


def check_alike(first: Engine, others: Iterable[Engine]) -> None:
    """Raise SetupError for engines that do not serve the same: a session may go on at any of them."""
    for other in others:
        for name in ("model", "max_model_len", "block_size"):
            ours, theirs = getattr(first.info, name), getattr(other.info, name)
            if ours != theirs:
                raise SetupError(f"the engines at {first.url} and {other.url} differ in {name}: {ours!r} and {theirs!r}; start them alike")


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


def make_engines(settings: Settings, progress: Callable[[str], None], tier: LmcacheServer | None = None) -> list[Made]:
    """The engines that the settings name, or the embedded one. Raises SetupError."""
    options = settings.engine
    if options.url is not None:
        key = options.api_key.get_secret_value() if options.api_key else None
        urls = options.url.replace(",", " ").split()
        events = _one_each("--engine-events", options.events, len(urls))
        replays = _one_each("--engine-events-replay", options.events_replay, len(urls))
        engines = [VllmEngine(url, api_key=key, start_timeout_seconds=options.start_seconds) for url in urls]
        return [Made(*each) for each in zip(engines, events, replays, strict=True)]
    embedded = EmbeddedEngine(
        EmbeddedOptions(
            cache_folder=settings.cache_folder,
            model=settings.embedded_model,
            index_topk_freq=settings.embedded_index_topk_freq,
            kv_tokens=options.kv_tokens,
            block_size=options.block_size,
            max_model_len=options.max_model_len,
            tensor_parallel=options.tensor_parallel,
            plugin=plugin_options(options.plugin),
            start_timeout_seconds=options.start_seconds,
            extra_args=tier.engine_args if tier is not None else (),
        ),
        progress=progress,
    )
    return [Made(embedded, embedded.events_endpoint, embedded.replay_endpoint, embedded.model_folder)]


def _one_each(name: str, endpoints: str | None, num_engines: int) -> list[str | None]:
    """The endpoints of the engines, in their order."""
    if endpoints is None:
        return [None] * num_engines
    found: list[str | None] = [*endpoints.replace(",", " ").split()]
    if len(found) != num_engines:
        raise SetupError(f"{name} names {len(found)} endpoints for {num_engines} engines: name one for each, in the order of --engine-url")
    return found


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
    except (UnstableTemplate, TemplateRefused) as error:
        cure = "--engine-chat-format passthrough lets the engine render, without exact sessions"
        raise SetupError(f"the chat template in {str(folder)!r} cannot be used: {error}; {cure}") from error
    except (OSError, ValueError) as error:
        raise SetupError(f"the model folder {str(folder)!r} cannot be used: {error}") from error


def build(
    settings: Settings,
    engine: Engine,
    tokenizer: Tokenizer,
    chat: ChatFormat,
    mirror: Mirror | None,
    offload: Offload | None = None,
    others: Sequence[Followed] = (),
    hints: EngineHints | None = None,
) -> Server:
    """A server over parts that are ready; `others` are more engines of the same model, `hints` the way to its engine's plugin."""
    clock = time.monotonic
    metrics = Metrics()
    namespaces = Namespaces(
        block_size=engine.info.block_size or DEFAULT_BLOCK_SIZE,
        max_tokens=settings.sessions.ledger_tokens,
        idle_seconds=settings.sessions.idle_seconds,
        share=settings.share_prefixes,
    )
    followed = [Followed(engine, mirror, offload, hints or NoHints()), *others]
    lifecycle = Lifecycle(ReturnModel(), context_tokens=engine.info.max_model_len)
    picked = chosen(settings.admission.policy, settings.admission.parameters)
    replicas = Replicas(list(_replicas(settings, followed, metrics, clock, picked, lifecycle)), namespaces.sessions)
    retention = Retention(replicas, lifecycle, clock, lambda how: metrics.ended_sessions.labels(how).inc())
    books = replicas.first.books
    turns = Turns(
        replicas=replicas,
        retention=retention,
        tokenizer=tokenizer,
        chat=chat,
        namespaces=namespaces,
        canonicaliser=choose(settings.canonicalise.mode, settings.canonicalise.on, settings.canonicalise.off),
        clock=clock,
        new_id=lambda: token_hex(12),
        log=TurnLog(settings.sessions.turn_records),
        wall_clock=_wall_clock,
        stored=stored_sessions(settings.state, partial(deployment, engine.info.model, tokenizer, chat), books, metrics, clock),
        capture=captured_turns(settings, engine, metrics, clock),
    )
    watch(metrics, replicas, namespaces)
    created = int(_wall_clock())
    responses = ResponseStore(settings.limits.stored_response_bytes)
    metrics.watch("stored_response_bytes", "JSON of stored Responses", lambda: responses.num_bytes)
    media = MediaTurns(
        replicas=replicas,
        namespaces=namespaces,
        clock=clock,
        new_id=turns.new_id,
    )
    deliveries = Deliveries(
        settings.limits.kept_answer_bytes, settings.limits.kept_answer_seconds, clock, lambda outcome: metrics.retries.labels(outcome).inc()
    )
    metrics.watch("kept_answer_bytes", "Whole answers that are kept for clients that ask again", lambda: deliveries.num_bytes)
    kept = stored_responses(settings.state, responses, turns.stored, metrics, clock)
    return Server(settings, turns, namespaces, metrics, responses, deliveries, media, Policies(replicas, lifecycle, picked), created, kept)


def _replicas(
    settings: Settings,
    followed: Iterable[Followed],
    metrics: Metrics,
    clock: Callable[[], float],
    picked: Chosen,
    lifecycle: Lifecycle,
) -> Iterator[Replica]:
    """What the server keeps for each engine; the ceiling and the sums of hits are kept for all."""
    books: CacheBooks | None = None
    for each in followed:
        info = each.engine.info
        limits = Limits(
            max_running=settings.limits.running_turns,
            max_waiting=settings.limits.queued_turns,
            capacity_tokens=info.kv_capacity_tokens,
            tier_tokens=settings.admission.tier_tokens or None,
        )
        books = CacheBooks(
            block_size=info.block_size,
            ceiling_tokens=settings.sessions.ceiling_tokens,
            mirror=each.mirror,
            offload=each.offload,
            beside=books,
        )
        policy = ADMISSION_POLICIES[picked.policy](TicketBook(), limits, picked.parameters, lifecycle)
        room = WaitingRoom(policy, limits, clock, metrics.queue.observe)
        gate = TwinGate(settings.alignment.twin_blocks)
        twins = TwinRoom(gate, limit_seconds=settings.alignment.twin_seconds, clock=clock, held=metrics.held)
        yield Replica(each.engine, books, room, twins, clock, each.hints)


def watch(metrics: Metrics, replicas: Replicas, namespaces: Namespaces) -> None:
    """Export what is read at each scrape; figures of engines are sums over them."""
    first, mirrors = replicas.first, [replica.books.mirror for replica in replicas if replica.books.mirror is not None]
    offloads = [replica.books.offload for replica in replicas if replica.books.offload is not None]
    retries = "Requests sent to an engine twice, as nothing came of the first"
    metrics.count("engine_retries", retries, lambda: sum(replica.engine.num_retries for replica in replicas))
    metrics.count("moved_turns", "Turns that another engine took, as theirs gave nothing", lambda: replicas.num_moved_turns)
    metrics.watch("closed_engines", "Engines to which no turn goes, as they failed", lambda: sum(not each.is_open for each in replicas))
    rooms = [replica.room for replica in replicas]
    in_use = "What counts against the admission policy's budget"
    metrics.watch("admission_in_use_tokens", in_use, lambda: sum(room.state().in_use_tokens for room in rooms))
    metrics.watch(
        "admission_budget_tokens", "The budget; +Inf without one", lambda: sum(room.state().budget_tokens or math.inf for room in rooms)
    )
    members = "Sessions that have a place, running or idle"
    metrics.watch("admission_members", members, lambda: sum(room.state().num_members for room in rooms))
    metrics.watch("lost_hints", "Hints that the engine's plugin did not get", lambda: sum(replica.hints.num_lost for replica in replicas))
    metrics.watch("waiting_turns", "Turns that wait for a ticket", lambda: replicas.num_waiting)
    metrics.watch("held_turns", "Turns that wait for a twin", lambda: sum(replica.twins.num_held for replica in replicas))
    metrics.watch("sessions", "Sessions that are known", lambda: namespaces.num_sessions)
    metrics.watch("ledger_tokens", "Tokens that all ledgers hold", lambda: namespaces.num_tokens)
    metrics.watch("ceiling_index_tokens", "Tokens that the ceiling index holds", lambda: first.books.tree.num_tokens)
    if mirrors:
        resident = "Tokens resident in the engine's KV cache, by its events"
        metrics.watch("kv_resident_tokens", resident, lambda: sum(mirror.num_resident_tokens for mirror in mirrors))
        metrics.watch("mirror_suspect", "1 while the mirror may not know all that is resident", lambda: any(m.is_suspect for m in mirrors))
    if offloads:
        resident = "Tokens whole in the offload tier's memory, by its events"
        metrics.watch("offload_resident_tokens", resident, lambda: sum(offload.num_resident_tokens for offload in offloads))
        metrics.watch("offload_up", "0 while the offload tier's server is known not to run", lambda: all(o.is_up for o in offloads))


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
    metrics.watch("state_unsaved_sessions", "Sessions and Responses that are not stored yet", lambda: stored.writer.num_waiting)
    return stored


def stored_responses(
    options: StateSettings, memory: ResponseStore, sessions: StoredSessions | None, metrics: Metrics, clock: Callable[[], float]
) -> response_state.StoredResponses | None:
    """The Responses beside the sessions in Redis, over the same line."""
    if sessions is None:
        return None
    listeners = response_state.Listeners(
        loaded=lambda found: metrics.state_response_loads.labels("found" if found else "nothing").inc(),
        saved=metrics.state_response_saves.inc,
        failed=lambda failure: metrics.state_failures.labels(failure.value).inc(),
    )
    return response_state.StoredResponses(
        memory, sessions, listeners, clock, ttl_seconds=options.ttl_seconds, timeout_seconds=options.timeout_seconds
    )
