"""Request bodies, bounded in size and time, and unpacked."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from agentserve.codings import Unpacking, codings
from agentserve.errors import BodyTimeout, BodyTooLarge, UnsupportedMediaType

FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""What a web page may post to any address without asking: refused, so that no page can use a server on its reader's machine."""


async def read_body(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """The whole body as it was before its content codings; `max_bytes` holds for both forms.

    Raises UnsupportedMediaType, BodyTooLarge, BodyTimeout, InvalidRequest if it cannot be unpacked, and ClientDisconnect if the client
    leaves.
    """
    headers = dict(request.headers.raw)  # one walk for three names
    _check_type(headers.get(b"content-type", b"").decode("latin-1"))
    names = codings(",".join(request.headers.getlist("content-encoding"))) if b"content-encoding" in headers else []
    declared = headers.get(b"content-length", b"").decode("latin-1")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {max_bytes} are accepted")
    try:
        async with asyncio.timeout(seconds):
            return await (_unpacked(request, Unpacking(names, max_bytes), max_bytes) if names else _plain(request, max_bytes))
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {seconds:g} s") from error


async def _plain(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _unpacked(request: Request, unpacking: Unpacking, max_bytes: int) -> bytes:
    body = bytearray()
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
        for output in unpacking.feed(part):
            body += output
            await asyncio.sleep(0)  # a small body may unpack to a large one: let others run
    unpacking.finish()
    return bytes(body)


def _check_type(content_type: str) -> None:
    if content_type == "application/json":
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind in FORM_TYPES:
        raise UnsupportedMediaType(f"the body is sent as {kind!r}; send JSON with 'Content-Type: application/json'")


__all__ = ["ClientDisconnect", "read_body"]
