"""The web server around the application: uvicorn, with limits on how long and how large a request's head may be.

uvicorn waits for ever for the rest of a request that has begun. Here a request has to arrive within a time, whichever part of it dawdles:
its head (408, then the connection is closed), its body while a route reads it (`agentserve.body` answers 408), or a body that nobody
reads any more because its request was refused (closed).
"""

from __future__ import annotations

import asyncio
import resource
from http import HTTPStatus
from typing import ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentserve.app import RefuseAll, build_app, error_text
from agentserve.errors import AgentserveError, BodyTimeout, HeadTooLarge, TooManyConnections
from agentserve.server import Server

KEEP_ALIVE_SECONDS = 620
"""Longer than the pools of known clients keep an idle connection."""
MAX_HEAD_BYTES = 1 << 16
"""Request line and headers, line ends included; above it 431."""
_LINE_BYTES = len(b": \r\n")
"""What a header line holds beside its name and value."""
_REQUEST_LINE_BYTES = len(b"  HTTP/1.1\r\n")
_HEAD_TOO_LARGE = HeadTooLarge(f"the request line and the headers have more than {MAX_HEAD_BYTES} bytes: send less of them")
_AGAIN_SECONDS = 1.0
_LINGER_SECONDS = 1.0
"""Closing on a client that still writes would reset the connection, and the answer with it."""
_RESERVED_FILES = 64
"""For what a server holds without any connection, twice over."""


class BoundedProtocol(HttpToolsProtocol):
    """One client connection. `arrival_seconds` is the time that a request may take from its first byte to its last."""

    arrival_seconds: ClassVar[float] = 30.0
    max_connections: ClassVar[int | None] = None
    full: ClassVar[RefuseAll | None] = None
    """What answers connections beyond these."""

    _arrival: asyncio.TimerHandle | None = None
    _refuse_head = RefuseAll(_HEAD_TOO_LARGE)
    _refused = False
    _in_head = False
    _began = False
    """Whether the head began in the bytes at hand."""
    _head_bytes = 0
    """Of the head, as it was parsed."""
    _waiting_bytes = 0
    """Received since the head began; the parser tells of a line once it is whole, and one may have no end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        if self.full is not None and self.max_connections is not None and len(self.connections) > self.max_connections:
            self.app = self.full
        # A connection that never asks for anything is idle from the start.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._began = False
        super().data_received(data)
        if self._in_head and not self._began:
            self._waiting_bytes += len(data)
            if self._waiting_bytes > MAX_HEAD_BYTES:
                self._refuse(_HEAD_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._began, self._head_bytes, self._waiting_bytes = True, True, _REQUEST_LINE_BYTES, 0
        self._arrived()
        self._arrival = self.loop.call_later(self.arrival_seconds, self._check_arrival)

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + _LINE_BYTES
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        app = self.app
        if self._head_bytes + len(self.parser.get_method()) > MAX_HEAD_BYTES:
            self.app = self._refuse_head  # for this one request
        super().on_headers_complete()
        self.app = app

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def _arrived(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _check_arrival(self) -> None:
        """The time is over and the request has not arrived."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:  # a route still reads this body, or answers the request before: it ends that itself
            self._arrival = self.loop.call_later(_AGAIN_SECONDS, self._check_arrival)
        elif self._in_head:
            self._refuse(BodyTimeout(f"the request's head did not arrive within {self.arrival_seconds:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: AgentserveError) -> None:
        """Answer a request whose head is not known, and close; an answer in progress is not written into."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = error_text(self.url.decode("latin-1"), error)
        status = f"{error.status} {HTTPStatus(error.status).phrase}"
        head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def most_connections() -> int | None:
    """Client connections that can all have a turn: each of those needs one to the engine too. None: files are not limited.

    What is kept back is for connections that are refused, so that they hear of it: a connection that cannot be accepted hears nothing.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(1, (limit - max(_RESERVED_FILES, limit // 4)) // 2)


def web_server(server: Server, *, grace_seconds: int = 5) -> uvicorn.Server:
    """uvicorn over `server`; `grace_seconds` are given to running answers when it is told to stop."""

    class Protocol(BoundedProtocol):
        arrival_seconds = server.settings.limits.body_seconds
        max_connections = most_connections()
        full = None if max_connections is None else RefuseAll(TooManyConnections(max_connections))

    config = uvicorn.Config(
        build_app(server),
        http=Protocol,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
        server_header=False,
    )
    return uvicorn.Server(config)
