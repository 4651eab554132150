"""Prefill and decode apart: who reads whose KV blocks, how long that takes, and when they may be used again.

Ranks need not be as many on both sides. A decode rank reads the K and V of its heads from prefill ranks that hold them, and index keys,
which every rank has, from one. A prefill engine's blocks are free again when the last of their readers has said that it has them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from model.m3.kv import CacheGeometry
from model.m3.sharding import Shard
from replays.simulator.chains import Branch
from replays.simulator.engine import EngineRequest


@dataclass(frozen=True, slots=True)
class Read:
    """What one decode rank reads of one prefill rank, bytes for each token over all layers."""

    prefill_rank: int
    decode_rank: int
    num_bytes: int


def plan_reads(prefill: CacheGeometry, decode: CacheGeometry) -> tuple[Read, ...]:
    """Who reads what. Copies of a head on several prefill ranks share its readers. Raises ValueError where the formats differ."""
    if (prefill.kv_dtype, prefill.index_dtype) != (decode.kv_dtype, decode.index_dtype):
        raise ValueError("prefill and decode keep their KV cache in different formats; give both the same")
    reads: Counter[tuple[int, int]] = Counter()
    config = prefill.shard.config
    layer_bytes = 2 * prefill.kv_dtype.bytes_of(config.head_dim)
    for rank in range(decode.shard.tp):
        for head in _heads(decode.shard, rank):
            holders = [other for other in range(prefill.shard.tp) if head in _heads(prefill.shard, other)]
            reads[holders[rank % len(holders)], rank] += layer_bytes * config.num_hidden_layers
        reads[rank % prefill.shard.tp, rank] += decode.index_bytes_per_token
    return tuple(Read(source, target, num_bytes) for (source, target), num_bytes in sorted(reads.items()))


def _heads(shard: Shard, rank: int) -> range:
    first = rank // shard.kv_replication * shard.num_kv_heads
    return range(first, first + shard.num_kv_heads)


@dataclass(eq=False)
class Handover:
    """The `Loader` of decode engines. `num_prefill` engines come first in the server's list; each sends one request after the other."""

    reads: tuple[Read, ...]
    num_prefill: int
    bytes_per_second: float = 40e9
    """Of one rank's network card, either way: 0.8 of 400 Gbit/s."""
    setup_seconds: float = 0.005
    num_bytes: int = 0
    sources: dict[int, tuple[int, EngineRequest]] = field(default_factory=dict)
    """By the id of a decode request: the prefill engine's number, and the request there."""
    _busy_until: dict[int, float] = field(default_factory=dict)

    def offer(self, request: EngineRequest, hit: int, limit: int, now: float) -> int:
        """All of the prompt but the last token, which gives the first answer. After a preemption nothing: the prefill engine has let go."""
        if request.num_preemptions or request.id not in self.sources:
            return 0
        return request.num_prompt_tokens - 1

    def load(self, request: EngineRequest, hit: int, num_tokens: int, now: float) -> float:
        """Until the last reader has acknowledged."""
        source, _ = self.sources[request.id]
        self.num_bytes += num_tokens * sum(read.num_bytes for read in self.reads)
        start = max(now, self._busy_until.get(source, 0.0))
        end = start + self.setup_seconds + num_tokens * self._bytes_of_busiest_rank() / self.bytes_per_second
        self._busy_until[source] = end
        return end - now

    def tell(self, branch: Branch, now: float) -> None:
        """What a prefill engine holds for a decoder it holds whatever becomes of it."""

    def _bytes_of_busiest_rank(self) -> int:
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        for read in self.reads:
            sent[read.prefill_rank] += read.num_bytes
            received[read.decode_rank] += read.num_bytes
        return max(*sent.values(), *received.values())
