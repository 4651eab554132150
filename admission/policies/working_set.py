"""working_set: sessions are let in, not turns; a member's turns start at once until it ends, idles too long or is expected back last.

Denning's working set with contexts for pages: what is in use is the footprint of every session that runs or has been idle for less than
`tau_seconds`. Others wait before their turn starts, the one with the longest resident prefix in front. Where members outgrow the budget,
the idle one that is expected back last leaves, never one that runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from admission.choice import Knob
from admission.policies.rule import BudgetParameters, Conditions, OpenRule, Rule, by_prefix
from admission.policies.trimming import Trimming
from admission.requests import AdmissionRequest

_CAP_MARGIN = 1.1
"""A gap that was capped ends milliseconds after the cap: whoever leaves at the cap itself loses those that were about to return."""


@dataclass(frozen=True, slots=True)
class WorkingSetParameters(BudgetParameters):
    tau_seconds: Annotated[float, Knob(1, 86_400, "idle time after which a member leaves; at least 1.1 of a replay's cap", log=True)] = (
        330.0
    )
    ageing_tokens_per_second: Annotated[float, Knob(1, 1_000_000, "of resident prefix that a second of waiting counts as", log=True)] = (
        3000.0
    )
    trim_step: Annotated[float, Knob(0, 0.1, "change of the target in a minute, by what members miss; 0: it stays")] = 0.0
    horizon_seconds: Annotated[float, Knob(1, 86_400, "how far ahead returns are told apart when a member must leave", log=True)] = 600.0


def working_set(parameters: WorkingSetParameters, conditions: Conditions) -> Rule:
    return _WorkingSet(parameters, conditions)


@dataclass(frozen=True, slots=True)
class _Idle:
    tokens: int
    since: float


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
        self._num_running: dict[str, int] = {}
        self._over: set[str] = set()
        """Sessions that ended while they ran."""
        self._set_budget()

    def _set_budget(self) -> None:
        self.share = self._trimming.share
        self.budget_tokens = self._conditions.budget_tokens(self._parameters, self.share)

    @property
    def num_members(self) -> int:  # type: ignore[override]  # the base has none
        return len(self._idle) + len(self._num_running)

    @property
    def due_seconds(self) -> float | None:  # type: ignore[override]  # the base has none
        longest = next(iter(self._idle.values()), None)
        return None if longest is None else longest.since + self._tau_seconds

    def rank(self, request: AdmissionRequest, asked: float) -> float:
        return by_prefix(request, asked, self._parameters.ageing_tokens_per_second)

    def is_member(self, session_id: str) -> bool:
        return session_id in self._idle or session_id in self._num_running

    def granted(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        self._leave(request.session_id)
        self._over.discard(request.session_id)
        self._num_running[request.session_id] = self._num_running.get(request.session_id, 0) + 1
        self._shrink(running_tokens, now)

    def returned(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        session_id = request.session_id
        left = self._num_running.pop(session_id) - 1
        if left:
            self._num_running[session_id] = left
        elif session_id in self._over:
            self._over.remove(session_id)
        else:
            self._idle[session_id] = _Idle(request.footprint_tokens, now)
            self.idle_tokens += request.footprint_tokens
            self._shrink(running_tokens, now)

    def answered(self, is_member: bool, num_prompt_tokens: int, num_avoidable_tokens: int, has_waiting: bool, now: float) -> None:
        if is_member:
            self._trimming.answered(num_prompt_tokens, num_avoidable_tokens, has_waiting, now)
            self._set_budget()

    def session_ended(self, session_id: str) -> None:
        self._leave(session_id)
        if session_id in self._num_running:
            self._over.add(session_id)

    def due(self, now: float) -> None:
        while (due := self.due_seconds) is not None and due <= now:
            self._leave(next(iter(self._idle)))

    def _leave(self, session_id: str) -> None:
        idle = self._idle.pop(session_id, None)
        if idle is not None:
            self.idle_tokens -= idle.tokens

    def _shrink(self, running_tokens: int, now: float) -> None:
        """Idle members leave until the rest fits, whoever is expected back last first."""
        if self._idle and running_tokens + self.idle_tokens > self.budget_tokens:
            order = sorted(self._idle, key=lambda session_id: self._back_in(session_id, now))
            while order and running_tokens + self.idle_tokens > self.budget_tokens:
                self._leave(order.pop())

    def _back_in(self, session_id: str, now: float) -> tuple[float, float]:
        """Expected seconds until it is back; without an outlook, and of equals, the longest idle counts as the last."""
        idle_seconds = now - self._idle[session_id].since
        outlook = self._conditions.outlook
        wait = math.inf if outlook is None else outlook.seconds_to_return(session_id, now, self._parameters.horizon_seconds)
        return wait, idle_seconds
