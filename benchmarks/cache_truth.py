"""What is really resident in an engine's cache: its whole event log, read beside the mirror and by other means, plainly counted."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from prefix_cache.blocks import BlockHash, chain_hashes, root_hash


class TrueBlocks:
    """Must hear of every block from the engine's start on. Knows one KV group, and no adapters."""

    def __init__(self) -> None:
        self.num_removed = 0
        self._copies: dict[int, int] = {}
        self._hashes: dict[int, BlockHash] = {}
        """Of every block ever stored: an engine names equal blocks equally, also after it has removed them."""

    @property
    def hashes(self) -> set[BlockHash]:
        """Resident blocks."""
        return {self._hashes[name] for name in self._copies}

    def restarted(self) -> None:
        """The engine has gone, and all that it held."""
        self._copies.clear()

    def apply(self, payload: bytes) -> None:
        """One message of the engine."""
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                self._remove(event["block_hashes"])
            else:
                self._copies.clear()

    def _store(self, event: dict[str, Any]) -> None:
        names, parent = event["block_hashes"], event["parent_block_hash"]
        first = (event.get("extra_keys") or [None])[0] or [""]
        above = root_hash(first[0].encode()) if parent is None else self._hashes[parent]
        self._hashes.update(zip(names, chain_hashes(above, array("I", event["token_ids"]).tobytes(), event["block_size"]), strict=True))
        for name in names:
            self._copies[name] = self._copies.get(name, 0) + 1

    def _remove(self, names: list[int]) -> None:
        self.num_removed += len(names)
        for name in names:
            self._copies[name] -= 1
            if not self._copies[name]:
                del self._copies[name]


async def read_log(replay_endpoint: str) -> TrueBlocks:
    """What is resident by the engine's own log, if its buffer reaches back to its start."""
    truth, context = TrueBlocks(), zmq.asyncio.Context()
    try:
        asking = context.socket(zmq.DEALER)
        asking.connect(replay_endpoint)
        await asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while (frames := await asyncio.wait_for(asking.recv_multipart(), 10))[-1]:
            truth.apply(frames[-1])
    finally:
        context.destroy(linger=0)
    return truth


class EventTap:
    """Passes an engine's events on to `endpoint` and, whatever becomes of them there, to `truth`.

    `is_losing`: what comes is not passed on. `cut` and `mend`: nobody can connect in between.
    """

    def __init__(self, source: str, endpoint: str, truth: TrueBlocks) -> None:
        self.endpoint = endpoint
        self.is_losing = False
        self._truth = truth
        self._context = zmq.asyncio.Context()
        self._source = self._context.socket(zmq.SUB)
        self._source.setsockopt(zmq.RECONNECT_IVL, 20)
        self._source.setsockopt(zmq.RCVHWM, 0)
        self._source.setsockopt(zmq.SUBSCRIBE, b"")
        self._source.connect(source)
        self._sink: zmq.asyncio.Socket | None = None
        self.mend()
        self._task = asyncio.create_task(self._pass_on(), name="event-tap")

    def mend(self) -> None:
        """Listen for subscribers."""
        self._sink = self._context.socket(zmq.PUB)
        self._sink.setsockopt(zmq.LINGER, 0)
        self._sink.bind(self.endpoint)

    def cut(self) -> None:
        """Drop every subscriber."""
        assert self._sink is not None
        self._sink.close()
        self._sink = None

    async def close(self) -> None:
        """Stop, and drop the sockets."""
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def _pass_on(self) -> None:
        while True:
            frames = await self._source.recv_multipart()
            self._truth.apply(frames[-1])
            if self._sink is not None and not self.is_losing:
                await self._sink.send_multipart(frames)
