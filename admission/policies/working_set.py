"""working_set: sessions are let in, not turns; a member's turns start at once until it ends, idles too long or is expected back last.

Denning's working set with contexts for pages: what is in use is the footprint of every session that runs or has been idle for less than
`tau_seconds`. Others wait before their turn starts, the one with the longest resident prefix in front. Where members outgrow the budget by
`over_commit`, or by the largest of them, the idle one that is expected back last leaves, never one that runs. Without that margin each
newcomer would push a member out, nobody would ever wait, and everybody would miss. Who has lost its place but not its blocks passes too:
letting it in costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from admission.choice import Knob
from admission.policies.rule import BudgetParameters, Conditions, OpenRule, Place, Rule, by_prefix
from admission.policies.trimming import Trimming
from admission.requests import AdmissionRequest

_CAP_MARGIN = 1.1
"""A gap that was capped ends milliseconds after the cap: whoever leaves at the cap itself loses those that were about to return."""


@dataclass(frozen=True, slots=True)
class WorkingSetParameters(BudgetParameters):
    over_commit: Annotated[
        float, Knob(0, 1, "of the KV cache beyond the target, or else the largest member, before one must leave; 0: nothing")
    ] = 0.1
    tau_seconds: Annotated[float, Knob(1, 86_400, "idle time after which a member leaves; at least 1.1 of a replay's cap", log=True)] = (
        330.0
    )
    ageing_tokens_per_second: Annotated[float, Knob(1, 1_000_000, "of resident prefix that a second of waiting counts as", log=True)] = (
        3000.0
    )
    resident_share: Annotated[float, Knob(0.1, 1.01, "of a prompt that is cached, with which it passes as a member's; above 1: never")] = (
        0.8
    )
    trim_step: Annotated[float, Knob(0, 0.1, "change of the target in a minute, by what members miss; 0: it stays")] = 0.0
    horizon_seconds: Annotated[float, Knob(1, 86_400, "how far ahead returns are told apart when a member must leave", log=True)] = 600.0


def working_set(parameters: WorkingSetParameters, conditions: Conditions) -> Rule:
    return _WorkingSet(parameters, conditions)


@dataclass(frozen=True, slots=True)
class _Idle:
    tokens: int
    since: float


@dataclass(slots=True)
class _Busy:
    num_running: int
    tokens: int
    """Of its context, as its latest turn had it; 0 before the first is over."""
    is_over: bool = False
    """It ended while it ran."""


class _WorkingSet(OpenRule):
    def __init__(self, parameters: WorkingSetParameters, conditions: Conditions) -> None:
        self.cold_tokens = parameters.cold_tokens
        self.hold_seconds = parameters.hold_seconds
        self.quantum_tokens = parameters.quantum_tokens
        self._parameters = parameters
        self._conditions = conditions
        cap = conditions.limits.longest_idle_seconds
        self._tau_seconds = parameters.tau_seconds if cap is None else max(parameters.tau_seconds, _CAP_MARGIN * cap)
        self._trimming = Trimming(parameters.alpha, parameters.trim_step)
        self._idle: dict[str, _Idle] = {}
        """Members that do not run, the longest idle first."""
        self._busy: dict[str, _Busy] = {}
        """Members that run."""
        self._set_budget()

    def _set_budget(self) -> None:
        self.share = self._trimming.share
        self.budget_tokens = self._conditions.budget_tokens(self._parameters, self.share)
        self._most_tokens = self._conditions.budget_tokens(self._parameters, self.share + self._parameters.over_commit)

    @property
    def num_members(self) -> int:  # type: ignore[override]  # the base has none
        return len(self._idle) + len(self._busy)

    @property
    def due_seconds(self) -> float | None:  # type: ignore[override]  # the base has none
        longest = next(iter(self._idle.values()), None)
        return None if longest is None else longest.since + self._tau_seconds

    def rank(self, request: AdmissionRequest, asked: float) -> float:
        return by_prefix(request, asked, self._parameters.ageing_tokens_per_second)

    def is_member(self, session_id: str) -> bool:
        return session_id in self._idle or session_id in self._busy

    def passes(self, request: AdmissionRequest) -> bool:
        prompt_tokens = request.resident_tokens + request.uncached_tokens
        return prompt_tokens > 0 and request.resident_tokens >= self._parameters.resident_share * prompt_tokens

    def granted(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        tokens = self._leave(request.session_id)
        busy = self._busy.setdefault(request.session_id, _Busy(0, tokens))
        busy.num_running += 1
        busy.is_over = False
        self._shrink(running_tokens, request.footprint_tokens, now)

    def returned(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        session_id = request.session_id
        busy = self._busy[session_id]
        busy.num_running -= 1
        if not request.is_aside or not busy.tokens:
            busy.tokens = request.footprint_tokens
        if busy.num_running:
            return
        del self._busy[session_id]
        if not busy.is_over:
            self._idle[session_id] = _Idle(busy.tokens, now)
            self.idle_tokens += busy.tokens
            self._shrink(running_tokens, request.footprint_tokens, now)

    def answered(self, is_member: bool, num_prompt_tokens: int, num_avoidable_tokens: int, has_waiting: bool, now: float) -> None:
        if is_member:
            self._trimming.answered(num_prompt_tokens, num_avoidable_tokens, has_waiting, now)
            self._set_budget()

    def session_ended(self, session_id: str) -> None:
        self._leave(session_id)
        if session_id in self._busy:
            self._busy[session_id].is_over = True

    def due(self, now: float) -> None:
        while (due := self.due_seconds) is not None and due <= now:
            self._leave(next(iter(self._idle)))

    def places(self) -> Iterable[Place]:
        return [Place(session_id, idle.tokens, idle.since) for session_id, idle in self._idle.items()]

    def keep(self, place: Place) -> None:
        self._idle[place.session_id] = _Idle(place.tokens, place.since)
        self.idle_tokens += place.tokens

    def _leave(self, session_id: str) -> int:
        """What it held while it was idle."""
        idle = self._idle.pop(session_id, None)
        tokens = 0 if idle is None else idle.tokens
        self.idle_tokens -= tokens
        return tokens

    def _shrink(self, running_tokens: int, tokens: int, now: float) -> None:
        """Idle members leave until the rest is within the margin, whoever is expected back last first.

        The margin has room for the largest, `tokens` of the turn that has started or ended among them: the one that was let in last may
        stand beyond the target with all of its context, and where sessions are large beside the cache somebody would else leave for every
        one that comes.
        """
        if not self._idle or running_tokens + self.idle_tokens <= self._most_tokens:
            return
        sizes = [tokens, *(idle.tokens for idle in self._idle.values()), *(busy.tokens for busy in self._busy.values())]
        largest = max(sizes) if self._parameters.over_commit else 0
        most = max(self._most_tokens, self.budget_tokens + largest)
        order = sorted(self._idle, key=lambda session_id: self._back_in(session_id, now))
        while order and running_tokens + self.idle_tokens > most:
            self._leave(order.pop())

    def _back_in(self, session_id: str, now: float) -> tuple[float, float]:
        """Expected seconds until it is back; without an outlook, and of equals, the longest idle counts as the last."""
        idle_seconds = now - self._idle[session_id].since
        outlook = self._conditions.outlook
        wait = math.inf if outlook is None else outlook.seconds_to_return(session_id, now, self._parameters.horizon_seconds)
        return wait, idle_seconds
