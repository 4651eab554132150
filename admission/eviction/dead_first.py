"""dead_first: what is believed dead leaves first, then lru; most of what can be won near capacity."""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Fate, Pool
from admission.eviction.ranking import RankedPolicy


@dataclass(frozen=True, slots=True)
class DeadFirstParameters:
    pass


def dead_first(parameters: DeadFirstParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(lambda extent, now: (extent.fate is Fate.LIVE, extent.freed_seconds))
