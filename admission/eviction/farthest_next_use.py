"""farthest_next_use: Belady's rule with the future known; only a replay can have it, and nothing beats it.

What is never asked for again, or of which nothing is known, leaves first. With extents of one block it is optimal for hits; with larger
ones it is the bound that is used in practice (the exact optimum is NP-hard).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Extent, Pool
from admission.eviction.ranking import Rank, RankedPolicy


@dataclass(frozen=True, slots=True)
class FarthestNextUseParameters:
    pass


def farthest_next_use(parameters: FarthestNextUseParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(_rank)


def _rank(extent: Extent, now: float) -> Rank:
    next_use = math.inf if extent.next_use_seconds is None else extent.next_use_seconds
    return (-next_use,)
