"""Redis stands still for half a minute while sessions go on: how many turns fail, which lose their ids, and how much later answers come.

The sessions go through one server over real sockets, each turn after a pause, so that the time of an answer is not that of a queue.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec
from pydantic import SecretStr

from agentserve.boot import load_model_files
from agentserve.settings import EngineSettings, Settings, StateSettings
from benchmarks.ledger import speech
from benchmarks.ledger.forms import ChatForm
from benchmarks.ledger.paced_upstream import PacedUpstream
from benchmarks.ledger.redis_server import RedisServer, running_redis
from benchmarks.ledger.site import serving
from benchmarks.report import percentile
from model.conversation import Head, Item

NUM_SESSIONS = 50
PAUSE_SECONDS = 2.0
"""Between two turns of one session, on average."""


@dataclass(slots=True)
class Frozen:
    """Seconds of answers before and while Redis stood still; turns in that time that failed, or were not exact, or took another session."""

    before_seconds: list[float] = field(default_factory=list)
    frozen_seconds: list[float] = field(default_factory=list)
    failed: int = 0
    inexact: int = 0

    @property
    def added_p99_milliseconds(self) -> float:
        """What the 99th percentile of a frozen turn is above that of a turn before."""
        return 1000 * (percentile(self.frozen_seconds, 99) - percentile(self.before_seconds, 99))


async def freeze(model_folder: Path, *, before_seconds: float, frozen_seconds: float, done: Callable[[], object] = lambda: None) -> Frozen:
    """Run the sessions, freeze Redis after `before_seconds` for `frozen_seconds`; `done` is called after each turn."""
    found = Frozen()
    tokenizer, chat = load_model_files(EngineSettings(), model_folder)
    with running_redis() as redis:
        async with AsyncExitStack() as stack:
            upstream = await stack.enter_async_context(PacedUpstream(tokenizer, chat))
            engine = EngineSettings(url=upstream.url, model_folder=model_folder)
            settings = Settings(engine=engine, state=StateSettings(url=SecretStr(redis.url)))
            _, port = await stack.enter_async_context(serving(settings))
            http = await stack.enter_async_context(aiohttp.ClientSession(f"http://127.0.0.1:{port}"))
            watch = _Watch(redis)
            sessions = [asyncio.create_task(_Session(http, upstream, found, watch, number, done).run()) for number in range(NUM_SESSIONS)]
            await asyncio.sleep(before_seconds)
            watch.freeze()
            await asyncio.sleep(frozen_seconds)
            watch.thaw()
            await asyncio.gather(*sessions)
    return found


class _Watch:
    """When Redis is frozen, and when all is over."""

    def __init__(self, redis: RedisServer) -> None:
        self._redis = redis
        self.is_frozen = False
        self.is_over = False

    def freeze(self) -> None:
        self._redis.freeze()
        self.is_frozen = True

    def thaw(self) -> None:
        self._redis.thaw()
        self.is_frozen, self.is_over = False, True


class _Session:
    def __init__(
        self, http: aiohttp.ClientSession, upstream: PacedUpstream, found: Frozen, watch: _Watch, number: int, done: Callable[[], object]
    ) -> None:
        self._http = http
        self._upstream = upstream
        self._found = found
        self._watch = watch
        self._name = f"session-{number}"
        self._rng = random.Random(number)
        self._head: Head = speech.head(number % 4, 4_000)
        self._items: list[Item] = [speech.question(self._rng, 800)]
        self._before: array[int] = array("I")
        self._done = done

    async def run(self) -> None:
        await self._turn(is_first=True)
        while not self._watch.is_over:
            await asyncio.sleep(PAUSE_SECONDS * self._rng.uniform(0.5, 1.5))
            await self._turn(is_first=False)

    async def _turn(self, *, is_first: bool) -> None:
        form, was_frozen = ChatForm(), self._watch.is_frozen
        body = msgspec.json.encode({**form.body(self._head, self._items), "stream": True, "stream_options": {"include_usage": True}})
        started = time.monotonic()
        headers = {"x-session-id": self._name, "content-type": "application/json"}
        async with self._http.post(form.path, data=body, headers=headers) as response:
            data = await response.read()
        seconds = time.monotonic() - started
        self._done()
        has_failed = response.status != 200 or b"data: [DONE]" not in data
        asked = self._upstream.asked.pop(self._name, None)
        is_exact = asked is not None and asked[: len(self._before)] == self._before
        if not is_first:
            # A turn that began before and ended while it stood still counts as frozen.
            was_frozen = was_frozen or self._watch.is_frozen
            (self._found.frozen_seconds if was_frozen else self._found.before_seconds).append(seconds)
            self._found.failed += has_failed and was_frozen
            self._found.inexact += not is_exact and was_frozen
        if not has_failed and asked is not None:
            self._before = asked + self._upstream.answer_ids
            self._items += [form.said(form.streamed(data)), speech.question(self._rng, 800)]
