"""How an answer leaves the upstream, well or badly."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

from aiohttp import web

from tests.upstream.script import Script

_RST_ON_CLOSE = struct.pack("ii", 1, 0)
_ERROR_TYPES = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}


async def send(response: web.StreamResponse, script: Script, *payloads: bytes) -> None:
    data = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    size = script.bytes_per_write or len(data)
    for start in range(0, len(data), size):
        await response.write(data[start : start + size])


def cut(request: web.Request, response: web.StreamResponse, how: str) -> web.StreamResponse:
    """Drop the connection without the end of the body."""
    transport = request.transport
    assert transport is not None
    if how == "rst":
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST_ON_CLOSE)
        transport.abort()
    else:
        transport.close()
    return response


def error(status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": _ERROR_TYPES.get(status, "InternalServerError"), "param": param, "code": status}
    return web.json_response({"error": error}, status=status, headers=headers)


def unauthorized() -> web.Response:
    return web.json_response({"error": "Unauthorized"}, status=401)
