"""An HTTP server whose connections a test drives byte by byte, for what no well-behaved server does."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class RawRequest:
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes


class Connection:
    """One client connection; `number` counts them from 0."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer

    async def request(self) -> RawRequest | None:
        """The next request; None once the client has closed the connection."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return None
        fields = (line.partition(": ") for line in head[1:] if line)
        headers = {name.lower(): value for name, _, value in fields}
        body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return RawRequest(head[0].split(" ")[1], headers, body)

    async def answer(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
        await self.send(head.encode() + body)

    async def open_stream(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def send_event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        await self.send(f"{len(event):x}\r\n".encode() + event + b"\r\n")

    async def end_stream(self) -> None:
        await self.send_event(b"[DONE]")
        await self.send(b"0\r\n\r\n")

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def reset(self) -> None:
        """End the connection by a reset, as the kernel of a process that was killed does."""
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def closed_by_client(self) -> None:
        """Wait until the client has closed its end."""
        while await self._reader.read(1024):
            pass


@asynccontextmanager
async def raw_server(serve: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[str]:
    """Run `serve` for every connection, and close it after; gives the URL."""
    connections: list[asyncio.StreamWriter] = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        try:
            await serve(Connection(len(connections) - 1, reader, writer))
        except ConnectionError:
            pass  # the client went first
        finally:
            writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in connections:
            writer.close()
        await server.wait_closed()
