"""Tickets: what a turn may use of the engine, held by the task that runs the turn and returned when that task ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to run one turn. `charge_tokens` is what it adds to the KV cache: prompt tokens not resident yet, and expected output."""

    id: int
    session_id: str
    charge_tokens: int


class TicketBook:
    """The tickets that are out. A ticket returned twice, or never issued here, is a bug of ours and asserts."""

    __slots__ = ("_by_session", "_charged_tokens", "_next_id", "_tickets")

    def __init__(self) -> None:
        self._next_id = 0
        self._tickets: dict[int, Ticket] = {}
        self._by_session: dict[str, int] = {}
        self._charged_tokens = 0

    @property
    def num_tickets(self) -> int:
        return len(self._tickets)

    @property
    def charged_tokens(self) -> int:
        return self._charged_tokens

    @property
    def num_sessions(self) -> int:
        """Different sessions that hold a ticket."""
        return len(self._by_session)

    def issue(self, session_id: str, charge_tokens: int) -> Ticket:
        """Charge and hand out a ticket; whoever gets it owes one `give_back`."""
        assert charge_tokens >= 0
        ticket = Ticket(self._next_id, session_id, charge_tokens)
        self._next_id += 1
        self._tickets[ticket.id] = ticket
        self._by_session[session_id] = self._by_session.get(session_id, 0) + 1
        self._charged_tokens += charge_tokens
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        known = self._tickets.pop(ticket.id, None)
        assert known == ticket, f"ticket {ticket.id!r} is not out"
        self._charged_tokens -= ticket.charge_tokens
        left = self._by_session.pop(ticket.session_id) - 1
        if left:
            self._by_session[ticket.session_id] = left

    @contextmanager
    def charge(self, session_id: str, charge_tokens: int) -> Iterator[Ticket]:
        """A ticket for the length of a `with` block."""
        ticket = self.issue(session_id, charge_tokens)
        try:
            yield ticket
        finally:
            self.give_back(ticket)

    def check_integrity(self) -> None:
        """Assert that the sums are those of the tickets that are out."""
        assert self._charged_tokens == sum(ticket.charge_tokens for ticket in self._tickets.values())
        assert sum(self._by_session.values()) == len(self._tickets)
        assert all(count > 0 for count in self._by_session.values())
