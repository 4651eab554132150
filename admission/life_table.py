"""A life table over log-spaced ages: how many were back by when, how many never, and the curves that follow.

The hazard is constant inside a bin: S(t) = S(a) · exp(−h·(t − a)) from the bin's start a, with h = −ln(1 − returned ÷ at risk) ÷ width (the
actuarial estimate: who left during the bin counts half). Ages and answers are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

FIRST_AGE_SECONDS = 0.25
BINS_PER_DECADE = 8
NUM_BINS = 46
"""Bin 0 holds ages below the first edge; bin k starts at `FIRST_AGE_SECONDS · 10^((k−1)/BINS_PER_DECADE)`; the last ends at about a day."""

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
