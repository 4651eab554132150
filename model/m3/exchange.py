"""Exchanged data: what ranks send each other in one forward pass, and which of it a compressed all-reduce may take."""

from __future__ import annotations

from dataclasses import dataclass

from model.m3.dtypes import Dtype
from model.m3.sharding import Shard


@dataclass(frozen=True, slots=True)
class Collective:
    """`count` collectives of one forward pass, each over a buffer of `num_bytes` on every rank."""

    name: str
    kind: str
    """all_reduce or all_gather."""
    num_bytes: int
    count: int

    def bytes_on_wire(self, tp: int) -> float:
        """Bytes that one rank sends in all of them, for a ring: 2(p−1)/p of an all-reduce's buffer, (p−1) parts of a gather's."""
        share = 2 * (tp - 1) / tp if self.kind == "all_reduce" else tp - 1
        return self.num_bytes * share * self.count


def collectives(shard: Shard, num_tokens: int, num_sequences: int) -> tuple[Collective, ...]:
    """Of a batch of `num_tokens` rows, of which `num_sequences` ask for logits. None with one rank."""
    if shard.tp == 1:
        return ()
    config = shard.config
    hidden = Dtype.BF16.bytes_of(num_tokens * config.hidden_size)
    return (
        Collective("embedding", "all_reduce", hidden, 1),
        Collective("after attention", "all_reduce", hidden, config.num_hidden_layers),
        Collective("after dense MLP or experts", "all_reduce", hidden, config.num_hidden_layers),
        Collective("logits", "all_gather", Dtype.BF16.bytes_of(num_sequences * shard.vocab_size), 1),
    )
