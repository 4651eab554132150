"""One HTTP answer in progress: sent as it comes, kept alive while it is silent, given up when the client leaves.

A handler writes through a `Wire`. Until the first write (or the first keep-alive) nothing is sent, so an early error can still be a
proper HTTP status. When the client disconnects, also while the answer is not streamed, the handler's task is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send


class Sink(Protocol):
    """Where a handler writes its answer. `started`: its status is out; `client_left`: nobody reads any more."""

    @property
    def started(self) -> bool: ...

    @property
    def client_left(self) -> bool: ...

    def prepare(self, status: int, headers: Mapping[str, str]) -> None:
        """Set what the first write will send ahead. May be called again until then."""
        ...

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send bytes, in the order of the calls; waits while the client reads slowly. After the last write it does nothing."""
        ...


class Wire:
    """The connection of one client: what a handler writes goes out at once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._status = 200
        self._lock = asyncio.Lock()  # a keep-alive and the handler may both wait for a slow reader
        self.started = False
        self.finished = False
        self.client_left = False
        self.written_at = asyncio.get_running_loop().time()

    def prepare(self, status: int, headers: Mapping[str, str]) -> None:
        """Set what the first write will send ahead. May be called again until then."""
        assert not self.started
        self._status = status
        self._headers = [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()]

    @property
    def prepared(self) -> bool:
        return self._headers is not None

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send bytes, in the order of the calls; waits while the client reads slowly. After the last write it does nothing."""
        async with self._lock:
            if self.finished:
                return
            self.finished = not more
            if not self.started:
                assert self._headers is not None
                self.started = True
                await self._send({"type": "http.response.start", "status": self._status, "headers": self._headers})
            self.written_at = asyncio.get_running_loop().time()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


TAKEN = (
    b'{"type":"error","error":{"type":"invalid_request_error","code":"sent_again","param":null,'
    b'"message":"the same request was sent again, and its answer goes there"}}'
)
"""Told, in the form of every dialect, to a client whose answer another connection has taken over before it began."""

Handler = Callable[[Wire], Awaitable[None]]


class Exchange(Response):
    """An ASGI response that runs `handler`. `keep_alive` is sent after `silence_seconds` without a write, once headers are prepared."""

    def __init__(self, handler: Handler, *, silence_seconds: float, keep_alive: bytes | None) -> None:
        self.status_code = 200
        self.background = None
        self._handler = handler
        self._silence_seconds = silence_seconds
        self._keep_alive = keep_alive
        self._work: asyncio.Future[None] | None = None
        self._taken = False
        self._gone: asyncio.Future[None] | None = None

    def take(self) -> asyncio.Future[None] | None:
        """The work on this answer, which ends here and is the caller's from now on; None if it has not begun or is over."""
        if self._work is None or self._work.done() or self._taken:
            return None
        self._taken = True
        if self._gone is not None:
            self._gone.cancel()  # wakes the exchange, which has nothing left to do
        return self._work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wire = Wire(send)
        work = self._work = asyncio.ensure_future(self._handler(wire))
        gone = self._gone = asyncio.ensure_future(_disconnected(receive))
        stopped = False
        try:
            while not work.done() and not gone.done():
                await asyncio.wait({work, gone}, timeout=self._silence_seconds, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and not gone.done():
                    await self._break_silence(wire)
        except asyncio.CancelledError:
            stopped = True  # by the server
        finally:
            wire.client_left = gone.done()
            gone.cancel()
            if not self._taken:
                self._taken = True  # too late for anybody else
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
            elif not wire.started:
                wire.prepare(410, {"content-type": "application/json"})  # SDKs do not send a request again for this one
                await wire.write(TAKEN, more=False)
        if stopped and not wire.finished:
            raise asyncio.CancelledError

    async def _break_silence(self, wire: Wire) -> None:
        silent = asyncio.get_running_loop().time() - wire.written_at
        if self._keep_alive is not None and wire.prepared and silent >= self._silence_seconds:
            await wire.write(self._keep_alive)


async def _disconnected(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return
