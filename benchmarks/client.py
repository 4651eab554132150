"""A load client that costs little and counts right: one kept-alive connection, the request laid out before the clock starts."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from dataclasses import dataclass
from typing import Self

import httptools

_CONTENT = re.compile(rb'"content":\s*"((?:[^"\\]|\\.)+)"')


class BadAnswer(RuntimeError):
    """The server under test did not answer as it should."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the first byte sent to the first event with text, and to the end; the text that was streamed."""

    first_text_seconds: float
    total_seconds: float
    text: str


class Client:
    """Sends one request at a time. Use as an async context manager."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._quick_ack: int | None = getattr(socket, "TCP_QUICKACK", None)

    async def __aenter__(self) -> Self:
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def chat(self, body: bytes, headers: dict[str, str]) -> Answer:
        """POST `body` to /v1/chat/completions.

        Raises:
            BadAnswer: the status is not 200, the stream holds no text or does not end with [DONE].
        """
        lines = [f"{name}: {value}" for name, value in headers.items()]
        head = ["POST /v1/chat/completions HTTP/1.1", f"Host: 127.0.0.1:{self._port}", "Content-Type: application/json", *lines]
        data = "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body
        collector = _Collector()
        parser = httptools.HttpResponseParser(collector)
        if self._reader.at_eof():  # some servers close a connection that was idle for seconds
            self._writer.close()
            await self._connect()
        started = time.perf_counter()
        self._writer.write(data)
        first: float | None = None
        while not collector.complete:
            received = await self._reader.read(1 << 16)
            self._acknowledge()
            if not received:
                break
            parser.feed_data(received)
            if first is None and _CONTENT.search(collector.body):
                first = time.perf_counter() - started
        total = time.perf_counter() - started
        if parser.get_status_code() != 200 or first is None or b"data: [DONE]" not in collector.body:
            raise BadAnswer(f"status {parser.get_status_code()}: {bytes(collector.body[:500])!r}")
        return Answer(first, total, b"".join(_CONTENT.findall(collector.body)).decode())

    async def _connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
        self._socket: socket.socket = self._writer.get_extra_info("socket")

    def _acknowledge(self) -> None:
        """Acknowledge what came at once, where the system can (Linux).

        A server without TCP_NODELAY holds the first event back until its headers are acknowledged. The delay of that, 40 ms on Linux,
        is the kernel's and would bury what the server itself costs.
        """
        if self._quick_ack is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, self._quick_ack, 1)


class _Collector:
    """httptools' callbacks."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True
