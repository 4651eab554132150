"""The event subscriber on real ZMQ sockets, with a publisher that speaks vLLM's wire and can lose, restart and go away."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.errors import SetupError
from prefix_cache.blocks import HashChain
from prefix_cache.events import BlockStored
from prefix_cache.mirror import Mirror

BLOCK = 4
TOPIC = "kv-events"


class Publisher:
    """One life of an engine's event publisher: PUB, and ROUTER for replays out of a bounded buffer."""

    def __init__(self, folder: Path, *, first_timestamp_seconds: float = 0.0, buffer_size: int = 10_000) -> None:
        self.endpoint = f"ipc://{folder}/live"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self.num_replay_requests = 0
        self._seconds = first_timestamp_seconds
        self._buffer_size = buffer_size
        self._buffer: list[tuple[int, bytes]] = []
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._replay = self._context.socket(zmq.ROUTER)

    async def __aenter__(self) -> Publisher:
        self._live.bind(self.endpoint)
        self._replay.bind(self.replay_endpoint)
        self._task = asyncio.create_task(self._answer_replays())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Return when a subscriber is connected: what is published before is lost to it."""
        assert await asyncio.wait_for(self._live.recv(), 10) == b"\x01" + TOPIC.encode()

    async def publish(self, block: int, *, lost: bool = False, payload: bytes | None = None) -> None:
        """One batch that stores a one-block prompt; a lost one only enters the replay buffer."""
        self._seconds += 1
        event = BlockStored([block], None, [block] * BLOCK, BLOCK, group_idx=0, kv_cache_spec_kind="full_attention")
        payload = payload if payload is not None else msgspec.msgpack.encode([self._seconds, [event], 0])
        if not lost:
            await self._live.send_multipart([TOPIC.encode(), self._next.to_bytes(8, "big"), payload])
        self._buffer = [*self._buffer, (self._next, payload)][-self._buffer_size :]
        self._next += 1

    async def send_topic_only(self) -> None:
        await self._live.send_multipart([TOPIC.encode()])

    async def _answer_replays(self) -> None:
        while True:
            client, empty, start = await self._replay.recv_multipart()
            self.num_replay_requests += 1
            for seq, payload in self._buffer:
                if seq >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart([client, empty, TOPIC.encode(), seq.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, empty, b"", (-1).to_bytes(8, "big", signed=True), b""])


def knows(mirror: Mirror, block: int) -> bool:
    chain = HashChain(BLOCK)
    chain.extend(array("I", [block] * BLOCK))
    return mirror.match(chain.hashes) == 1


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - the mirror is plain code, it has no event to wait for
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(folder: Path, *, replays: bool = True, timeout_seconds: float = 0.3) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(
        f"ipc://{folder}/live",
        f"ipc://{folder}/replay" if replays else None,
        TOPIC,
        Mirror(BLOCK),
        replay_timeout_seconds=timeout_seconds,
    )
    await subscriber.start()
    try:
        yield subscriber
    finally:
        await subscriber.close()


def run(scenario: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    async def whole() -> None:
        await scenario(folder)

    asyncio.run(whole())


async def late_join(folder: Path) -> None:
    async with Publisher(folder) as engine:
        for block in range(20):
            await engine.publish(block)
        async with following(folder) as subscriber:
            await subscriber.caught_up()
            assert subscriber.mirror.num_resident_blocks == 20
            await engine.subscribed()
            await engine.publish(20)
            await eventually(lambda: knows(subscriber.mirror, 20))
            assert not subscriber.mirror.is_suspect


async def lost_batches(folder: Path) -> None:
    async with Publisher(folder) as engine, following(folder) as subscriber:
        await engine.subscribed()
        for block in range(20):
            await engine.publish(block, lost=block % 3 == 1)
        await eventually(lambda: subscriber.mirror.num_applied_batches == 20)
        assert subscriber.mirror.num_resident_blocks == 20
        assert (subscriber.mirror.num_lost_batches, subscriber.mirror.num_restarts) == (0, 0)


async def buffer_too_short(folder: Path) -> None:
    async with Publisher(folder, buffer_size=3) as engine, following(folder) as subscriber:
        await engine.subscribed()
        await engine.publish(0)
        await eventually(lambda: knows(subscriber.mirror, 0))
        for block in range(1, 9):
            await engine.publish(block, lost=True)
        await engine.publish(9)
        await eventually(lambda: knows(subscriber.mirror, 9))
        assert [block for block in range(10) if knows(subscriber.mirror, block)] == [7, 8, 9]
        assert (subscriber.mirror.is_suspect, subscriber.mirror.num_lost_batches) == (True, 6)


async def no_replay_endpoint(folder: Path) -> None:
    async with Publisher(folder) as engine, following(folder, replays=False) as subscriber:
        await engine.subscribed()
        await engine.publish(0)
        await engine.publish(1, lost=True)
        await engine.publish(2)
        await eventually(lambda: knows(subscriber.mirror, 2))
        assert not knows(subscriber.mirror, 0)
        assert subscriber.mirror.is_suspect


async def engine_restart(folder: Path) -> None:
    async with following(folder) as subscriber:
        async with Publisher(folder) as engine:
            await engine.subscribed()
            for block in range(5):
                await engine.publish(block)
            await eventually(lambda: subscriber.mirror.num_resident_blocks == 5)
        async with Publisher(folder, first_timestamp_seconds=1000.0) as engine:
            await engine.publish(10, lost=True)
            await engine.subscribed()
            await engine.publish(11)
            await eventually(lambda: knows(subscriber.mirror, 11))
            assert [block for block in range(12) if knows(subscriber.mirror, block)] == [10, 11]
            assert (subscriber.mirror.num_restarts, subscriber.mirror.is_suspect) == (1, False)


async def restart_hidden_in_a_gap(folder: Path) -> None:
    async with following(folder) as subscriber:
        async with Publisher(folder) as engine:
            await engine.subscribed()
            await engine.publish(0)
            await engine.publish(1)
            await eventually(lambda: subscriber.mirror.num_resident_blocks == 2)
        async with Publisher(folder, first_timestamp_seconds=1000.0) as engine:
            for block in range(10, 16):
                await engine.publish(block, lost=True)
            await engine.subscribed()
            await engine.publish(16)
            await eventually(lambda: knows(subscriber.mirror, 16))
            assert [block for block in range(17) if knows(subscriber.mirror, block)] == list(range(10, 17))
            assert (subscriber.mirror.num_restarts, subscriber.mirror.is_suspect) == (1, False)


async def engine_comes_up_later(folder: Path) -> None:
    async with following(folder, timeout_seconds=0.05) as subscriber:
        await asyncio.wait_for(subscriber.caught_up(), 5)  # an engine that is not there must not hold up a start
        assert subscriber.num_replays == 1
        await asyncio.sleep(0.1)
        assert subscriber.mirror.num_applied_batches == 0
        async with Publisher(folder) as engine:
            await engine.subscribed()
            await engine.publish(1)
            await eventually(lambda: knows(subscriber.mirror, 1))
            assert not subscriber.mirror.is_suspect


async def unreadable_batch(folder: Path) -> None:
    async with Publisher(folder) as engine, following(folder) as subscriber:
        await engine.subscribed()
        await engine.publish(0)
        await engine.publish(1, payload=b"\xc1")
        await engine.publish(2)
        await eventually(lambda: knows(subscriber.mirror, 2))
        assert subscriber.mirror.num_lost_batches == 1
        assert not knows(subscriber.mirror, 0)


async def foreign_message(folder: Path) -> None:
    async with Publisher(folder) as engine, following(folder) as subscriber:
        await engine.subscribed()
        await engine.send_topic_only()
        await engine.publish(0)
        await eventually(lambda: knows(subscriber.mirror, 0))


async def closed_twice(folder: Path) -> None:
    async with following(folder) as subscriber:
        await subscriber.close()


@pytest.mark.case("KVM-01", "KVM-04")
@pytest.mark.parametrize(
    "scenario",
    [
        late_join,
        lost_batches,
        buffer_too_short,
        no_replay_endpoint,
        engine_restart,
        restart_hidden_in_a_gap,
        engine_comes_up_later,
        unreadable_batch,
        foreign_message,
        closed_twice,
    ],
)
def test_the_mirror_follows_through(scenario: Callable[[Path], Awaitable[None]], tmp_path: Path) -> None:
    run(scenario, tmp_path)


@pytest.mark.parametrize(("endpoint", "replay_endpoint"), [("nowhere", None), ("tcp://127.0.0.1:5557", "nowhere")])
def test_a_malformed_endpoint_is_a_setup_error(endpoint: str, replay_endpoint: str | None) -> None:
    subscriber = KvEventSubscriber(endpoint, replay_endpoint, TOPIC, Mirror(BLOCK))
    with pytest.raises(SetupError, match="'nowhere'"):
        asyncio.run(subscriber.start())
