"""Moving a request's KV between ranks that are cut differently: by each layer's own geometry, head by head, byte for byte.

The fault that this guards against: layer 0's layout taken for all of them. Dense layers have no index keys, index keys have one head and
lie whole on every rank, and K and V of one head lie side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from model.m3.kv import CacheGeometry, LayerCache


def empty_rank(geometry: CacheGeometry, num_blocks: int) -> Tensor:
    """One rank's cache memory for `num_blocks` blocks, zeroed: uint8 [bytes]."""
    return torch.zeros(geometry.bytes_per_block * num_blocks, dtype=torch.uint8)


def layer_view(memory: Tensor, geometry: CacheGeometry, num_blocks: int, cache: LayerCache) -> Tensor:
    """One cache tensor inside a rank's memory, without copying: uint8 [blocks, block tokens, heads, bytes of a head]."""
    start = geometry.block_offsets(num_blocks)[cache.layer, cache.role]
    tokens = geometry.shard.config.block_size
    size = cache.bytes_per_token * tokens * num_blocks
    return memory[start : start + size].view(num_blocks, tokens, cache.num_heads, cache.head_bytes)


def transfer(
    source: Sequence[Tensor],
    source_geometry: CacheGeometry,
    target: Sequence[Tensor],
    target_geometry: CacheGeometry,
    blocks: Mapping[int, int],
) -> int:
    """Copy blocks (source id: target id) from every rank of one deployment to every rank of another; returns the bytes written.

    `source` and `target` hold one memory a rank. Formats must be equal: a transfer moves bytes and converts nothing (else ValueError).
    """
    if (source_geometry.kv_dtype, source_geometry.index_dtype) != (target_geometry.kv_dtype, target_geometry.index_dtype):
        raise ValueError("source and target keep their caches in different formats; a transfer does not convert")
    taken, given = list(blocks), list(blocks.values())
    sizes = (source[0].numel() // source_geometry.bytes_per_block, target[0].numel() // target_geometry.bytes_per_block)
    written = 0
    for there, here in zip(source_geometry.layers(), target_geometry.layers(), strict=True):
        for rank, memory in enumerate(target):
            view = layer_view(memory, target_geometry, sizes[1], here)
            for slot in range(here.num_heads):
                owner, place = (0, 0) if here.role == "index" else _owner(source_geometry, _head(target_geometry, rank, slot))
                found = layer_view(source[owner], source_geometry, sizes[0], there)[taken, :, place]
                view[given, :, slot] = found
                written += found.numel()
    return written


def _head(geometry: CacheGeometry, rank: int, slot: int) -> int:
    """Which KV head of the model lies in `slot` of `rank`."""
    shard = geometry.shard
    return rank // shard.kv_replication * shard.num_kv_heads + slot


def _owner(geometry: CacheGeometry, head: int) -> tuple[int, int]:
    """A rank that holds `head`, and its slot there."""
    shard = geometry.shard
    return head // shard.num_kv_heads * shard.kv_replication, head % shard.num_kv_heads
