"""The replay's chat client against servers that close connections when they like."""

from __future__ import annotations

import asyncio

import pytest

from replays.client import ChatClient, Reply
from tests.raw_server import Connection, raw_server

pytestmark = pytest.mark.anyio

USAGE = b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":1}}'


async def answer(connection: Connection) -> bool:
    """Answer the next request of `connection`; False if there was none."""
    if await connection.request() is None:
        return False
    await connection.open_stream()
    await connection.send_event(USAGE)
    await connection.end_stream()
    return True


def send(url: str, num_requests: int) -> list[Reply]:
    """Send one after the other, on one client."""
    client = ChatClient(url, concurrency=2, keep_answers=False)
    try:
        return [client.send(b"{}", {}) for _ in range(num_requests)]
    finally:
        client.close()


async def test_a_kept_connection_that_the_server_closes_is_replaced() -> None:
    numbers: list[int] = []

    async def serve(connection: Connection) -> None:
        numbers.append(connection.number)
        await answer(connection)
        if connection.number == 0:
            await connection.request()  # taken, and the connection closed
        else:
            await answer(connection)

    async with raw_server(serve) as url:
        replies = await asyncio.to_thread(send, url, 2)
    assert [reply.error for reply in replies] == [None, None]
    assert numbers == [0, 1]


async def test_a_server_that_only_closes_connections_fails_after_one_more_try() -> None:
    numbers: list[int] = []

    async def serve(connection: Connection) -> None:
        numbers.append(connection.number)
        await connection.request()

    async with raw_server(serve) as url:
        (reply,) = await asyncio.to_thread(send, url, 1)
    assert reply.error is not None
    assert reply.error.startswith("connection: ")
    assert numbers == [0, 1]


async def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    numbers: list[int] = []

    async def serve(connection: Connection) -> None:
        numbers.append(connection.number)
        await connection.request()
        await connection.open_stream()
        await connection.send_event(b'{"choices":[{"delta":{"content":"a"}}]}')

    async with raw_server(serve) as url:
        (reply,) = await asyncio.to_thread(send, url, 1)
    assert reply.error is not None
    assert numbers == [0]
