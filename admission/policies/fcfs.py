"""First come, first served: what vLLM does. A turn starts at once unless the configured number is running; then it queues in order."""

from __future__ import annotations

from collections import deque

from admission.requests import AdmissionRequest, Answer, Grant, Limits, Refusal, Wait
from admission.tickets import Ticket, TicketBook

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
_NUM_RETURNS = 32


class FirstComeFirstServed:
    """Charges are booked but decide nothing: the engine queues and preempts by itself."""

    due_seconds: float | None = None

    def __init__(self, book: TicketBook, limits: Limits) -> None:
        self._book = book
        self._limits = limits
        self._waiting: dict[str, AdmissionRequest] = {}
        self._returns: deque[float] = deque(maxlen=_NUM_RETURNS)
        """When the last tickets came back: the pace that `Refusal.retry_after_seconds` follows."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offer(self, request: AdmissionRequest, now: float) -> Answer:
        assert request.id not in self._waiting
        if self._has_room():  # then nobody waits: room that a return leaves is granted at once
            return self._grant(request)
        num_waiting = len(self._waiting)
        if self._limits.max_waiting is not None and num_waiting >= self._limits.max_waiting:
            return Refusal(self._retry_after_seconds(now), num_waiting)
        self._waiting[request.id] = request
        return Wait(num_ahead=num_waiting)

    def returned(self, ticket: Ticket, now: float) -> list[Grant]:
        self._book.give_back(ticket)
        self._returns.append(now)
        return self._grant_waiting()

    def withdraw(self, request_id: str, now: float) -> list[Grant]:
        request = self._waiting.pop(request_id, None)
        assert request is not None, f"request {request_id!r} does not wait"
        return []

    def due(self, now: float) -> list[Grant]:
        return []

    def _has_room(self) -> bool:
        return self._limits.max_running is None or self._book.num_tickets < self._limits.max_running

    def _grant(self, request: AdmissionRequest) -> Grant:
        return Grant(request.id, self._book.issue(request.session_id, request.charge_tokens))

    def _grant_waiting(self) -> list[Grant]:
        grants = []
        while self._waiting and self._has_room():
            grants.append(self._grant(self._waiting.pop(next(iter(self._waiting)))))
        return grants

    def _retry_after_seconds(self, now: float) -> float:
        """How long the queue takes to drain by half at the recent pace."""
        if not self._returns:
            return _MIN_RETRY_SECONDS
        seconds_a_turn = (now - self._returns[0]) / len(self._returns)
        return min(max(seconds_a_turn * len(self._waiting) / 2, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
