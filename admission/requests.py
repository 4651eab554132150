"""What an admission policy is asked and what it answers. Tokens of KV cache; `now` is any clock that only rises, in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from admission.tickets import Ticket


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """One turn that wants to start. `id` is unique among those that wait or run."""

    id: str
    session_id: str
    charge_tokens: int
    """What the turn adds: prompt tokens that are not resident, and expected output."""
    resident_tokens: int = 0
    """Prompt tokens that are resident already; with the charge, the session's footprint."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a policy may hand out. None: no limit, or not known."""

    max_running: int | None = None
    """Turns at the engine at once."""
    max_waiting: int | None = None
    """Turns in the queue; past it a turn is refused."""
    capacity_tokens: int | None = None
    """The engine's KV cache."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Request `request_id` may start now. Whoever receives this owes one `AdmissionPolicy.returned(ticket)`."""

    request_id: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Wait:
    """The request is queued behind `num_ahead` others; its grant comes out of a later call."""

    num_ahead: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The queue is full; nothing is kept of the request."""

    retry_after_seconds: float
    num_waiting: int


Answer: TypeAlias = "Grant | Wait | Refusal"


class AdmissionPolicy(Protocol):
    """Decides which turn may start. Plain and synchronous: who waits, sleeps and cancels is the caller.

    Each request ends in exactly one of: refused by `offer`, given up by `withdraw` while it waits, or granted and then `returned`.
    Every call that changes state may grant to others; grants come in the order in which they were made.
    """

    @property
    def num_waiting(self) -> int: ...

    @property
    def due_seconds(self) -> float | None:
        """When `due` wants to be called next, on the clock of `now`; None while nothing waits for time to pass."""
        ...

    def offer(self, request: AdmissionRequest, now: float) -> Answer:
        """Ask for a ticket. Changes state unless refused."""
        ...

    def returned(self, ticket: Ticket, now: float) -> list[Grant]:
        """The turn that held `ticket` has ended, however it ended. Exactly once a ticket; a second time asserts."""
        ...

    def withdraw(self, request_id: str, now: float) -> list[Grant]:
        """The client of a waiting request has gone. Asserts that it was waiting."""
        ...

    def due(self, now: float) -> list[Grant]:
        """Time has passed: ageing and bounded holds may let somebody in."""
        ...
