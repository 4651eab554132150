"""Builds a server from its settings, and takes it down again. The one place where the parts meet."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
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
from agentserve.block_names import check_block_names
from agentserve.cache import CacheBooks
from agentserve.canonical.canonicaliser import choose
from agentserve.capture import Capture, CaptureOptions
from agentserve.commits import Commits
from agentserve.deliveries import Deliveries
from agentserve.dialects.responses_store import ResponseStore
from agentserve.early import check_settings
from agentserve.engines import Engine
from agentserve.engines.hints import EngineHints, NoHints
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
from agentserve.starting import Followed, check_alike, follow, make_engines, start_offload
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
from prefix_cache.tiers.external import ExternalTiers
from prefix_cache.tiers.offload import Offload
from prefix_cache.tiers.ranks import RankLookups

DEFAULT_BLOCK_SIZE = 128
"""For block hashes where the engine does not say its size; no block figure is reported then."""

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def running_server(settings: Settings, progress: Callable[[str], None]) -> AsyncIterator[Server]:
    """A server whose engine answers. Raises SetupError, or EngineUnavailable if the engine never does."""
    check_settings(settings)
    async with AsyncExitStack() as stack:
        tier = await start_offload(settings, progress, stack)
        made = make_engines(settings, progress, tier)
        for each in made:
            stack.push_async_callback(each.engine.close)
        await asyncio.gather(*(each.engine.start() for each in made))
        first, *others = [await follow(settings, each, tier, stack) for each in made]
        check_alike(first.engine, [other.engine for other in others])
        await check_block_names(settings, [first, *others])
        folder = model_folder(settings, first.engine, made[0].nano)
        tokenizer, chat = await asyncio.to_thread(load_model_files, settings.engine, folder)
        server = build(settings, first.engine, tokenizer, chat, first.mirror, first.offload, others, first.hints)
        if (capture := server.turns.commits.capture) is not None:
            capture.start()
            stack.push_async_callback(asyncio.to_thread, capture.close)
        if server.turns.stored is not None:
            stack.push_async_callback(server.turns.stored.close)
            await server.turns.stored.start()
        yield server


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
    offload: ExternalTiers | None = None,
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
    commits = Commits(
        tokenizer=tokenizer,
        chat=chat,
        clock=clock,
        wall_clock=_wall_clock,
        log=TurnLog(settings.sessions.turn_records),
        stored=stored_sessions(settings.state, partial(deployment, engine.info.model, tokenizer, chat), books, metrics, clock),
        capture=captured_turns(settings, engine, metrics, clock),
    )
    turns = Turns(
        replicas=replicas,
        retention=retention,
        namespaces=namespaces,
        canonicaliser=choose(settings.canonicalise.mode, settings.canonicalise.on, settings.canonicalise.off),
        commits=commits,
        new_id=lambda: token_hex(12),
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
            has_exclusive_tier=settings.offload.tier == "exclusive",
            beside=books,
            lru_blocks=info.num_blocks if isinstance(each.hints, NoHints) else None,  # a plugin orders them by itself
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
    servers = [offload for offload in offloads if isinstance(offload, Offload)]
    if servers:
        metrics.watch("offload_up", "0 while the offload tier's server is known not to run", lambda: all(each.is_up for each in servers))
        if servers[0].ranks is not None:
            watch_ranks(metrics, servers[0].ranks)


def watch_ranks(metrics: Metrics, ranks: RankLookups) -> None:
    """Export how often the ranks of an engine differ in what the tier holds for them."""
    metrics.count("offload_lookups", "Lookups of prompts in the offload tier's server", lambda: ranks.num_lookups)
    metrics.count("offload_differing_lookups", "Those in which ranks held different prefixes", lambda: ranks.num_differing)
    metrics.count("offload_given_up_tokens", "What their best ranks held beyond the hit", lambda: ranks.num_given_up_tokens)


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
