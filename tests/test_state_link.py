"""The line to the state store: what opens and closes its breaker, and that no call ever reads another call's answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from agentserve.errors import SetupError
from agentserve.state.breaker import MAX_TIMEOUTS, Breaker, Failure
from agentserve.state.commands import Append, read
from agentserve.state.link import MAX_CONNECTIONS, RedisLink
from tests.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def store() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@asynccontextmanager
async def linked(url: str) -> AsyncIterator[tuple[RedisLink, list[Failure]]]:
    """A link, and what failed on it."""
    failures: list[Failure] = []
    link = RedisLink(url, failures.append)
    try:
        yield link, failures
    finally:
        await link.close()


async def answer(_: Redis) -> bool:
    return True


async def hang(_: Redis) -> bool:
    await asyncio.sleep(60)
    return True


@pytest.mark.case("OPS-02")
@pytest.mark.parametrize(
    ("events", "trace"),
    [
        ([Failure.REFUSED], [True]),
        ([Failure.TIMEOUT] * (MAX_TIMEOUTS - 1), []),
        ([Failure.TIMEOUT] * MAX_TIMEOUTS, [True]),
        ([*[Failure.TIMEOUT] * (MAX_TIMEOUTS - 1), None, Failure.TIMEOUT], []),
        ([Failure.BUSY] * 100, []),
        ([Failure.ERROR, Failure.DAMAGED] * 100, []),
        ([Failure.REFUSED] * 100, [True]),
        ([Failure.REFUSED, Failure.TIMEOUT, None], [True, False]),
        ([Failure.REFUSED, None, None, Failure.REFUSED], [True, False, True]),
    ],
    ids=[
        "a refusal opens at once",
        "few timeouts do not",
        "many in a row do",
        "an answer between them counts anew",
        "a busy pool never does",
        "errors of single calls never do",
        "it says so once",
        "a blip opens and closes",
        "each change is heard of",
    ],
)
def test_the_breaker_follows_its_table(events: list[Failure | None], trace: list[bool]) -> None:
    heard: list[bool] = []
    breaker = Breaker(lambda is_open, _: heard.append(is_open))
    for event in events:
        if event is None:
            breaker.succeeded()
        else:
            breaker.failed(event, "")
    assert heard == trace
    assert breaker.is_open == (bool(trace) and trace[-1])


@pytest.mark.case("OPS-02")
async def test_a_refused_connection_opens_at_once_and_costs_nothing_after_that(store: RedisServer) -> None:
    with running_redis() as gone:
        url = gone.url
    async with linked(url) as (link, failures):
        assert await link.run(partial(read, key=b"k", first=b"", start=0), 5.0) is None
        assert (link.is_open, failures) == (True, [Failure.REFUSED])
        started = asyncio.get_running_loop().time()
        assert await link.run(hang, 5.0) is None
        assert asyncio.get_running_loop().time() - started < 0.05


@pytest.mark.case("OPS-02")
async def test_a_busy_pool_is_no_outage(store: RedisServer) -> None:
    async with linked(store.url) as (link, failures):
        held = [asyncio.create_task(link.run(hang, 5.0)) for _ in range(MAX_CONNECTIONS)]
        await asyncio.sleep(0)
        for _ in range(2 * MAX_TIMEOUTS):
            assert await link.run(answer, 0.01) is None
        assert (link.is_open, set(failures)) == (False, {Failure.BUSY})
        for task in held:
            task.cancel()
        await asyncio.wait(held)
        assert await link.run(answer, 5.0)


@pytest.mark.case("OPS-02")
async def test_a_server_that_does_not_answer_opens_after_a_few_calls_and_a_probe_closes() -> None:
    with running_redis() as server:
        async with linked(server.url) as (link, failures):
            await link.start()
            server.freeze()
            for _ in range(MAX_TIMEOUTS):
                assert await link.run(partial(read, key=b"k", first=b"", start=0), 0.02) is None
            assert (link.is_open, failures) == (True, [Failure.TIMEOUT] * MAX_TIMEOUTS)
            server.thaw()
            async with asyncio.timeout(5):
                await link.up()
            assert await link.run(answer, 5.0)


async def test_a_url_of_no_server_is_refused_with_its_setting() -> None:
    with pytest.raises(SetupError, match="--state-url"):
        RedisLink("http://127.0.0.1:6379", lambda _: None)


class SlowProxy:
    """Passes bytes on to `port`, the answers late."""

    @property
    def num_connections(self) -> int:
        """So far."""
        return len(self._serving)

    def __init__(self, port: int, delay_seconds: float) -> None:
        self._port = port
        self._delay_seconds = delay_seconds
        self._serving: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        answers = asyncio.create_task(self._answer(upstream_reader, writer))
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                upstream_writer.write(data)
        answers.cancel()
        for closing in (upstream_writer, writer):
            closing.close()
            with suppress(ConnectionError):
                await closing.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()

        def write(data: bytes) -> None:
            if not writer.is_closing():
                writer.write(data)

        while data := await reader.read(65536):
            loop.call_later(self._delay_seconds, write, data)


@pytest.mark.slow
@pytest.mark.case("OPS-03")
async def test_cancelled_calls_never_leave_an_answer_for_the_next_one(store: RedisServer) -> None:
    """2,000 reads, many given up at a random moment by their caller or by their timeout: each that answers has what it asked for."""
    rng = random.Random(1)
    keys = [b"list:%d" % number for number in range(200)]
    with store.client() as client:
        for key in keys:
            client.rpush(key, key)
    proxy = SlowProxy(store.port, delay_seconds=0.005)
    num_read = num_given_up = 0
    async with proxy.running() as url, linked(url) as (link, failures):
        started = time.monotonic()
        for _ in range(5):
            await asyncio.gather(*(link.run(partial(read, key=key, first=b"", start=0), 5.0) for key in keys[:20]))
        usual = max(0.03, (time.monotonic() - started) / 5)  # on a busy machine answers take longer, and patience with them

        async def one(key: bytes) -> None:
            nonlocal num_read, num_given_up
            first = rng.choice((b"", key))  # one command or a transaction
            task = asyncio.create_task(link.run(partial(read, key=key, first=first, start=0), rng.choice((*[5.0] * 9, usual / 2))))
            await asyncio.wait((task,), timeout=rng.uniform(0, usual))
            task.cancel()
            try:
                part = await task
            except asyncio.CancelledError:
                part = None
            if part is None:
                num_given_up += 1
            else:
                num_read += 1
                assert (part.first, list(part.records)) == (key, [key])

        for _ in range(0, 2000, 20):
            await asyncio.gather(*(one(rng.choice(keys)) for _ in range(20)))
            async with asyncio.timeout(30):
                await link.up()
        assert num_read > 100
        assert num_given_up > 100
        assert proxy.num_connections > MAX_CONNECTIONS  # given up calls have cost their connections
        assert Failure.DAMAGED not in failures


async def test_a_list_and_its_time_to_live_are_written_together(store: RedisServer) -> None:
    async with linked(store.url) as (link, _):
        stands = await link.run(Append(b"key", [b"mark", b"a"], 60_000, b"s", [b"lead"]).begin, 5.0)
        assert stands is not None
        assert (stands.first, stands.length) == (b"mark", 2)
        stands = await link.run(Append(b"key", [b"b"], 90_000, b"s").extend, 5.0)
        assert stands is not None
        assert (stands.first, stands.length) == (b"mark", 3)
        missing = await link.run(Append(b"other", [b"b"], 90_000, b"s").extend, 5.0)
        assert missing is not None
        assert (missing.first, missing.length) == (b"", 0)
    with redis.Redis(port=store.port) as client:
        assert 60_000 < client.pttl(b"key") <= 90_000
        assert 0 < client.pttl(b"lead") <= 60_000
        assert not client.exists(b"other")
