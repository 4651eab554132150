"""What tells one admission policy from another: who goes first, how much may be in use, and whose place is kept. `Gate` does the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

from admission.choice import Knob
from admission.requests import AdmissionRequest, Limits, Outlook


@dataclass(frozen=True, slots=True)
class ColdParameters:
    """What every policy has."""

    cold_tokens: Annotated[float, Knob(0, 10_000_000, "uncached prompt tokens above which one prefill runs at a time; 0: any number")] = 0.0


@dataclass(frozen=True, slots=True)
class BudgetParameters(ColdParameters):
    """What every policy with a budget has."""

    alpha: Annotated[float, Knob(0.3, 1.5, "of the KV cache that may be in use")] = 0.9
    tier_share: Annotated[float, Knob(0, 1, "of an exclusive offload tier that counts as KV cache")] = 0.8
    hold_seconds: Annotated[float, Knob(1, 3600, "that a turn waits at most; near its end it goes first", log=True)] = 120.0
    quantum_tokens: Annotated[
        float, Knob(0, 100_000_000, "a waiting tenant may use before the others have their turn; 0: tenants are not told apart")
    ] = 500_000.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a policy is built for. `outlook`: what is known of idle sessions, where anything is."""

    limits: Limits
    outlook: Outlook | None = None

    def budget_tokens(self, parameters: BudgetParameters, share: float | None = None) -> float:
        """Tokens that may be in use; infinity where the capacity is not known. `share`: in place of `alpha`."""
        if self.limits.capacity_tokens is None:
            return math.inf
        room = self.limits.capacity_tokens + parameters.tier_share * (self.limits.tier_tokens or 0)
        return room * (parameters.alpha if share is None else share)


@dataclass(frozen=True, slots=True)
class Place:
    """Of a session that is idle since `since`, and held `tokens` then."""

    session_id: str
    tokens: int
    since: float


class Rule(Protocol):
    """Is told of what the gate does. All sizes are `footprint_tokens`."""

    cold_tokens: float
    hold_seconds: float
    quantum_tokens: float
    share: float | None
    """The budget, of the capacity; None without a budget."""

    @property
    def budget_tokens(self) -> float: ...

    @property
    def idle_tokens(self) -> int:
        """What is kept for sessions that do not run; counts against the budget."""
        ...

    @property
    def num_members(self) -> int | None:
        """Sessions that have a place; None where places are not kept."""
        ...

    @property
    def due_seconds(self) -> float | None:
        """When `due` makes room by itself."""
        ...

    def rank(self, request: AdmissionRequest, asked: float) -> float:
        """Its place among those that wait without being members, smallest first. Does not change while it waits."""
        ...

    def is_member(self, session_id: str) -> bool:
        """Whether its turns go ahead, whatever is in use by sessions that are idle."""
        ...

    def passes(self, request: AdmissionRequest) -> bool:
        """Whether this turn goes ahead though its session is no member."""
        ...

    def granted(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        """It runs; with it running turns hold `running_tokens`. Idle members leave where that is too much. Changes state."""
        ...

    def returned(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        """It runs no more. Changes state."""
        ...

    def answered(self, is_member: bool, num_prompt_tokens: int, num_avoidable_tokens: int, has_waiting: bool, now: float) -> None:
        """What a turn missed. Changes state."""
        ...

    def session_ended(self, session_id: str) -> None:
        """Its place is free. Changes state."""
        ...

    def due(self, now: float) -> None:
        """Time has passed. Changes state."""
        ...

    def places(self) -> Iterable[Place]:
        """Those of idle sessions, the longest idle first."""
        ...

    def keep(self, place: Place) -> None:
        """A place that another rule had given. Changes state where this one keeps places."""
        ...


class OpenRule:
    """No budget and no members: the base of rules that only order, and of those that only count what runs."""

    cold_tokens = 0.0
    hold_seconds = math.inf
    quantum_tokens = 0.0
    share: float | None = None
    budget_tokens: float = math.inf
    idle_tokens = 0
    num_members: int | None = None
    due_seconds: float | None = None

    def rank(self, request: AdmissionRequest, asked: float) -> float:
        return asked

    def is_member(self, session_id: str) -> bool:
        return False

    def passes(self, request: AdmissionRequest) -> bool:
        return False

    def granted(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        pass

    def returned(self, request: AdmissionRequest, running_tokens: int, now: float) -> None:
        pass

    def answered(self, is_member: bool, num_prompt_tokens: int, num_avoidable_tokens: int, has_waiting: bool, now: float) -> None:
        pass

    def session_ended(self, session_id: str) -> None:
        pass

    def due(self, now: float) -> None:
        pass

    def places(self) -> Iterable[Place]:
        return ()

    def keep(self, place: Place) -> None:
        pass


class BudgetRule(OpenRule):
    """Running turns hold at most the budget. Ranked by `rank`, default in order of arrival."""

    def __init__(
        self,
        parameters: BudgetParameters,
        conditions: Conditions,
        rank: Callable[[AdmissionRequest, float], float] | None = None,
    ) -> None:
        self.cold_tokens = parameters.cold_tokens
        self.hold_seconds = parameters.hold_seconds
        self.quantum_tokens = parameters.quantum_tokens
        self.share = parameters.alpha
        self.budget_tokens = conditions.budget_tokens(parameters)
        self._rank = rank

    def rank(self, request: AdmissionRequest, asked: float) -> float:
        return asked if self._rank is None else self._rank(request, asked)


def by_prefix(request: AdmissionRequest, asked: float, tokens_per_second: float) -> float:
    """Longest resident prefix first; a second of waiting counts as much as `tokens_per_second` of it."""
    return asked * tokens_per_second - request.resident_tokens
