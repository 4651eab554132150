"""When a session comes back: per return class a life table over log-spaced ages, a prior from recorded sessions and what is seen online.

Survival counts those that never come back, so `hazard` is already the hazard of the class times the chance that the session is alive.
Where a class has a level of `admission.last_turn`, the odds that its sessions never come back are multiplied by the level's factor.
Ages and answers are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import Knob
from admission.life_table import NUM_BINS, LifeTable, bin_of
from admission.return_class import lineage, parent_class, split_level, with_tenant
from admission.return_prior import LAST_TURN_ODDS, RETURN_PRIOR

_BACKING = 1.0
"""Idle times of its parent that are added to a recorded class, so that what a few records never showed is not impossible."""
_CAP_MARGIN = 1.03
"""Idle times that were capped end a little after the cap."""
_NEWS_SHARE = 1 / 32
"""A class is fitted again when so much of what it rests on is new: while little is known, after each observation."""
_DECAY_SHARE, _FADED_SHARE = 1 / 1000, 1 / 100
"""Of a half-life: counts are decayed in steps of the first, and every class is fitted again after the second."""


@dataclass(frozen=True, slots=True)
class ReturnParameters:
    prior_weight: Annotated[float, Knob(1, 1000, "idle times that the prior counts for in each class", log=True)] = 60.0
    tenant_weight: Annotated[float, Knob(1, 1000, "idle times that all tenants together count for in one tenant's class", log=True)] = 30.0
    half_life_seconds: Annotated[float, Knob(600, 2_592_000, "after which what was seen counts half", log=True)] = 86_400.0
    time_scale: Annotated[float, Knob(0.1, 1000, "how much faster than recorded the sessions run (a replay's)", log=True)] = 1.0
    longest_gap_seconds: float | None = None
    """A replay's cap on idle times, before time scaling: no session is idle for 3 % longer and comes back."""
    max_tenants: int = 64
    """Tenants with classes of their own; the least recently seen goes back to the common ones."""


class ReturnModel:
    """Learns when sessions of each class come back. Asking is O(1); now and then it fits a class again of which more has been seen.

    A class that was never seen and is not in the prior asks its parent (`root/tool:shell` → `root/tool` → `root/unknown`). A class of a
    tenant (`with_tenant`) leans on the same class of all tenants.
    """

    __slots__ = (
        "_cap_seconds",
        "_fitted",
        "_fitted_seconds",
        "_num_observed",
        "_parameters",
        "_prior",
        "_seen",
        "_seen_seconds",
        "_tenants",
    )

    def __init__(
        self, parameters: ReturnParameters | None = None, prior: Mapping[str, tuple[Sequence[float], float]] = RETURN_PRIOR
    ) -> None:
        """`prior`: class → (returned per bin, never returned)."""
        self._parameters = parameters or ReturnParameters()
        longest = self._parameters.longest_gap_seconds
        self._cap_seconds = math.inf if longest is None else _CAP_MARGIN * longest
        self._prior = {name: LifeTable(self._capped(returned), never) for name, (returned, never) in prior.items()}
        self._seen: dict[str, LifeTable] = {}
        self._seen_seconds: dict[str, float] = {}
        self._num_observed = 0
        self._fitted: dict[str, tuple[LifeTable, float]] = {}
        """By class: its table, and the number of observations from which on that is stale."""
        self._fitted_seconds = -math.inf
        self._tenants: dict[str, None] = {}

    def _capped(self, returned: Sequence[float]) -> list[float]:
        longest = self._parameters.longest_gap_seconds
        if longest is None:
            return list(returned)
        last = min(bin_of(longest), NUM_BINS - 1)
        return [*returned[:last], sum(returned[last:]), *[0.0] * (NUM_BINS - 1 - last)]

    def class_for(self, tenant: str | None, return_class: str, now: float) -> str:
        """The name under which a tenant's sessions of a class are learnt: its own while it is among the recently seen. Changes state."""
        if tenant is None:
            return return_class
        self._tenants.pop(tenant, None)
        self._tenants[tenant] = None
        if len(self._tenants) > self._parameters.max_tenants:
            self._drop_tenant(next(iter(self._tenants)))
        return with_tenant(return_class, tenant)

    def _drop_tenant(self, tenant: str) -> None:
        del self._tenants[tenant]
        ending = with_tenant("", tenant)
        for name in [name for name in self._seen if name.endswith(ending)]:
            del self._seen[name], self._seen_seconds[name]
        for name in [name for name in self._fitted if name.endswith(ending)]:
            del self._fitted[name]

    def came_back(self, return_class: str, idle_seconds: float, now: float) -> None:
        """A session of the class asked again after so long. Changes state."""
        for table in self._learn(return_class, now):
            table.returned[min(bin_of(self._age(idle_seconds)), NUM_BINS - 1)] += 1

    def never_came_back(self, return_class: str, now: float) -> None:
        """A session of the class is known to be over although nobody said so. Changes state."""
        for table in self._learn(return_class, now):
            table.num_never += 1

    def did_come_back(self, return_class: str, now: float) -> None:
        """A session that was counted as one that never came back has done so. Changes state."""
        for table in self._learn(return_class, now):
            table.num_never = max(0.0, table.num_never - 1)

    def left(self, return_class: str, idle_seconds: float, now: float) -> None:
        """A session of the class went out of sight after so long (its end was said, the server stopped). Changes state."""
        for table in self._learn(return_class, now):
            table.left[min(bin_of(self._age(idle_seconds)), NUM_BINS - 1)] += 1

    def _learn(self, return_class: str, now: float) -> list[LifeTable]:
        tables = []
        for name in lineage(split_level(return_class)[0]):
            table = self._seen.setdefault(name, LifeTable())
            half_lives = (now - self._seen_seconds.setdefault(name, now)) / self._parameters.half_life_seconds
            if half_lives > _DECAY_SHARE:
                table.scale(0.5**half_lives)
                self._seen_seconds[name] = now
            tables.append(table)
        # Of all classes together: what leans on a class that has changed is stale too, its tenants' and its children.
        self._num_observed += 1
        if now - self._fitted_seconds > _FADED_SHARE * self._parameters.half_life_seconds:
            self._fitted.clear()
            self._fitted_seconds = now
        return tables

    def _is_past_cap(self, idle_seconds: float) -> bool:
        return self._age(idle_seconds) > self._cap_seconds

    def _age(self, seconds: float) -> float:
        return seconds * self._parameters.time_scale

    def _table(self, return_class: str) -> LifeTable:
        known = self._fitted.get(return_class)
        if known is not None and self._num_observed < known[1]:
            return known[0]
        name, level = split_level(return_class)
        table = self._counts(name)
        stale = self._num_observed + max(table.total * _NEWS_SHARE, 1.0)
        if level is not None:
            table.num_never *= LAST_TURN_ODDS[level]
        table.fit()
        self._fitted[return_class] = (table, stale)
        return table

    def _counts(self, return_class: str) -> LifeTable:
        counts = LifeTable()
        seen = self._seen.get(return_class)
        if seen is not None:
            counts.add(seen, seen.total)
        parent = parent_class(return_class)
        prior = self._prior.get(return_class)
        if prior is not None:
            backed = LifeTable(prior.returned, prior.num_never)
            if parent is not None:
                backed.add(self._counts(parent), _BACKING)
            counts.add(backed, min(self._parameters.prior_weight, backed.total))
        elif parent is not None:
            weight = self._parameters.tenant_weight if "@" in return_class else self._parameters.prior_weight
            counts.add(self._counts(parent), weight)
        return counts

    def hazard(self, return_class: str, idle_seconds: float) -> float:
        """Returns per second at this idle time, among all of the class that are not back (those that never come included)."""
        if self._is_past_cap(idle_seconds):
            return 0.0
        return self._table(return_class).hazard(self._age(idle_seconds)) * self._parameters.time_scale

    def alive(self, return_class: str, idle_seconds: float) -> float:
        """Chance that a session idle for so long comes back at all."""
        return 0.0 if self._is_past_cap(idle_seconds) else self._table(return_class).alive(self._age(idle_seconds))

    def returned_share(self, return_class: str, idle_seconds: float) -> float:
        """Share of the class that is back within so long."""
        return 1 - self._table(return_class).survival(self._age(idle_seconds))

    def quantile(self, return_class: str, share: float) -> float:
        """Idle seconds by which `share` of those that come back at all have done so."""
        return self._table(return_class).quantile(share) / self._parameters.time_scale

    def idle_until_hopeless(self, return_class: str, chance: float) -> float:
        """Idle seconds after which a session of the class comes back with less than this chance; infinity where there is no such age."""
        return min(self._table(return_class).age_of_chance(chance), self._cap_seconds) / self._parameters.time_scale

    def time_to_return(self, return_class: str, idle_seconds: float, horizon_seconds: float) -> float:
        """Mean seconds until it is back, counted as at most `horizon_seconds`; those that never come count as the horizon."""
        if self._is_past_cap(idle_seconds):
            return horizon_seconds
        table, scale = self._table(return_class), self._parameters.time_scale
        return table.mean_wait(self._age(idle_seconds), horizon_seconds * scale) / scale
