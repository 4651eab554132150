"""lru: what was let go longest ago leaves first; vLLM's own order, and the baseline."""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Pool
from admission.eviction.ranking import RankedPolicy


@dataclass(frozen=True, slots=True)
class LruParameters:
    pass


def lru(parameters: LruParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(lambda extent, now: (extent.freed_seconds,))
