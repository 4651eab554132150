"""Eviction policies by name. A new one is a file here and a line in the table; `EvictionPolicy` in `policy.py` is the contract."""

from __future__ import annotations

from admission.eviction.choice import PolicyChoice
from admission.eviction.class_hazard import ClassHazardParameters, class_hazard
from admission.eviction.dead_first import DeadFirstParameters, dead_first
from admission.eviction.farthest_next_use import FarthestNextUseParameters, farthest_next_use
from admission.eviction.fifo import FifoParameters, fifo
from admission.eviction.gdsf import GdsfParameters, gdsf
from admission.eviction.lfu import LfuParameters, lfu
from admission.eviction.lru import LruParameters, lru
from admission.eviction.priority import PriorityParameters, priority
from admission.eviction.s3fifo import S3FifoParameters, s3fifo
from admission.eviction.sieve import SieveParameters, sieve
from admission.eviction.slru import SlruParameters, slru
from admission.eviction.ttl import TtlParameters, ttl

EVICTION_POLICIES: dict[str, PolicyChoice] = {
    "lru": PolicyChoice(LruParameters, lru),
    "fifo": PolicyChoice(FifoParameters, fifo),
    "slru": PolicyChoice(SlruParameters, slru),
    "lfu": PolicyChoice(LfuParameters, lfu),
    "priority": PolicyChoice(PriorityParameters, priority),
    "s3fifo": PolicyChoice(S3FifoParameters, s3fifo),
    "sieve": PolicyChoice(SieveParameters, sieve),
    "gdsf": PolicyChoice(GdsfParameters, gdsf),
    "ttl": PolicyChoice(TtlParameters, ttl, needs_returns=True, reads_fates=True),
    "dead_first": PolicyChoice(DeadFirstParameters, dead_first, reads_fates=True),
    "class_hazard": PolicyChoice(ClassHazardParameters, class_hazard, needs_returns=True, reads_fates=True),
    "farthest_next_use": PolicyChoice(FarthestNextUseParameters, farthest_next_use, needs_future=True),
}
