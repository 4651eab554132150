"""The circuit breaker: while it is open, nobody asks the state store, so a store that is gone costs a turn nothing."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

MAX_TIMEOUTS = 3
"""Calls in a row without an answer in time that open the breaker; one may be a moment of load."""


class Failure(StrEnum):
    """Why a call to the state store gave nothing."""

    REFUSED = "refused"
    """No connection, or a server that may not be written to."""
    TIMEOUT = "timeout"
    """No answer in time."""
    BUSY = "busy"
    """All connections were taken; the store may be well."""
    ERROR = "error"
    """The store answered this call with an error."""
    DAMAGED = "damaged"
    """What was stored cannot be read, or is not what was asked for."""


class Breaker:
    """Closed until the store refuses a call or lets `MAX_TIMEOUTS` in a row time out, then open until a probe succeeds.

    `changed` hears of each change: whether it is open now, and why.
    """

    def __init__(self, changed: Callable[[bool, str], None]) -> None:
        self._changed = changed
        self._num_timeouts = 0
        self.is_open = False

    def succeeded(self) -> None:
        """The store has answered."""
        self._num_timeouts = 0
        if self.is_open:
            self.is_open = False
            self._changed(False, "the store answers")

    def failed(self, failure: Failure, reason: str) -> None:
        """A call gave nothing. A busy pool and an error of one call say nothing about the store."""
        if failure is Failure.TIMEOUT:
            self._num_timeouts += 1
        if self.is_open:
            return
        if failure is Failure.REFUSED or self._num_timeouts >= MAX_TIMEOUTS:
            self.is_open = True
            self._changed(True, reason)
