"""lfu: fewest hits first, the longest idle among equals; dead sessions of many turns never leave."""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Pool
from admission.eviction.ranking import RankedPolicy


@dataclass(frozen=True, slots=True)
class LfuParameters:
    pass


def lfu(parameters: LfuParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(lambda extent, now: (extent.num_hits, extent.freed_seconds))
