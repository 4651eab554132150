"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from agentserve.errors import AgentserveError, Busy, EngineRefused


def error_body(error: AgentserveError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_headers(error: AgentserveError) -> dict[str, str]:
    """Retry-After where waiting helps."""
    if isinstance(error, Busy | EngineRefused) and error.retry_after_seconds is not None:
        return {"retry-after": str(max(1, round(error.retry_after_seconds)))}
    return {"retry-after": "2"} if error.status in (429, 503) else {}
