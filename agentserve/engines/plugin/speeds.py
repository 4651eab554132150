"""Whether it is quicker to load a block from the tier or to compute it, by what loading and computing have taken lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

_WEIGHT: Final = 0.2
"""Of the newest observation."""
_LEAST_TOKENS: Final = 256
"""Steps with fewer tokens say more about their fixed cost than about a prompt's tokens."""
_PROBE_EVERY: Final = 16
"""After so many loads that were not worth it one is made all the same, to measure again."""


class Speeds:
    """`clock`: seconds. Nothing is known at first, and what is not known is loaded."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds_per_loaded_token: float | None = None
        self.seconds_per_stored_token: float | None = None
        self.seconds_per_computed_token: float | None = None
        self.num_declined = 0
        """Loads that were not made, because computing was quicker."""
        self._clock = clock
        self._begun: deque[tuple[int, float, int]] = deque()
        """Steps under way: the number of each, when it was sent, and its tokens."""
        self._ended = 0.0

    def step_sent(self, number: int, num_tokens: int) -> None:
        """The workers get a step of so many tokens to compute. Changes state."""
        self._begun.append((number, self._clock(), num_tokens))

    def step_done(
        self, number: int, num_loaded_tokens: int, load_seconds: float, num_stored_tokens: int = 0, store_seconds: float = 0.0
    ) -> None:
        """That step is over, and those before it; in it so much was loaded and stored, before it computed. Changes state."""
        while self._begun and self._begun[0][0] < number:
            self._begun.popleft()  # vLLM drops what workers say of a step in which nothing happened
        if not self._begun:
            return
        _, sent, num_tokens = self._begun.popleft()
        now = self._clock()
        seconds = now - max(sent, self._ended) - load_seconds - store_seconds
        self._ended = now
        if num_tokens >= _LEAST_TOKENS:
            self.seconds_per_computed_token = _mean(self.seconds_per_computed_token, max(seconds, 0.0) / num_tokens)
        if num_loaded_tokens:
            self.seconds_per_loaded_token = _mean(self.seconds_per_loaded_token, load_seconds / num_loaded_tokens)
        if num_stored_tokens:
            self.seconds_per_stored_token = _mean(self.seconds_per_stored_token, store_seconds / num_stored_tokens)

    def is_worth_loading(self) -> bool:
        """Whether a load is expected to be quicker. Changes state: it counts those that are not."""
        if self.seconds_per_loaded_token is None or self.seconds_per_computed_token is None:
            return True
        if self.seconds_per_loaded_token < self.seconds_per_computed_token:
            return True
        self.num_declined += 1
        return self.num_declined % _PROBE_EVERY == 0


def _mean(known: float | None, observed: float) -> float:
    return observed if known is None else known + _WEIGHT * (observed - known)
