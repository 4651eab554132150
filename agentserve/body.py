"""Request bodies, bounded in size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from agentserve.errors import BodyTooLarge, ClientError


class BodyTimeout(ClientError):
    """The client began a body and did not finish it in time."""

    status = 408
    kind = "timeout_error"


async def read_body(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """The whole body. Raises BodyTooLarge, BodyTimeout, and ClientDisconnect if the client leaves."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes; at most {max_bytes} are accepted")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise BodyTooLarge(f"the body has more than {max_bytes} bytes")
                parts.append(part)
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {seconds:g} s") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


__all__ = ["BodyTimeout", "ClientDisconnect", "read_body"]
