"""The line to Redis: every call is bounded in time, a cancelled call never leaves an answer in a socket, and a breaker keeps a line that is
down from costing anything."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import redis
import structlog
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from agentserve.errors import SetupError
from agentserve.state.breaker import Breaker, Failure

T = TypeVar("T")

MAX_CONNECTIONS = 32
PROBE_SECONDS = 0.5
"""Between two probes of a store that is gone. A failover is over for us at most this long after it is for others."""
PROBE_TIMEOUT_SECONDS = 1.0
PROBE_KEY = "agentserve:probe"
MAX_REASON_CHARACTERS = 200
_PROBE_TTL_SECONDS = 60

_log = structlog.get_logger(__name__)


def check_url(url: str) -> None:
    """Raises SetupError for a URL that names no server."""
    try:
        parse_url(url)
    except ValueError as error:
        raise SetupError(f"--state-url is no Redis URL: {error}") from error


class RedisLink:
    """Runs operations on a Redis client. `failed` hears of each that gave nothing. Built anywhere, used on one event loop."""

    def __init__(self, url: str, failed: Callable[[Failure], None]) -> None:
        """Raises SetupError for a URL that names no server."""
        check_url(url)
        self._redis: Redis = Redis.from_url(
            url,
            # The breaker decides what is tried again; maintenance notices (protocol 3) would let connections with unread data pass.
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            max_connections=MAX_CONNECTIONS,
        )
        self._failed = failed
        self._breaker = Breaker(self._changed)
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._warned: set[type[redis.RedisError]] = set()
        self._prober: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._up.set()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: calls give nothing, at once."""
        return self._breaker.is_open

    async def up(self) -> None:
        """Wait until the breaker is closed."""
        await self._up.wait()

    async def start(self) -> None:
        """Try the line once; if it is down, that is logged and the breaker is open."""
        await self._attempt(_probe, PROBE_TIMEOUT_SECONDS)

    async def close(self) -> None:
        """End what still runs and close every connection."""
        if self._prober is not None:
            self._prober.cancel()
            with suppress(asyncio.CancelledError):
                await self._prober
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._redis.aclose()

    async def run(self, operation: Callable[[Redis], Awaitable[T]], seconds: float) -> T | None:
        """What `operation` returns; None if it took longer than `seconds`, the store did not serve it, or the breaker is open."""
        return None if self._breaker.is_open else await self._attempt(operation, seconds)

    async def _attempt(self, operation: Callable[[Redis], Awaitable[T]], seconds: float) -> T | None:
        has_connection = False

        async def with_connection() -> T:
            nonlocal has_connection
            async with self._slots:
                has_connection = True
                return await operation(self._redis)

        # A task of its own, so that it is cancelled once at most: redis-py drops a connection whose call is cancelled, but a second
        # cancellation would hit it while it does so.
        task = asyncio.create_task(with_connection())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            await asyncio.wait((task,), timeout=seconds)
        finally:
            in_time = task.done()
            task.cancel()
        if not in_time:
            self._give_up(Failure.TIMEOUT if has_connection else Failure.BUSY, f"no answer within {seconds} seconds")
            return None
        return self._result(task)

    def _result(self, task: asyncio.Task[T]) -> T | None:
        try:
            result = task.result()
        except redis.TimeoutError as error:
            self._give_up(Failure.TIMEOUT, str(error))
        except (redis.ConnectionError, redis.ReadOnlyError, OSError) as error:
            self._give_up(Failure.REFUSED, str(error))
        except redis.RedisError as error:
            self._give_up(Failure.ERROR, str(error))
            if type(error) not in self._warned:
                self._warned.add(type(error))
                _log.warning("state store answers with errors", error=type(error).__name__, reason=str(error)[-MAX_REASON_CHARACTERS:])
        else:
            self._breaker.succeeded()
            return result
        return None

    def _give_up(self, failure: Failure, reason: str) -> None:
        self._failed(failure)
        self._breaker.failed(failure, reason)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # also where nobody waits for it any more

    def _changed(self, is_open: bool, reason: str) -> None:
        if is_open:
            self._up.clear()
            self._prober = asyncio.create_task(self._probe())
            _log.warning("state store is down: turns go on from memory", reason=reason)
        else:
            self._up.set()
            _log.warning("state store is back", reason=reason)

    async def _probe(self) -> None:
        """Half open: of all calls only this one is made. It writes, as a replica that was a master still reads."""
        while self._breaker.is_open:
            # What is connected may be connected to yesterday's master.
            with suppress(redis.RedisError, OSError):
                await self._redis.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(PROBE_SECONDS)
            await self._attempt(_probe, PROBE_TIMEOUT_SECONDS)


async def _probe(client: Redis) -> None:
    await client.set(PROBE_KEY, 1, ex=_PROBE_TTL_SECONDS)
