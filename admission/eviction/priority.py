"""priority: lowest priority first, lru inside one; a priority that was given for a time lapses to the lowest when the time is over.

The priorities and the duration of TensorRT-LLM's `KvCacheRetentionConfig`, with SGLang's soft decay instead of a lock: what has lapsed is
the next to leave, and anything can leave when nothing else is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from admission.eviction.policy import EvictionPolicy, Extent, Pool
from admission.eviction.ranking import Rank, RankedPolicy

_LAPSED = 0


@dataclass(frozen=True, slots=True)
class PriorityParameters:
    pass


def priority(parameters: PriorityParameters, pool: Pool) -> EvictionPolicy:
    return RankedPolicy(_rank, _lapses)


def _lapses(extent: Extent) -> float:
    return math.inf if extent.retention_seconds is None else extent.freed_seconds + extent.retention_seconds


def _rank(extent: Extent, now: float) -> Rank:
    return (_LAPSED if _lapses(extent) <= now else extent.priority, extent.freed_seconds)
