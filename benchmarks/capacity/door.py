"""The gate in front of the engine, for coroutines: the server's own admission policy without the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

from admission.lifecycle import Lifecycle
from admission.policies import ADMISSION_POLICIES
from admission.requests import AdmissionRequest, Grant, Limits, Refusal
from admission.tickets import Ticket, TicketBook
from benchmarks.capacity.script import GAP_CAP_SECONDS, TIME_SCALE


class Door:
    """Turns pass by working_set, or all at once where `parameters` is None."""

    def __init__(
        self, parameters: Mapping[str, float] | None, capacity_tokens: int, lifecycle: Lifecycle, clock: Callable[[], float]
    ) -> None:
        self._book = TicketBook()
        self._clock = clock
        self._waiting: dict[str, asyncio.Future[Ticket]] = {}
        limits = Limits(capacity_tokens=capacity_tokens, longest_idle_seconds=GAP_CAP_SECONDS / TIME_SCALE)
        name = "fcfs" if parameters is None else "working_set"
        self._gate = ADMISSION_POLICIES[name](self._book, limits, parameters or {}, lifecycle)

    @property
    def num_tickets(self) -> int:
        """That are out; zero when no turn runs."""
        return self._book.num_tickets

    @asynccontextmanager
    async def ticket(self, request: AdmissionRequest) -> AsyncIterator[float]:
        """A ticket for the length of the `with` block; how many seconds it was waited for."""
        asked = self._clock()
        answer = self._gate.offer(request, asked)
        assert not isinstance(answer, Refusal)  # the queue has no limit here
        ticket = answer.ticket if isinstance(answer, Grant) else await self._wait(request.id)
        try:
            yield self._clock() - asked
        finally:
            self._wake(self._gate.returned(ticket, self._clock()))

    def session_ended(self, session_id: str) -> None:
        self._wake(self._gate.session_ended(session_id, self._clock()))

    def tick(self) -> None:
        """Time has passed."""
        self._wake(self._gate.due(self._clock()))

    async def _wait(self, request_id: str) -> Ticket:
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted in the same moment
                self._wake(self._gate.returned(future.result(), self._clock()))
            else:
                del self._waiting[request_id]
                self._wake(self._gate.withdraw(request_id, self._clock()))
            raise

    def _wake(self, grants: Iterable[Grant]) -> None:
        for grant in grants:
            self._waiting.pop(grant.request_id).set_result(grant.ticket)
