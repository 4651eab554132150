"""HTTP connections that a test writes byte by byte, for what no well-behaved client does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        error = msgspec.json.decode(self.body)["error"]
        assert isinstance(error, dict)
        return error


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def request(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> RawAnswer:
        """POST `body` and read the answer."""
        await self.send(post_head(path, {"content-length": str(len(body)), **(headers or {})}) + body)
        return await self.answer()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer, also of an interim one."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.partition(": ") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value for name, _, value in fields}

    async def answer(self) -> RawAnswer:
        """The next whole answer."""
        status, headers = await self.head()
        if headers.get("transfer-encoding") != "chunked":
            return RawAnswer(status, headers, await self._reader.readexactly(int(headers["content-length"])))
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return RawAnswer(status, headers, body)

    async def closed(self) -> None:
        """Wait until the server has closed the connection; what it still sends is dropped."""
        with suppress(ConnectionError):
            while await self._reader.read(4096):
                pass

    async def close(self) -> None:
        """Say goodbye properly."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    def reset(self) -> None:
        """Vanish."""
        self._writer.transport.abort()


@asynccontextmanager
async def raw_client(url: str) -> AsyncIterator[RawClient]:
    """A connection to `url`, closed at the end."""
    host, port = url.removeprefix("http://").split(":")
    client = RawClient(*await asyncio.open_connection(host, int(port)))
    try:
        yield client
    finally:
        await client.close()


def post_head(path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: x"]
    lines += [f"{name}: {value}" for name, value in {"content-type": "application/json", **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def chunked(body: bytes, size: int) -> bytes:
    """`body` in the chunked transfer coding, with chunks of `size` bytes."""
    chunks = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
