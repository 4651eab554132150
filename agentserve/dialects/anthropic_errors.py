"""Errors as Anthropic's clients read them: types by status, as its API names them."""

from __future__ import annotations

from typing import Any

from agentserve.errors import AgentserveError, ContextTooLong

ERROR_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: AgentserveError) -> dict[str, Any]:
    """`{"type": "error", "error": {type, message}}`."""
    other = ERROR_TYPES[400 if error.status < 500 else 500]
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, other), "message": _message(error)}}


def _message(error: AgentserveError) -> str:
    if isinstance(error, ContextTooLong):  # in the words that clients look for before they compact
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len} maximum"
    return error.message
