"""KV events as a small engine makes them, and a mirror that has heard them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from prefix_cache.blocks import HashChain
from prefix_cache.events import BlockRemoved, BlockStored, EngineHash, Event, EventBatch
from prefix_cache.mirror import Mirror

BLOCK = 4


def hashes(ids: Sequence[int], salt: bytes = b"", block_size: int = BLOCK) -> Sequence[bytes]:
    chain = HashChain(block_size, salt)
    chain.extend(array("I", ids))
    return chain.hashes


def engine_hash(parent: EngineHash | None, ids: Sequence[int], salt: str = "") -> int:
    return int.from_bytes(hashlib.sha256(repr((parent, tuple(ids), salt)).encode()).digest()[:8], "big")


def stored(ids: Sequence[int], *, skip: int = 0, salt: str = "", kind: str | None = None, group: int | None = None) -> BlockStored:
    """The event for the whole blocks of `ids` behind the first `skip`, which the engine has already."""
    names: list[EngineHash] = []
    parent: EngineHash | None = None
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        parent = engine_hash(parent, ids[start : start + BLOCK], salt)
        names.append(parent)
    new = names[skip:]
    extra: list[list[object] | None] | None = [[salt] if skip + index == 0 else None for index in range(len(new))] if salt else None
    return BlockStored(
        block_hashes=new,
        parent_block_hash=names[skip - 1] if skip else None,
        token_ids=list(ids[skip * BLOCK : len(names) * BLOCK]),
        block_size=BLOCK,
        extra_keys=extra,
        kv_cache_spec_kind=kind,
        group_idx=group,
    )


def removed(event: BlockStored, *indices: int) -> BlockRemoved:
    return BlockRemoved([event.block_hashes[index] for index in indices], group_idx=event.group_idx)


def batch(*events: Event, at: float = 0.0) -> EventBatch:
    return EventBatch(at, list(events))


def fed(*events: Event) -> Mirror:
    """A mirror that has seen each event in a batch of its own."""
    mirror = Mirror(BLOCK)
    for seq, event in enumerate(events):
        assert mirror.apply(seq, batch(event, at=float(seq))) is None
    return mirror


A = list(range(100, 116))
B = list(range(200, 212))
