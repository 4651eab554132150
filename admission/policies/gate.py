"""The gate in front of the engine: hands out tickets by a rule, which may be changed while turns run and wait.

A turn starts while what is in use is below the budget, whatever its own size: so the budget is exceeded by one request at most, and a
large session waits no longer than a small one and blocks nobody. Members need room among running turns only. Whoever has waited for nine
tenths of `hold_seconds` goes before all others, past everything but the running turns' own budget and their number; the last tenth is for
these to make room.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from admission.policies.line import Line, TenantShares
from admission.policies.rule import Rule
from admission.requests import AdmissionRequest, AdmissionState, Answer, Grant, Limits, Refusal, Wait, Waiting
from admission.tickets import Ticket, TicketBook

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
_NUM_RETURNS = 32
_HELD_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class _Running:
    request: AdmissionRequest
    is_member: bool
    """It was one when it asked."""


class Gate:
    """An `AdmissionPolicy` for any rule."""

    def __init__(self, book: TicketBook, limits: Limits, rule: Rule) -> None:
        self._book = book
        self._limits = limits
        self._rule = rule
        self._line = Line()
        self._shares = TenantShares(rule.quantum_tokens)
        self._running: dict[int, _Running] = {}
        self._running_tokens = 0
        self._cold: set[int] = set()
        """Tickets of cold prefills that are under way."""
        self._returns: deque[float] = deque(maxlen=_NUM_RETURNS)
        """When the last tickets came back: the pace that `Refusal.retry_after_seconds` follows."""
        self._left_room: float | None = None
        """When an offer was granted while others waited: for its growth members may have left, and `offer` grants to nobody else."""

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def due_seconds(self) -> float | None:
        oldest = self._line.oldest
        if oldest is None:
            return None
        held = self._held_until(oldest)
        # Without a slot it waits for a return, not for time.
        times = [self._rule.due_seconds, held if self._has_slot and held < math.inf else None, self._left_room]
        return min((time for time in times if time is not None), default=None)

    def offer(self, request: AdmissionRequest, now: float) -> Answer:
        assert request.id not in self._line
        entry = self._entry(request, now)
        if self._may_start(entry):
            self._left_room = now
            return self._grant(entry, now)
        num_waiting = len(self._line)
        if self._limits.max_waiting is not None and num_waiting >= self._limits.max_waiting:
            return Refusal(self._retry_after_seconds(now), num_waiting)
        self._line.add(entry, self._rule.rank(request, now))
        return Wait(num_ahead=num_waiting)

    def prefilled(self, ticket: Ticket, now: float) -> list[Grant]:
        if ticket.id not in self._cold:
            return []
        self._cold.remove(ticket.id)
        return self._grant_waiting(now)

    def answered(self, ticket: Ticket, num_prompt_tokens: int, num_avoidable_tokens: int, now: float) -> list[Grant]:
        is_member = self._running[ticket.id].is_member
        self._rule.answered(is_member, num_prompt_tokens, num_avoidable_tokens, bool(len(self._line)), now)
        return self._grant_waiting(now)

    def returned(self, ticket: Ticket, now: float) -> list[Grant]:
        self._book.give_back(ticket)
        running = self._running.pop(ticket.id)
        self._cold.discard(ticket.id)
        self._running_tokens -= running.request.footprint_tokens
        self._rule.returned(running.request, self._running_tokens, now)
        self._returns.append(now)
        return self._grant_waiting(now)

    def withdraw(self, request_id: str, now: float) -> list[Grant]:
        self._line.remove(request_id)
        return self._grant_waiting(now)

    def session_ended(self, session_id: str, now: float) -> list[Grant]:
        self._rule.session_ended(session_id)
        return self._grant_waiting(now)

    def due(self, now: float) -> list[Grant]:
        self._rule.due(now)
        return self._grant_waiting(now)

    def change_rule(self, rule: Rule, now: float) -> list[Grant]:
        """Go on by another rule: tickets stay out, idle sessions keep their places where it has any, and turns stay in the queue and find
        their order in it anew. Changes state."""
        for place in self._rule.places():
            rule.keep(place)
        self._rule = rule
        self._shares = TenantShares(rule.quantum_tokens)
        running_tokens = 0
        for running in self._running.values():
            running_tokens += running.request.footprint_tokens
            rule.granted(running.request, running_tokens, now)
        waiting, self._line = list(self._line), Line()
        for entry in waiting:
            self._line.add(self._entry(entry.request, entry.asked_seconds), rule.rank(entry.request, entry.asked_seconds))
        return self._grant_waiting(now)

    def state(self) -> AdmissionState:
        rule = self._rule
        return AdmissionState(
            budget_tokens=None if rule.budget_tokens == math.inf else rule.budget_tokens,
            in_use_tokens=self._running_tokens + rule.idle_tokens,
            running_tokens=self._running_tokens,
            num_members=self._book.num_sessions if rule.num_members is None else rule.num_members,
            num_cold=len(self._cold),
            target_share=rule.share,
        )

    def is_member(self, session_id: str) -> bool:
        """Whether the session has a place, so that its turns go ahead."""
        return self._rule.is_member(session_id)

    def num_waiting_of(self, session_id: str) -> int:
        """Turns of the session that wait."""
        return self._line.num_waiting_of(session_id)

    def waiting(self) -> list[Waiting]:
        return list(self._line)

    def check_integrity(self) -> None:
        self._book.check_integrity()
        self._line.check_integrity()
        assert self._running_tokens == sum(running.request.footprint_tokens for running in self._running.values())
        assert self._cold <= set(self._running)
        assert self._rule.idle_tokens >= 0

    def _entry(self, request: AdmissionRequest, asked: float) -> Waiting:
        is_cold = 0 < self._rule.cold_tokens < request.uncached_tokens
        is_member = self._rule.is_member(request.session_id) or self._rule.passes(request)
        return Waiting(request, asked, is_member, is_cold)

    @property
    def _has_slot(self) -> bool:
        """Whether anybody at all may start."""
        if self._limits.max_running is not None and self._book.num_tickets >= self._limits.max_running:
            return False
        return not self._running or self._running_tokens < self._rule.budget_tokens

    @property
    def _has_room(self) -> bool:
        """Whether one that is no member may start, given a slot."""
        in_use = self._running_tokens + self._rule.idle_tokens
        return not in_use or in_use < self._rule.budget_tokens

    def _may_start(self, entry: Waiting) -> bool:
        # Overtakes none of its kind: while there is a slot and room, nobody waits but for the cold prefill under way.
        return self._has_slot and not (entry.is_cold and self._cold) and (entry.is_member or self._has_room)

    def _grant(self, entry: Waiting, now: float) -> Grant:
        request = entry.request
        ticket = self._book.issue(request.session_id, request.charge_tokens)
        self._running[ticket.id] = _Running(request, entry.is_member)
        self._running_tokens += request.footprint_tokens
        if entry.is_cold:
            self._cold.add(ticket.id)
        self._rule.granted(request, self._running_tokens, now)
        if self._line:
            self._shares.use(request.tenant, request.charge_tokens)
            if self._rule.is_member(request.session_id):
                self._line.promote(request.session_id)
        return Grant(request.id, ticket)

    def _grant_waiting(self, now: float) -> list[Grant]:
        self._left_room = None
        grants = []
        while (entry := self._next(now)) is not None:
            grants.append(self._grant(self._line.remove(entry.request.id), now))
        if not self._line:
            self._shares.clear()
        return grants

    def _next(self, now: float) -> Waiting | None:
        oldest = self._line.oldest
        if oldest is None or not self._has_slot:
            return None
        if now >= self._held_until(oldest):
            return oldest
        may_be_cold = not self._cold
        entry = self._line.first_member(cold=may_be_cold)
        if entry is None and self._has_room:
            entry = self._line.first_other(self._shares, cold=may_be_cold)
        return entry

    def _held_until(self, entry: Waiting) -> float:
        return entry.asked_seconds + _HELD_SHARE * self._rule.hold_seconds

    def _retry_after_seconds(self, now: float) -> float:
        """How long the queue takes to drain by half at the recent pace."""
        if not self._returns:
            return _MIN_RETRY_SECONDS
        seconds_a_turn = (now - self._returns[0]) / len(self._returns)
        return min(max(seconds_a_turn * len(self._line) / 2, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
