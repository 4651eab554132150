"""Server-sent events of the dialects that name their events."""

from __future__ import annotations

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


def named_event(body: dict[str, Any]) -> bytes:
    """One event, named by its own `type`."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encode(body) + b"\n\n"
