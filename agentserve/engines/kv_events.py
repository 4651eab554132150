"""Feeds a `Mirror` from a vLLM engine's ZMQ event socket, with gaps filled from its replay socket.

The wire (vllm/distributed/kv_events.py): PUB sends `[topic, number (8 bytes, big endian), payload]`; a replay request is
`["", first number]`, answered by `["", topic, number, payload]` for every batch still buffered from there on, and by number −1 at the end.
"""

from __future__ import annotations

import asyncio
import contextlib

import structlog
import zmq
import zmq.asyncio

from agentserve.errors import SetupError
from prefix_cache.events import MalformedBatch, decode_batch
from prefix_cache.mirror import Gap, Mirror

_log = structlog.get_logger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_NUM_QUEUED_BATCHES = 100_000
"""Batches that may wait in the socket while a replay runs; vLLM's own limit at its end."""


class KvEventSubscriber:
    """One engine's event stream. An endpoint that cannot be reached is tried again for ever; until it answers the mirror stays as it is.

    `replay_endpoint` None: gaps cannot be filled, and each one empties the mirror. `replay_timeout_seconds` is the longest silence within
    a replay before it counts as unanswered.
    """

    def __init__(
        self, endpoint: str, replay_endpoint: str | None, topic: str, mirror: Mirror, *, replay_timeout_seconds: float = 5.0
    ) -> None:
        self.mirror = mirror
        self.num_replays = 0
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._replay_timeout_seconds = replay_timeout_seconds
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_replayed = asyncio.Event()

    async def start(self) -> None:
        """Subscribe and begin to follow. Returns at once; the engine may come up later. Raises `SetupError` on a malformed endpoint."""
        assert self._task is None
        self._context = zmq.asyncio.Context()
        try:
            live = self._connect(zmq.SUB, self._endpoint)
            if self._replay_endpoint is not None:
                self._connect(zmq.DEALER, self._replay_endpoint).close()
        except SetupError:
            await self.close()
            raise
        live.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        self._task = asyncio.create_task(self._follow(live), name=f"kv-events {self._endpoint}")

    async def caught_up(self) -> None:
        """Wait until the engine's past events are in the mirror, or are known not to come (`replay_timeout_seconds` without a word)."""
        await self._has_replayed.wait()

    def _connect(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        assert self._context is not None
        connected = self._context.socket(kind)
        connected.setsockopt(zmq.LINGER, 0)
        connected.setsockopt(zmq.RCVHWM, _NUM_QUEUED_BATCHES)
        connected.setsockopt(zmq.RECONNECT_IVL, 100)
        connected.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            connected.connect(endpoint)
        except zmq.ZMQError as error:
            raise SetupError(f"KV event endpoint {endpoint!r} cannot be used: {error}. Give tcp://host:port or ipc://path.") from error
        return connected

    async def close(self) -> None:
        """Stop following and drop the sockets. Safe to call twice."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    async def _follow(self, live: zmq.asyncio.Socket) -> None:
        with live:
            try:
                await self._replay(Gap(0, 0))
            finally:
                self._has_replayed.set()
            while True:
                # Live batches wait in the socket while a gap is being filled.
                gap = self._feed(await live.recv_multipart(), replayed=False)
                while gap is not None:
                    gap = await self._replay(gap)

    def _feed(self, frames: list[bytes], *, replayed: bool) -> Gap | None:
        if len(frames) < 3:
            _log.warning("kv_event_message_foreign", endpoint=self._endpoint, num_frames=len(frames))
            return self.mirror.gap
        seq = int.from_bytes(frames[-2], "big")
        try:
            batch = decode_batch(frames[-1], self.mirror.sent)
        except MalformedBatch as error:
            _log.warning("kv_event_batch_unreadable", endpoint=self._endpoint, seq=seq, error=str(error))
            return self.mirror.lose(seq)
        return self.mirror.apply(seq, batch, replayed=replayed)

    async def _replay(self, gap: Gap) -> Gap | None:
        """Ask for `gap` and apply the answer; return what is missing then. A gap that this does not narrow is given up."""
        if self._replay_endpoint is not None:
            self.num_replays += 1
            try:
                await self._ask(self._replay_endpoint, gap)
            except TimeoutError:
                _log.warning("kv_event_replay_unanswered", endpoint=self._replay_endpoint, start=gap.start, stop=gap.stop)
        return self.mirror.end_replay(gap)

    async def _ask(self, endpoint: str, gap: Gap) -> None:
        num_restarts = self.mirror.num_restarts
        with self._connect(zmq.DEALER, endpoint) as replay:
            await replay.send_multipart([b"", gap.ask_from.to_bytes(8, "big")])
            while True:
                frames = await asyncio.wait_for(replay.recv_multipart(), self._replay_timeout_seconds)
                if frames[-2:] == [_END, b""]:
                    return
                self._feed(frames, replayed=True)
                if self.mirror.num_restarts > num_restarts:
                    return
