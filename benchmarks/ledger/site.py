"""Servers in this process's own event loop, on free loopback ports."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from agentserve.boot import running_server
from agentserve.server import Server
from agentserve.settings import Settings
from agentserve.web import web_server
from benchmarks.ledger.left import until

_START_SECONDS = 30.0


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[Server, int]]:
    """A server and its port. Several end in the reverse order of their start, as each puts back the signal handlers that it found."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        async with running_server(settings, lambda _: None) as server:
            web = web_server(server, grace_seconds=1)
            task = asyncio.create_task(web.serve(sockets=[listener]))
            await until(lambda: web.started, _START_SECONDS)
            try:
                yield server, listener.getsockname()[1]
            finally:
                web.should_exit = True
                await task
