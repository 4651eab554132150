"""Clients that leave in every phase of a request, over real sockets; and what is left when all have gone.

The servers, their clients and the upstream share one process and one event loop: its tasks and file descriptors are all there are.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import httptools
import msgspec

from agentserve.boot import load_model_files
from agentserve.server import Server
from agentserve.settings import EngineSettings, LimitSettings, Settings
from benchmarks.ledger import speech
from benchmarks.ledger.forms import FORMS
from benchmarks.ledger.left import Left, look, settled, until
from benchmarks.ledger.paced_upstream import PacedUpstream, Stage
from benchmarks.ledger.site import serving
from model.conversation import UserItem

CONCURRENCY = 32
HOGS = 2
"""Turns that the narrow server runs at once; more wait for a ticket."""
WAIT_SECONDS = 15.0
"""Idle connections to the engine are closed after 4 s; what is left after this time is a leak."""
_POOL_SECONDS = 9.0


class Phase(StrEnum):
    """Where a request is when its client leaves."""

    HEAD = "head half sent"
    BODY = "body half sent"
    QUEUED = "queued"
    PREFILL = "prefill"
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "in a tool call"
    LAST = "last chunk"
    BETWEEN = "between turns"


STAGES = {
    Phase.PREFILL: Stage.PREFILL,
    Phase.REASONING: Stage.REASONING,
    Phase.TEXT: Stage.TEXT,
    Phase.CALL: Stage.CALL,
    Phase.LAST: Stage.LAST,
}


@dataclass(slots=True)
class Disconnects:
    """What was done and what it left. `missed`: requests that never came to their phase. Seconds from leaving to the engine's abort."""

    by_phase: dict[Phase, int] = field(default_factory=lambda: dict.fromkeys(Phase, 0))
    missed: int = 0
    stop_seconds: list[float] = field(default_factory=list)
    left: Left = field(default_factory=Left)

    @property
    def total(self) -> int:
        return sum(self.by_phase.values())


@dataclass(frozen=True, slots=True)
class Site:
    """What runs: the upstream, and two servers on it, one of which lets two turns run at once."""

    upstream: PacedUpstream
    wide: Server
    wide_port: int
    narrow: Server
    narrow_port: int

    def look(self) -> Left:
        return look((self.wide, self.narrow), self.upstream.num_running)


async def disconnect(model_folder: Path, num_disconnects: int, seed: int, done: Callable[[], object] = lambda: None) -> Disconnects:
    """Let `num_disconnects` clients leave, in every phase equally often; `done` is called after each."""
    found = Disconnects()
    async with _site(model_folder) as site:
        await asyncio.sleep(_POOL_SECONDS)  # until the connections of the start are closed
        before = site.look()
        phases = list(Phase)
        orders = iter([(number, phases[number % len(phases)]) for number in range(num_disconnects)])
        over = asyncio.Event()
        hogs = [asyncio.create_task(_hog(site, number, over)) for number in range(2 * HOGS)]
        await asyncio.gather(*(_lane(site, found, orders, seed, done) for _ in range(CONCURRENCY)))
        over.set()
        await asyncio.gather(*hogs)
        found.left = await settled(site.look, before, WAIT_SECONDS)
    return found


@asynccontextmanager
async def _site(model_folder: Path) -> AsyncIterator[Site]:
    tokenizer, chat = load_model_files(EngineSettings(), model_folder)
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(PacedUpstream(tokenizer, chat))
        engine = EngineSettings(url=upstream.url, model_folder=model_folder)
        wide, wide_port = await stack.enter_async_context(serving(Settings(engine=engine)))
        limits = LimitSettings(running_turns=HOGS, keep_alive_seconds=0.05)
        narrow, narrow_port = await stack.enter_async_context(serving(Settings(engine=engine, limits=limits)))
        yield Site(upstream, wide, wide_port, narrow, narrow_port)


async def _lane(site: Site, found: Disconnects, orders: Iterator[tuple[int, Phase]], seed: int, done: Callable[[], object]) -> None:
    for number, phase in orders:
        rng = random.Random(f"{seed} {number}")
        client = _Client(site, rng, f"{STAGES.get(phase, 'free')}-{number}")
        if await client.leave_in(phase):
            found.by_phase[phase] += 1
        else:
            found.missed += 1
        if phase in STAGES and phase is not Phase.LAST:
            found.stop_seconds.append(await _seconds_to_stop(site, client))
        site.upstream.forget(client.session)
        done()


async def _seconds_to_stop(site: Site, client: _Client) -> float:
    await until(lambda: client.session in site.upstream.ended, WAIT_SECONDS)
    return site.upstream.ended.get(client.session, time.monotonic()) - client.left_at


async def _hog(site: Site, number: int, over: asyncio.Event) -> None:
    """Turns on the narrow server, one after the other, so that others have to wait there."""
    client = _Client(site, random.Random(number), f"hog-{number}", narrow=True)
    while not over.is_set():
        await client.turn()
        client.leave()
        site.upstream.forget(client.session)


class _Client:
    """One connection of one session at a time."""

    def __init__(self, site: Site, rng: random.Random, session: str, *, narrow: bool = False) -> None:
        self.session = session
        self.left_at = 0.0
        self._site = site
        self._rng = rng
        self._narrow = narrow
        self._form = rng.choice(FORMS)
        self._streams = rng.random() < 0.7
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def leave_in(self, phase: Phase) -> bool:
        """Go to `phase` and leave there; False if it never came to it."""
        rng = self._rng
        self._narrow = self._narrow or phase is Phase.QUEUED
        head, body = self._request()
        came = True
        match phase:
            case Phase.HEAD:
                await self._send(head[: rng.randrange(1, len(head))])
            case Phase.BODY:
                await self._send(head + body[: rng.randrange(len(body))])
            case Phase.QUEUED:
                await self._send(head + body)
                came = await until(lambda: bool(self._site.narrow.replicas.num_waiting), WAIT_SECONDS)
            case Phase.BETWEEN:
                await self.turn()
            case _:
                reached = asyncio.create_task(self._site.upstream.reached(self.session, STAGES[phase], WAIT_SECONDS))
                await self._send(head + body)
                came = await reached
        await asyncio.sleep(rng.choice((0, 0, 0.001, 0.005)))
        self.leave()
        return came

    async def turn(self) -> None:
        """A whole turn; the connection stays open."""
        head, body = self._request()
        await self._send(head + body)
        ended = _Ended()
        parser = httptools.HttpResponseParser(ended)
        assert self._reader is not None
        while not ended.complete:
            data = await self._reader.read(1 << 16)
            assert data, "the server closed the connection before the end of its answer"
            parser.feed_data(data)
        assert parser.get_status_code() == 200, parser.get_status_code()

    def leave(self) -> None:
        """Close the connection, by a proper end or by vanishing."""
        self.left_at = time.monotonic()
        assert self._writer is not None
        if self._rng.random() < 0.5:
            linger = struct.pack("ii", 1, 0)  # on, for 0 s: the kernel sends RST
            with suppress(OSError):
                self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._writer.transport.abort()
        else:
            self._writer.close()
        self._reader = self._writer = None

    async def _send(self, data: bytes) -> None:
        port = self._site.narrow_port if self._narrow else self._site.wide_port
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._writer.write(data)
        await self._writer.drain()

    def _request(self) -> tuple[bytes, bytes]:
        items = [UserItem(f"{self.session}: go on.")]
        body = msgspec.json.encode({**self._form.body(speech.head(0, 400), items), "stream": self._streams})
        lines = [f"POST {self._form.path} HTTP/1.1", "host: localhost", "content-type: application/json", f"x-session-id: {self.session}"]
        return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode(), body


class _Ended:
    """httptools' callbacks: whether the whole answer has come."""

    complete = False

    def on_message_complete(self) -> None:
        self.complete = True
