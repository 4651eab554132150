"""Tiers: what may be found where, fastest first. The mirror follows the GPU; this folder follows the offload tiers behind it.

LMCache keeps *chunks* of several blocks and loads each as one. A chunk is a hit only where every tensor-parallel rank has its shard of it,
and only behind a prefix of hits. The exclusive tier of the engine's plugin keeps the blocks that left the GPU. Nothing here does I/O.
"""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """Where a prefix was found."""

    HBM = "hbm"
    """The engine's own KV pool, followed by `prefix_cache.mirror`."""
    DRAM = "dram"
    """The memory of the cache servers beside the engine."""
    REMOTE = "remote"
    """Behind those: Redis, Valkey or a disk. Stored into as the memory is; what leaves it is never announced."""
