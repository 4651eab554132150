"""Requests beside a conversation that no other builds on: titles, guesses at the next message, probes."""

from __future__ import annotations

import math

SHORT_OUTPUT_TOKENS = 64
"""A title, a label or a guess at the next message; hardly an answer that a conversation goes on from."""


def is_side_request(
    *, num_messages: int, num_tools: int, max_output_tokens: int | None, session_has_tools: bool, is_named: bool = True
) -> bool:
    """Whether a request looks like one that no other builds on.

    A probe for one token; a title or summary asked without the tools that the session has otherwise; and a beginning without tools whose
    answer may only be short, of a conversation that its client does not name (`is_named`).
    """
    most = math.inf if max_output_tokens is None else max_output_tokens
    is_beginning = num_tools == 0 and num_messages <= 2
    return most <= 1 or (is_beginning and (session_has_tools or (not is_named and most <= SHORT_OUTPUT_TOKENS)))
