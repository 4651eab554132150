"""What the ranks of one engine find in a tier, lookup by lookup: each keeps its own shards, and may lose them apart from the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class RankLookups:
    """Counts over all lookups so far. A lookup's hit is the least of its ranks', since every rank has to load its shard."""

    num_lookups: int = 0
    num_differing: int = 0
    """Lookups in which some rank found more than another."""
    num_given_up_tokens: int = 0
    """What the best rank of each lookup held beyond the hit."""

    def settle(self, num_tokens: Sequence[int]) -> int:
        """The hit in tokens of a lookup in which each rank found so many leading tokens. Changes state."""
        hit = min(num_tokens, default=0)
        beyond = max(num_tokens, default=0) - hit
        self.num_lookups += 1
        self.num_differing += beyond > 0
        self.num_given_up_tokens += beyond
        return hit
