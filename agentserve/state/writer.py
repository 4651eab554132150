"""Changes to the state store, one after the other in the background, each again until it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from agentserve.state.link import RedisLink

MAX_TRIES = 3
"""Of a change, while the breaker is closed; the session's next turn writes what a given up one did not."""
MAX_WAITING = 65_536
"""Changes that wait for a store to come back; the oldest are given up."""
CLOSE_SECONDS = 2.0
"""For what still waits when the server stops."""


@dataclass(slots=True, eq=False)
class Change:
    """`run` gives what was found or done, None if the store did not answer. `tried` is done after the first try, with its result."""

    run: Callable[[], Awaitable[bool | None]]
    tried: asyncio.Future[bool]
    num_tries: int = 0


class Writer:
    """One task. One change per key waits at most: a later one of the same key takes its place."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._waiting: dict[bytes, Change] = {}
        self._running: Change | None = None
        self._running_since = 0.0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running_seconds(self) -> float:
        """How long the store has been at the change that runs."""
        return 0.0 if self._running is None else asyncio.get_running_loop().time() - self._running_since

    def start(self) -> None:
        self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Do what can be done soon, then stop."""
        if self._task is None:
            return
        left = [change.tried for change in (self._running, *self._waiting.values()) if change is not None]
        if left and not self._link.is_open:
            await asyncio.wait(left, timeout=CLOSE_SECONDS)
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    def add(self, key: bytes, run: Callable[[], Awaitable[bool | None]]) -> asyncio.Future[bool]:
        """Let `run` be done soon. Returns a future of the first try's result, False if it is given up."""
        change = self._waiting.get(key)
        if change is None or change.tried.done():
            change = self._waiting[key] = Change(run, asyncio.get_running_loop().create_future())
            if len(self._waiting) > MAX_WAITING:
                self.drop(next(iter(self._waiting)))
        change.run = run
        self._wake.set()
        return change.tried

    def has(self, key: bytes) -> bool:
        """Whether a change of this key waits."""
        return key in self._waiting

    def drop(self, key: bytes) -> None:
        """Forget a change that waits."""
        change = self._waiting.pop(key, None)
        if change is not None:
            _answer(change, False)

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            await self._link.up()
            self._wake.clear()
            while self._waiting and not self._link.is_open:
                key = next(iter(self._waiting))
                await self._try(key, self._waiting.pop(key))
            if self._waiting:
                self._wake.set()

    async def _try(self, key: bytes, change: Change) -> None:
        self._running, self._running_since = change, asyncio.get_running_loop().time()
        result = await change.run()
        self._running = None
        _answer(change, bool(result))
        if result is None:
            change.num_tries += 1
            if self._link.is_open or change.num_tries < MAX_TRIES:
                self._waiting.setdefault(key, change)


def removal_of(key: bytes) -> bytes:
    """Under which the writer knows the removal of `key`: a change of its own, behind a save that may be on its way."""
    return b"-" + key


def _answer(change: Change, result: bool) -> None:
    if not change.tried.done():
        change.tried.set_result(result)
