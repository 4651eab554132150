"""Persistent state: what a token leaves in the KV cache of one rank, how it lies there, and how many tokens fit.

Three layouts share a block: K and V of dense layers, K and V of sparse layers, and the sparse layers' index K, which has one head and is
the same on every rank. Code that moves blocks must not take layer 0's layout for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from model.m3.dtypes import Dtype
from model.m3.sharding import Shard


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One cache tensor of one layer on one rank: `num_heads` heads of `head_bytes` each for every token."""

    layer: int
    role: str
    """main: K and V. index: key only."""
    num_heads: int
    head_bytes: int
    """Of one head of one token: K and V together for main, the key for index."""

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """All cache tensors of one rank. `index_dtype` may differ from `kv_dtype`: vLLM keeps index K in bf16 unless told otherwise."""

    shard: Shard
    kv_dtype: Dtype = Dtype.FP8
    index_dtype: Dtype = Dtype.BF16

    def layers(self) -> tuple[LayerCache, ...]:
        """In layer order; a sparse layer gives its main cache, then its index cache."""
        config, shard = self.shard.config, self.shard
        main = 2 * self.kv_dtype.bytes_of(config.head_dim)
        index = self.index_dtype.bytes_of(config.index_dim)
        caches = []
        for layer in range(config.num_hidden_layers):
            caches.append(LayerCache(layer, "main", shard.num_kv_heads, main))
            if layer >= config.num_dense_layers:
                caches.append(LayerCache(layer, "index", 1, index))
        return tuple(caches)

    @property
    def main_bytes_per_token(self) -> int:
        return sum(cache.bytes_per_token for cache in self.layers() if cache.role == "main")

    @property
    def index_bytes_per_token(self) -> int:
        return sum(cache.bytes_per_token for cache in self.layers() if cache.role == "index")

    @property
    def bytes_per_token(self) -> int:
        """On one rank."""
        return self.main_bytes_per_token + self.index_bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.shard.config.block_size

    @property
    def stored_bytes_per_token(self) -> int:
        """Over all ranks, copies included: what an offload tier that stores every rank's part pays."""
        return self.bytes_per_token * self.shard.tp

    @property
    def distinct_bytes_per_token(self) -> int:
        """Over all ranks without copies: KV heads that lie on several ranks once, index K once."""
        return self.main_bytes_per_token * self.shard.tp // self.shard.kv_replication + self.index_bytes_per_token

    def capacity_tokens(self, kv_bytes: int) -> int:
        """Tokens that fit into `kv_bytes` of one rank, in whole blocks."""
        return max(0, kv_bytes) // self.bytes_per_block * self.shard.config.block_size

    def block_offsets(self, num_blocks: int) -> dict[tuple[int, str], int]:
        """Where each cache tensor begins, in bytes, when the tensors lie one after the other with `num_blocks` blocks each."""
        offsets, position = {}, 0
        for cache in self.layers():
            offsets[cache.layer, cache.role] = position
            position += cache.bytes_per_token * self.shard.config.block_size * num_blocks
        return offsets
