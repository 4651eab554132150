"""When a session comes back: per return class a life table over log-spaced ages, a prior from recorded sessions and what is seen online.

Survival counts those that never come back, so `hazard` is already the hazard of the class times the chance that the session is alive. It is
constant inside a bin: S(t) = S(a) · exp(−h·(t − a)) from the bin's start a, with h = −ln(1 − returned ÷ at risk) ÷ width (the actuarial
estimate: who left during the bin counts half). Ages and answers are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from admission.eviction.policy import Knob
from admission.return_class import lineage, parent_class, with_tenant
from admission.return_prior import RETURN_PRIOR

FIRST_AGE_SECONDS = 0.25
BINS_PER_DECADE = 8
NUM_BINS = 46
"""Bin 0 holds ages below the first edge; bin k starts at `FIRST_AGE_SECONDS · 10^((k−1)/BINS_PER_DECADE)`; the last ends at about a day."""

_BACKING = 1.0
"""Idle times of its parent that are added to a recorded class, so that what a few records never showed is not impossible."""
_CAP_MARGIN = 1.03
"""Idle times that were capped end a little after the cap."""
_STEP = math.log(10.0) / BINS_PER_DECADE


def edge_seconds(index: int) -> float:
    """Where bin `index` starts; `edge_seconds(NUM_BINS)` is where the last ends."""
    return 0.0 if index == 0 else FIRST_AGE_SECONDS * math.exp((index - 1) * _STEP)


def bin_of(age_seconds: float) -> int:
    """The bin that holds an age; `NUM_BINS` when it lies past the last."""
    if age_seconds < FIRST_AGE_SECONDS:
        return 0
    return min(int(math.log(age_seconds / FIRST_AGE_SECONDS) / _STEP + 1e-9) + 1, NUM_BINS)


_EDGES = tuple(edge_seconds(index) for index in range(NUM_BINS + 1))


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


class LifeTable:
    """Counts of one class, and the curves that follow from them. `returned[k]`: came back in bin k; `left[k]`: out of sight in it, neither
    returned nor known to be gone; `num_never`: known not to have come back. Counts are weights: they decay and need not be whole."""

    __slots__ = ("_hazards", "_integrals", "_survivals", "left", "num_never", "returned")

    def __init__(self, returned: Sequence[float] | None = None, num_never: float = 0.0) -> None:
        self.returned = list(returned) if returned is not None else [0.0] * NUM_BINS
        self.left = [0.0] * NUM_BINS
        self.num_never = num_never
        self._hazards: list[float] = []
        self._survivals: list[float] = []
        self._integrals: list[float] = []

    @property
    def total(self) -> float:
        return sum(self.returned) + sum(self.left) + self.num_never

    def scale(self, factor: float) -> None:
        self.returned = [count * factor for count in self.returned]
        self.left = [count * factor for count in self.left]
        self.num_never *= factor

    def add(self, other: LifeTable, weight: float) -> None:
        """Adds another table's shares, as `weight` idle times. Its curves are those counts that make it certain of them."""
        total = other.total
        if total <= 0:
            return
        factor = weight / total
        self.returned = [count + factor * more for count, more in zip(self.returned, other.returned, strict=True)]
        self.left = [count + factor * more for count, more in zip(self.left, other.left, strict=True)]
        self.num_never += factor * other.num_never

    def fit(self) -> None:
        """Makes the curves from the counts."""
        at_risk = self.total
        survival, integral = 1.0, 0.0
        self._hazards, self._survivals, self._integrals = [], [], []
        for index in range(NUM_BINS):
            width = _EDGES[index + 1] - _EDGES[index]
            exposed = at_risk - self.left[index] / 2
            share = min(self.returned[index] / exposed, 1 - 1e-9) if exposed > 0 else 0.0
            hazard = -math.log1p(-share) / width
            self._hazards.append(hazard)
            self._survivals.append(survival)
            self._integrals.append(integral)
            integral += survival * (share / hazard if hazard > 0 else width)
            survival *= 1 - share
            at_risk -= self.returned[index] + self.left[index]
        self._hazards.append(0.0)
        self._survivals.append(survival)
        self._integrals.append(integral)

    def hazard(self, age_seconds: float) -> float:
        return self._hazards[bin_of(age_seconds)]

    def survival(self, age_seconds: float) -> float:
        """Share not back at this age, those that never come included."""
        index = bin_of(age_seconds)
        return self._survivals[index] * math.exp(-self._hazards[index] * (age_seconds - _EDGES[index]))

    @property
    def never_share(self) -> float:
        """Share that never comes back (or not within the last bin)."""
        return self._survivals[NUM_BINS]

    def alive(self, age_seconds: float) -> float:
        """Chance that a session idle for so long comes back at all."""
        survival = self.survival(age_seconds)
        return 1 - self.never_share / survival if survival > 0 else 0.0

    def age_of_chance(self, chance: float) -> float:
        """The age at which `alive` falls below `chance`, to the bin; the last bin's end is one if anything is left then."""
        for edge, survival in zip(_EDGES, self._survivals, strict=True):
            if survival <= 0 or 1 - self.never_share / survival < chance:
                return edge
        return math.inf

    def mean_wait(self, age_seconds: float, horizon_seconds: float) -> float:
        """Mean of min(time until it is back, horizon): the integral of S over the horizon, by S at its start."""
        survival = self.survival(age_seconds)
        if survival <= 0:
            return horizon_seconds
        return min((self._integral(age_seconds + horizon_seconds) - self._integral(age_seconds)) / survival, horizon_seconds)

    def _integral(self, age_seconds: float) -> float:
        index = bin_of(age_seconds)
        inside, hazard = age_seconds - _EDGES[index], self._hazards[index]
        area = -math.expm1(-hazard * inside) / hazard if hazard > 1e-12 else inside
        return self._integrals[index] + self._survivals[index] * area

    def quantile(self, share: float) -> float:
        """Age by which `share` of those that come back at all have done so; infinity when none does."""
        never = self.never_share
        target = 1 - share * (1 - never)
        if never >= 1:
            return math.inf
        for index in range(NUM_BINS):
            if self._survivals[index + 1] <= target + 1e-12:
                hazard = self._hazards[index]
                return _EDGES[index] + (math.log(self._survivals[index] / target) / hazard if hazard > 0 else 0.0)
        return _EDGES[NUM_BINS]


class ReturnModel:
    """Learns when sessions of each class come back. Asking is O(1); the first question after an observation fits its class again.

    A class that was never seen and is not in the prior asks its parent (`root/tool:shell` → `root/tool` → `root/unknown`). A class of a
    tenant (`with_tenant`) leans on the same class of all tenants.
    """

    __slots__ = ("_cap_seconds", "_fitted", "_parameters", "_prior", "_seen", "_seen_seconds", "_tenants")

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
        self._fitted: dict[str, LifeTable] = {}
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
        for name in [name for name in self._seen if name.endswith(with_tenant("", tenant))]:
            del self._seen[name], self._seen_seconds[name]
            self._fitted.pop(name, None)

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
        for name in lineage(return_class):
            table = self._seen.setdefault(name, LifeTable())
            table.scale(0.5 ** (max(now - self._seen_seconds.get(name, now), 0.0) / self._parameters.half_life_seconds))
            self._seen_seconds[name] = now
            tables.append(table)
        # What leans on a class that has changed is stale too: its tenants' and its children.
        self._fitted.clear()
        return tables

    def _is_past_cap(self, idle_seconds: float) -> bool:
        return self._age(idle_seconds) > self._cap_seconds

    def _age(self, seconds: float) -> float:
        return seconds * self._parameters.time_scale

    def _table(self, return_class: str) -> LifeTable:
        table = self._fitted.get(return_class)
        if table is None:
            table = self._counts(return_class)
            table.fit()
            self._fitted[return_class] = table
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
