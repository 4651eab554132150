"""fifo: what was stored first leaves first, used or not; evicts the heads of long sessions."""

from __future__ import annotations

from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Pool
from admission.eviction.ranking import RankedPolicy


@dataclass(frozen=True, slots=True)
class FifoParameters:
    pass


def fifo(parameters: FifoParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(lambda extent, now: (extent.inserted_seconds,))
