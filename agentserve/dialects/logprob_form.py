"""Log probabilities as OpenAI's dialects ask for them and write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentserve.errors import InvalidRequest
from model.chat import TokenLogprob

MAX_TOP = 20
LEAST = -9999.0
"""What OpenAI's API and vLLM write for a probability of zero, whose logarithm JSON cannot hold."""


def num_top(wanted: bool, top: int | None) -> int | None:
    """How many likely tokens to name; None where no log probabilities are wanted. Raises InvalidRequest."""
    if top is not None and not 0 <= top <= MAX_TOP:
        raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_TOP}, not {top}", param="top_logprobs")
    return (top or 0) if wanted else None


def written(logprobs: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """The tokens in order. `bytes` are a token's own, also where they are only a part of a character and `token` cannot show them."""
    return [{**_named(one.token, one.logprob), "top_logprobs": [_named(*pair) for pair in one.top]} for one in logprobs]


def _named(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(token)}
