"""The waiting room: turns wait here until the admission policy grants them a ticket. The policy decides, this only sleeps and wakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from admission.requests import AdmissionPolicy, AdmissionRequest, Grant, Refusal
from admission.tickets import Ticket
from agentserve.errors import Busy


class WaitingRoom:
    """Hands out tickets by `policy`. `clock` in seconds, rising only; the event loop's own clock fits.

    `waited` hears of every ticket how many seconds its turn has waited for it.
    """

    def __init__(self, policy: AdmissionPolicy, clock: Callable[[], float], waited: Callable[[float], None]) -> None:
        self._policy = policy
        self._clock = clock
        self._waited = waited
        self._waiting: dict[str, asyncio.Future[Ticket]] = {}
        self._num_tickets = 0
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return self._policy.num_waiting

    @property
    def num_tickets(self) -> int:
        """Tickets that are out."""
        return self._num_tickets

    @asynccontextmanager
    async def ticket(self, request: AdmissionRequest) -> AsyncIterator[Ticket]:
        """A ticket for the length of the `with` block, after a wait if there is no room. Raises Busy where the queue is full."""
        asked = self._clock()
        answer = self._policy.offer(request, asked)
        if isinstance(answer, Refusal):
            raise Busy(f"{answer.num_waiting} turns are waiting already; try again later", retry_after_seconds=answer.retry_after_seconds)
        ticket = answer.ticket if isinstance(answer, Grant) else await self._wait(request)
        self._num_tickets += 1
        try:
            self._waited(self._clock() - asked)
            yield ticket
        finally:
            self._num_tickets -= 1
            self._wake(self._policy.returned(ticket, self._clock()))

    async def _wait(self, request: AdmissionRequest) -> Ticket:
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._set_alarm()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted in the same moment
                self._wake(self._policy.returned(future.result(), self._clock()))
            else:
                del self._waiting[request.id]
                self._wake(self._policy.withdraw(request.id, self._clock()))
            raise

    def _wake(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._waiting.pop(grant.request_id).set_result(grant.ticket)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        due = self._policy.due_seconds
        if due is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._wake(self._policy.due(self._clock()))
