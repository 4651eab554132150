"""The mirror and the books beside a real vLLM that evicts, while its events get lost, its cache is reset and it dies.

The server runs in this process over the embedded engine; between the two lies an `EventTap`, which disturbs what the server hears and
keeps the truth. One second after each disturbance, and a turn that lets a gap show, the mirror's blocks are compared with the true ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from agentserve.boot import running_server
from agentserve.dialects import openai_chat
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.vllm_command import EmbeddedOptions
from agentserve.identity import Identity
from agentserve.server import Server
from agentserve.settings import EngineSettings, Settings
from benchmarks.cache_truth import EventTap, TrueBlocks
from benchmarks.history import code
from prefix_cache.hits import TurnHits

KV_TOKENS = 12_288
NUM_SESSIONS = 12
NUM_AT_ONCE = 2
"""Turns at once in the last phase, where one may evict what another was just promised."""
NEW_TEXT_BYTES = 900
MAX_TURNS = 10
"""After so many a session is replaced by a new one."""
NUM_TURNS, NUM_TURNS_QUICK = 60, 14
"""In each phase."""
SETTLE_SECONDS = 1.0


@dataclass(slots=True)
class Agreement:
    """Blocks of the mirror against the true ones after one disturbance."""

    name: str
    num_mirror: int
    num_true: int
    num_both: int

    @property
    def precision(self) -> float:
        return self.num_both / self.num_mirror if self.num_mirror else 1.0

    @property
    def recall(self) -> float:
        return self.num_both / self.num_true if self.num_true else 1.0


@dataclass(slots=True)
class EngineFigures:
    """What was seen. In `within_block_share` a turn without a prediction counts as a wrong one."""

    agreements: list[Agreement] = field(default_factory=list)
    hits: list[TurnHits] = field(default_factory=list)
    """Turns while the engine's events arrived."""
    deaf_hits: list[TurnHits] = field(default_factory=list)
    """Turns while they did not."""
    crowded_hits: list[TurnHits] = field(default_factory=list)
    """Turns that were not alone."""
    num_evicted_blocks: int = 0

    @property
    def within_block_share(self) -> float:
        return _share_within_block(self.hits)

    @property
    def crowded_within_block_share(self) -> float:
        return _share_within_block(self.crowded_hits)

    @property
    def cause_sum_error_tokens(self) -> int:
        return sum(
            abs(sum((hits.missed or {}).values()) - (hits.num_prompt_tokens - hits.actual))
            for hits in (*self.hits, *self.deaf_hits)
            if hits.actual is not None
        )

    @property
    def unknown_share(self) -> float:
        missed = sum(sum((hits.missed or {}).values()) for hits in self.hits)
        return sum(tokens for hits in self.hits for cause, tokens in (hits.missed or {}).items() if cause == "unknown") / missed


def _share_within_block(turns: list[TurnHits]) -> float:
    return sum(hits.predicted is not None and hits.actual is not None and abs(hits.predicted - hits.actual) <= 128 for hits in turns) / len(
        turns
    )


class Player:
    """Plays sessions of made-up source through the server's own turns, each session one turn at a time."""

    def __init__(self, server: Server, figures: EngineFigures) -> None:
        self._server = server
        self.booked = figures.hits
        """Where the accounts of turns go."""
        self._rng = random.Random(4)
        self._num_sessions = 0
        self._idle = [self._new() for _ in range(NUM_SESSIONS)]

    async def play(self, num_turns: int, num_at_once: int = 1) -> None:
        """So many turns of randomly chosen sessions."""
        turns = iter(range(num_turns))

        async def lane() -> None:
            for _ in turns:
                session = self._idle.pop(self._rng.randrange(len(self._idle)))
                await self._turn(session)
                self._idle.append(session if len(session) < 2 * MAX_TURNS else self._new())

        await asyncio.gather(*(lane() for _ in range(num_at_once)))

    def _new(self) -> list[bytes]:
        self._num_sessions += 1
        return [_message("system", f"You are agent {self._num_sessions}.\n" + code(self._rng, 1_500))]

    async def _turn(self, messages: list[bytes]) -> None:
        messages.append(_message("user", code(self._rng, NEW_TEXT_BYTES)))
        body = b'{"model":"nano","max_tokens":8,"messages":[%b]}' % b",".join(messages)
        request = openai_chat.parse(body)
        namespace = self._server.namespaces.of(None)
        async with self._server.turns.turn(
            openai_chat.ChatConversation(request), openai_chat.options(request), Identity(None), namespace
        ) as turn:
            async for _ in turn.deltas():
                pass
        assert turn.outcome is not None
        self.booked.append(turn.outcome.hits)
        messages.append(_message("assistant", turn.outcome.item.text))


def _message(role: str, text: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": text})


@dataclass(slots=True)
class Stage:
    """Everything that a phase needs."""

    engine: EmbeddedEngine
    server: Server
    tap: EventTap
    truth: TrueBlocks
    player: Player
    num_turns: int

    async def subscriber_dropped(self) -> None:
        self.tap.cut()
        await self.player.play(self.num_turns // 3)
        self.tap.mend()
        await asyncio.sleep(SETTLE_SECONDS)  # until the subscriber is back

    async def events_lost(self) -> None:
        self.tap.is_losing = True
        await self.player.play(self.num_turns // 3)
        self.tap.is_losing = False

    async def cache_reset(self) -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{self.engine.url}/reset_prefix_cache") as response:
            response.raise_for_status()

    async def engine_restarted(self) -> None:
        for process in _engines(os.getpid()):
            os.kill(process, signal.SIGKILL)
        await _until(self.engine, healthy=False)
        self.truth.restarted()
        await _until(self.engine, healthy=True)


async def measure(cache_folder: Path, *, quick: bool, progress: Callable[[str], None]) -> EngineFigures:
    """Play every phase. A quick one does without the engine's death, which costs its start again."""
    figures = EngineFigures()
    async with _stage(cache_folder, figures, NUM_TURNS_QUICK if quick else NUM_TURNS, progress) as stage:
        await stage.player.play(stage.num_turns)
        await _compare(stage, figures, "undisturbed")
        phases = [stage.subscriber_dropped, stage.events_lost, stage.cache_reset, *([] if quick else [stage.engine_restarted])]
        for phase in phases:
            name = phase.__name__.replace("_", " ")
            progress(f"phase: {name}")
            stage.player.booked = figures.deaf_hits
            await phase()
            await stage.player.play(1)  # its events show a gap
            await _compare(stage, figures, name)
            stage.player.booked = figures.hits
            await stage.player.play(stage.num_turns)
        stage.player.booked = figures.crowded_hits
        await stage.player.play(stage.num_turns, NUM_AT_ONCE)
        figures.num_evicted_blocks = stage.truth.num_removed
    return figures


async def _compare(stage: Stage, figures: EngineFigures, name: str) -> None:
    await asyncio.sleep(SETTLE_SECONDS)
    mirror = stage.server.books.mirror
    assert mirror is not None
    held, true = mirror.resident_hashes(), stage.truth.hashes
    figures.agreements.append(Agreement(name, len(held), len(true), len(held & true)))


@asynccontextmanager
async def _stage(cache_folder: Path, figures: EngineFigures, num_turns: int, progress: Callable[[str], None]) -> AsyncIterator[Stage]:
    truth = TrueBlocks()
    engine = EmbeddedEngine(EmbeddedOptions(cache_folder, kv_tokens=KV_TOKENS, dev_mode=True), progress=progress)
    with tempfile.TemporaryDirectory(prefix="cache-benchmark-") as folder:
        tap = EventTap(engine.events_endpoint, f"ipc://{folder}/events", truth)
        try:
            await engine.start()
            options = EngineSettings(
                url=engine.url, model_folder=engine.model_folder, events=tap.endpoint, events_replay=engine.replay_endpoint
            )
            async with running_server(Settings(engine=options, log_level="error"), progress) as server:
                yield Stage(engine, server, tap, truth, Player(server, figures), num_turns)
        finally:
            await tap.close()
            await engine.close()


async def _until(engine: EmbeddedEngine, *, healthy: bool) -> None:
    while await engine.healthy() != healthy:  # noqa: ASYNC110 - a process dies and is born without telling us
        await asyncio.sleep(0.2)


def _engines(process: int) -> list[int]:
    """The vLLM servers among the child processes of all threads of `process`."""
    children = [child for listed in Path(f"/proc/{process}/task").glob("*/children") for child in listed.read_text().split()]
    return [int(child) for child in children if b"vllm" in Path(f"/proc/{child}/cmdline").read_bytes()]
