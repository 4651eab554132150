"""What is set aside for a turn's output and for its session's growth: the limit that a client names is hardly ever near what comes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

FIRST_OUTPUT_TOKENS = 1536
"""95th percentile of outputs in recorded coding sessions; from there the reserve is learnt."""
GROWTH_TOKENS = 704
"""Median of what a turn's new input adds, in the same sessions."""

_SHARE = 0.95
_NUM_REMEMBERED = 512
_LEAST = 32


class OutputReserve:
    """The 95th percentile of the latest outputs, tokens."""

    __slots__ = ("_latest", "_sorted")

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []

    def seen(self, num_output_tokens: int) -> None:
        """A turn has generated so much. Changes state."""
        self._latest.append(num_output_tokens)
        insort(self._sorted, num_output_tokens)
        if len(self._latest) > _NUM_REMEMBERED:
            del self._sorted[bisect_left(self._sorted, self._latest.popleft())]

    def tokens(self, max_tokens: int | None = None) -> int:
        """For output of at most `max_tokens`, and growth."""
        known = len(self._sorted)
        output = self._sorted[int(_SHARE * known)] if known >= _LEAST else FIRST_OUTPUT_TOKENS
        return (output if max_tokens is None else min(output, max_tokens)) + GROWTH_TOKENS
