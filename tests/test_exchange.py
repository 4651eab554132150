"""One HTTP answer in progress: what is sent, in which order, and what happens when either side goes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentserve.exchange import Exchange, Handler, Wire

pytestmark = pytest.mark.anyio


class Client:
    """The other end of an exchange; `reads` is cleared while it does not read."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.left = asyncio.Event()

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


async def run(handler: Handler, client: Client, silence_seconds: float = 0.05) -> None:
    exchange = Exchange(handler, silence_seconds=silence_seconds, keep_alive=b":")
    await exchange({"type": "http"}, client.receive, client.send)


@pytest.mark.case("SSE-10")
async def test_nothing_is_sent_behind_the_end_though_the_client_reads_slowly() -> None:
    client = Client()

    async def handler(wire: Wire) -> None:
        wire.prepare(200, {})
        await wire.write(b"begin")
        client.reads.clear()
        asyncio.get_running_loop().call_later(0.3, client.reads.set)
        await asyncio.sleep(0.12)  # a keep-alive waits for the client by now
        await wire.write(b"end", more=False)

    await run(handler, client)
    assert client.bodies[0] == b"begin"
    assert client.bodies[-1] == b"end"
    assert b":" in client.bodies
    assert [message.get("more_body") for message in client.sent[1:]] == [True] * (len(client.bodies) - 1) + [False]


async def test_a_client_that_leaves_cancels_the_handler_which_can_tell() -> None:
    client, seen = Client(), []

    async def handler(wire: Wire) -> None:
        try:
            client.left.set()
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append(wire.client_left)
            raise

    await asyncio.wait_for(run(handler, client), 2)
    assert seen == [True]


async def test_a_server_that_stops_lets_the_handler_end_its_stream() -> None:
    client, running = Client(), asyncio.Event()

    async def handler(wire: Wire) -> None:
        wire.prepare(200, {})
        await wire.write(b"begin")
        running.set()
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            assert not wire.client_left
            await wire.write(b"stopping", more=False)
            raise

    task = asyncio.create_task(run(handler, client))
    await running.wait()
    task.cancel()
    await asyncio.wait_for(task, 2)  # what was ended well is no failure of the server
    assert client.bodies == [b"begin", b"stopping"]


async def test_an_error_of_the_handler_is_not_swallowed() -> None:
    async def handler(_: Wire) -> None:
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        await run(handler, Client())
