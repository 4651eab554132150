"""The waiting room: turns wait here until the admission policy grants them a ticket. The policy decides, this only sleeps and wakes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from admission.policies.gate import Gate
from admission.policies.rule import Rule
from admission.requests import AdmissionRequest, AdmissionState, Grant, Limits, Refusal, Waiting
from admission.tickets import Ticket
from agentserve.errors import Busy

_CANCELLED_RETRY_SECONDS = 30.0


class WaitingRoom:
    """Hands out tickets by `policy`, which was made for `limits`. `clock` in seconds, rising only; the event loop's own clock fits.

    `waited` hears of every ticket how many seconds its turn has waited for it.
    """

    def __init__(self, policy: Gate, limits: Limits, clock: Callable[[], float], waited: Callable[[float], None]) -> None:
        self._policy = policy
        self.limits = limits
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

    def state(self) -> AdmissionState:
        """How full it is."""
        return self._policy.state()

    def waiting(self) -> list[tuple[Waiting, float]]:
        """Who waits, and for how many seconds, whoever came first first."""
        now = self._clock()
        return [(entry, now - entry.asked_seconds) for entry in self._policy.waiting()]

    def is_member(self, session_id: str) -> bool:
        """Whether the session has a place, so that its turns go ahead."""
        return self._policy.is_member(session_id)

    def num_waiting_of(self, session_id: str) -> int:
        """Turns of the session that wait."""
        return self._policy.num_waiting_of(session_id)

    @asynccontextmanager
    async def ticket(self, request: AdmissionRequest, waits: Callable[[], None] = lambda: None) -> AsyncIterator[Ticket]:
        """A ticket for the length of the `with` block, after a wait if there is no room. Raises Busy where the queue is full.

        `waits` is called where it has to wait.
        """
        asked = self._clock()
        answer = self._policy.offer(request, asked)
        if isinstance(answer, Refusal):
            raise Busy(f"{answer.num_waiting} turns are waiting already; try again later", retry_after_seconds=answer.retry_after_seconds)
        if isinstance(answer, Grant):
            ticket = answer.ticket
            self._set_alarm()
        else:
            waits()
            ticket = await self._wait(request)
        self._num_tickets += 1
        try:
            self._waited(self._clock() - asked)
            yield ticket
        finally:
            self._num_tickets -= 1
            self._wake(self._policy.returned(ticket, self._clock()))

    def prefilled(self, ticket: Ticket) -> None:
        """The turn has its first token."""
        self._wake(self._policy.prefilled(ticket, self._clock()))

    def answered(self, ticket: Ticket, num_prompt_tokens: int, num_avoidable_tokens: int) -> None:
        """The engine has said what the turn missed, and how much of that it could have had."""
        self._wake(self._policy.answered(ticket, num_prompt_tokens, num_avoidable_tokens, self._clock()))

    def session_ended(self, session_id: str) -> None:
        """The session is over: its place is free."""
        self._wake(self._policy.session_ended(session_id, self._clock()))

    def change_rule(self, rule: Rule) -> None:
        """Go on by another rule. Tickets stay out, and who waits goes on waiting."""
        self._wake(self._policy.change_rule(rule, self._clock()))

    def cancel(self, request_id: str) -> bool:
        """Send a waiting turn away; False if it does not wait."""
        future = self._waiting.pop(request_id, None)
        if future is None:
            return False
        if not future.cancelled():
            message = "an operator has cancelled this turn; try again later"
            future.set_exception(Busy(message, retry_after_seconds=_CANCELLED_RETRY_SECONDS))
        self._wake(self._policy.withdraw(request_id, self._clock()))
        return True

    async def _wait(self, request: AdmissionRequest) -> Ticket:
        future: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._set_alarm()
        try:
            return await future
        except asyncio.CancelledError:
            if request.id in self._waiting:
                del self._waiting[request.id]
                self._wake(self._policy.withdraw(request.id, self._clock()))
            elif not future.cancelled() and future.exception() is None:  # granted in the same moment
                self._wake(self._policy.returned(future.result(), self._clock()))
            raise

    def _wake(self, grants: Iterable[Grant]) -> None:
        woken = deque(grants)
        while woken:
            grant = woken.popleft()
            future = self._waiting.pop(grant.request_id)
            if future.cancelled():  # its client left in this moment, and its task has not run since
                woken.extend(self._policy.returned(grant.ticket, self._clock()))
            else:
                future.set_result(grant.ticket)
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
