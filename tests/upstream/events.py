"""KV events over ZMQ as vLLM publishes them: [topic, number (8 bytes, big endian), msgpack of [time, events, rank]], with replay."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from tests.upstream.cache import KvEvent

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KvEventPublisher:
    """Binds a PUB and a ROUTER socket on free loopback ports between `start` and `close`."""

    def __init__(self, topic: str = "kv-events", num_kept_batches: int = 10_000) -> None:
        self.endpoint = ""
        self.replay_endpoint = ""
        self.num_lost = 0
        self.topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=num_kept_batches)
        self._next_number = 0
        self._num_to_lose = 0

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        self.endpoint = f"tcp://127.0.0.1:{self._pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay_endpoint = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._replays = asyncio.create_task(self._serve_replays())

    async def close(self) -> None:
        self._replays.cancel()
        await asyncio.wait([self._replays])
        self._context.destroy(linger=0)

    def lose(self, num_batches: int) -> None:
        """Do not send the next batches, as a full queue would; they stay in the replay buffer."""
        self._num_to_lose = num_batches

    def restart(self) -> None:
        """Number from 0 again with an empty replay buffer, as a restarted engine does."""
        self._next_number = 0
        self._kept.clear()

    async def publish(self, events: Sequence[KvEvent]) -> None:
        if not events:
            return
        number, self._next_number = self._next_number, self._next_number + 1
        # The wall clock is part of vLLM's wire format.
        payload = msgspec.msgpack.encode([time.time_ns() / 1e9, events, 0])
        self._kept.append((number, payload))
        if self._num_to_lose:
            self._num_to_lose -= 1
            self.num_lost += 1
            return
        await self._pub.send_multipart([self.topic, number.to_bytes(8, "big"), payload])

    async def _serve_replays(self) -> None:
        while True:
            frames: list[Any] = await self._router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", self.topic, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", END_OF_REPLAY, b""])
