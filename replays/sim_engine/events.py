"""KV events over ZMQ as vLLM publishes them: [topic, number (8 bytes, big endian), msgpack of [time, events, rank]], with replay."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prefix_cache.events import Event

TOPIC = "kv-events"
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_NUM_KEPT_BATCHES = 10_000
"""vLLM's own default."""


class EventPublisher:
    """Between `start` and `close` it binds a PUB socket at `endpoint` and a ROUTER socket at `replay_endpoint`; port 0 takes a free one.

    Raises zmq.ZMQError at `start` where an endpoint cannot be bound.
    """

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_NUM_KEPT_BATCHES)
        self._next_number = 0

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self.endpoint = _bind(self._pub, self.endpoint)
            self.replay_endpoint = _bind(self._router, self.replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._replays = asyncio.create_task(self._serve_replays(), name="kv event replays")

    async def close(self) -> None:
        self._replays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._replays
        self._context.destroy(linger=0)

    async def publish(self, events: Sequence[Event]) -> None:
        """Send one batch."""
        number, self._next_number = self._next_number, self._next_number + 1
        # The wall clock is part of vLLM's wire format.
        payload = msgspec.msgpack.encode([time.time_ns() / 1e9, events, 0])
        self._kept.append((number, payload))
        await self._pub.send_multipart([TOPIC.encode(), number.to_bytes(8, "big"), payload])

    async def _serve_replays(self) -> None:
        while True:
            frames: list[Any] = await self._router.recv_multipart()
            if len(frames) != 3:
                continue
            client, _, start = frames
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await self._router.send_multipart([client, b"", TOPIC.encode(), number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, b"", b"", _END_OF_REPLAY, b""])


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    socket.bind(endpoint)
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0"))  # type: ignore[union-attr]  # bytes for this option
