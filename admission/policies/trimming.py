"""Slow trimming of a budget by what members missed although it could have been kept.

Only members count: a session that was held back finds its blocks gone, and whoever takes that for congestion holds back more, until
hardly anybody runs. A step a minute at most, none within a band, up only where somebody waits.
"""

from __future__ import annotations

_STEP_SECONDS = 60.0
_LEAST_PROMPT_TOKENS = 1000
_HIGH_SHARE = 0.02
_LOW_SHARE = 0.005


class Trimming:
    """`share` of the capacity, starting at `share` and moving by up to `step` a minute between `low` and `high`. 0: it stays."""

    __slots__ = ("_avoidable_tokens", "_has_waited", "_high", "_low", "_prompt_tokens", "_since", "_step", "share")

    def __init__(self, share: float, step: float, *, low: float = 0.7, high: float = 1.05) -> None:
        self.share = share
        self._step = step
        self._low = min(low, share)
        self._high = max(high, share)
        self._since: float | None = None
        self._prompt_tokens = self._avoidable_tokens = 0
        self._has_waited = False

    def answered(self, num_prompt_tokens: int, num_avoidable_tokens: int, has_waiting: bool, now: float) -> None:
        """A member's turn has missed so much of its prompt. Changes state."""
        if not self._step:
            return
        if self._since is None:
            self._since = now
        self._prompt_tokens += num_prompt_tokens
        self._avoidable_tokens += num_avoidable_tokens
        self._has_waited |= has_waiting
        if now - self._since >= _STEP_SECONDS and self._prompt_tokens >= _LEAST_PROMPT_TOKENS:
            missed = self._avoidable_tokens / self._prompt_tokens
            if missed > _HIGH_SHARE:
                self.share = max(self.share - self._step, self._low)
            elif missed < _LOW_SHARE and self._has_waited:
                self.share = min(self.share + self._step, self._high)
            self._since, self._prompt_tokens, self._avoidable_tokens, self._has_waited = now, 0, 0, False
