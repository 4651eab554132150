"""Eviction policies by name. A new one is a file here and a line in the table; `EvictionPolicy` in `policy.py` is the contract."""

from __future__ import annotations

from admission.eviction.choice import PolicyChoice
from admission.eviction.dead_first import DeadFirstParameters, dead_first
from admission.eviction.farthest_next_use import FarthestNextUseParameters, farthest_next_use
from admission.eviction.fifo import FifoParameters, fifo
from admission.eviction.lfu import LfuParameters, lfu
from admission.eviction.lru import LruParameters, lru
from admission.eviction.priority import PriorityParameters, priority

EVICTION_POLICIES: dict[str, PolicyChoice] = {
    "lru": PolicyChoice(LruParameters, lru),
    "fifo": PolicyChoice(FifoParameters, fifo),
    "lfu": PolicyChoice(LfuParameters, lfu),
    "priority": PolicyChoice(PriorityParameters, priority),
    "dead_first": PolicyChoice(DeadFirstParameters, dead_first),
    "farthest_next_use": PolicyChoice(FarthestNextUseParameters, farthest_next_use, needs_future=True),
}
