"""Requests to an ASGI application without sockets, in the caller's own context."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer as far as it came: `status` 0 where the client left before it began."""

    status: int
    headers: Mapping[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str], *, leave_after: int | None = None) -> Answered:
    """POST `body`; with `leave_after` the client disconnects once so many pieces of the answer's body have come."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in fields.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "root_path": "",
    }
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()
    started: list[Message] = []
    pieces: list[bytes] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
            return
        pieces.append(message.get("body", b""))
        if leave_after is not None and len(pieces) >= leave_after:
            left.set()
            await asyncio.sleep(0)  # the server hears of it before it goes on

    await app(scope, receive, send)
    if not started:
        return Answered(0, {}, b"".join(pieces))
    seen = {name.decode().lower(): value.decode("latin-1") for name, value in started[0]["headers"]}
    return Answered(started[0]["status"], seen, b"".join(pieces))
