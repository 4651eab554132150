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
    shared_tokens: int = 0
    """Of the resident ones, those that another session has too and is charged for."""
    reserve_tokens: int = 0
    """Of the charge, what is set aside for output and growth."""
    tenant: str | None = None
    is_aside: bool = False
    """A side request: its session's context is another, so that its size says nothing of the session."""

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the engine will compute."""
        return self.charge_tokens - self.reserve_tokens

    @property
    def footprint_tokens(self) -> int:
        """What the turn holds of the cache while it runs, and its session until it is evicted."""
        return self.charge_tokens + self.resident_tokens - self.shared_tokens


@dataclass(frozen=True, slots=True)
class Limits:
    """What a policy may hand out. None: no limit, or not known."""

    max_running: int | None = None
    """Turns at the engine at once."""
    max_waiting: int | None = None
    """Turns in the queue; past it a turn is refused."""
    capacity_tokens: int | None = None
    """The engine's KV cache."""
    tier_tokens: int | None = None
    """An exclusive offload tier behind it. One that holds what the GPU holds too adds nothing, and is None."""
    longest_idle_seconds: float | None = None
    """A replay's cap on idle times: no session is idle longer and comes back."""


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


@dataclass(frozen=True, slots=True)
class Waiting:
    """One turn in the queue."""

    request: AdmissionRequest
    asked_seconds: float
    is_member: bool
    """Its session was let in before and has not left since, or its blocks are still there: it goes ahead of others."""
    is_cold: bool
    """It waits for another cold prefill too."""


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """How full it is, in tokens. None: the engine's capacity is not known, or the policy does not count."""

    budget_tokens: float | None
    in_use_tokens: int
    """What counts against the budget: running turns, and idle members where the policy has members."""
    running_tokens: int
    num_members: int
    """Sessions that are let in, running or idle; where the policy has no members, those that run."""
    num_cold: int
    """Cold prefills that are under way."""
    target_share: float | None
    """The budget, of the capacity."""


class Outlook(Protocol):
    """What is known of sessions that are idle; `admission.lifecycle.Lifecycle` is one."""

    def seconds_to_return(self, session_id: str, now: float, horizon_seconds: float) -> float:
        """Mean seconds until the session is back, counted as at most the horizon; infinity for one that has ended."""
        ...


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

    def prefilled(self, ticket: Ticket, now: float) -> list[Grant]:
        """The turn has its first token: its prompt is computed. Changes state; a second time does nothing."""
        ...

    def answered(self, ticket: Ticket, num_prompt_tokens: int, num_avoidable_tokens: int, now: float) -> list[Grant]:
        """The engine has said what the turn missed. `num_avoidable_tokens`: had been computed before and were not in the cache any more.
        Changes state; between its grant and its `returned`."""
        ...

    def returned(self, ticket: Ticket, now: float) -> list[Grant]:
        """The turn that held `ticket` has ended, however it ended. Exactly once a ticket; a second time asserts."""
        ...

    def withdraw(self, request_id: str, now: float) -> list[Grant]:
        """The client of a waiting request has gone. Asserts that it was waiting."""
        ...

    def session_ended(self, session_id: str, now: float) -> list[Grant]:
        """The session is over, as was said or can be inferred. Changes state where the policy keeps a place for it."""
        ...

    def due(self, now: float) -> list[Grant]:
        """Time has passed: ageing and bounded holds may let somebody in."""
        ...

    def state(self) -> AdmissionState:
        """How full it is."""
        ...

    def waiting(self) -> list[Waiting]:
        """The queue, whoever came first first."""
        ...

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        ...
