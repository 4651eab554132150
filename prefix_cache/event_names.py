"""The blocks of an event under two names: the engine's own, in 64 bits, and our `BlockHash`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import xxhash

from prefix_cache.blocks import TOKEN_BYTES, BlockHash, chain_hashes, root_hash
from prefix_cache.events import BlockStored, EngineHash, flat_ids
from prefix_cache.runs import NAME_BYTES
from prefix_cache.sent_prompts import SentBlocks

_NAME_MASK = (1 << 8 * NAME_BYTES) - 1


def first_parent(event: BlockStored) -> BlockHash:
    """What the first block of a prompt hangs on: its cache salt and its adapter."""
    return root_hash(_salt(event), (event.lora_name or "").encode())


def block_hashes(event: BlockStored, parent: BlockHash) -> list[BlockHash]:
    """Our hashes of the event's blocks below `parent`. What else the engine hashed (images, embeddings) is mixed in and so isolates."""
    keys = [_other_keys(event, index) for index in range(len(event.extra_keys or ()))] if event.extra_keys and any(event.extra_keys) else []
    known = event.token_ids
    if not any(keys) and isinstance(known, SentBlocks) and known.parent == parent:
        return list(known.hashes)
    token_bytes = flat_ids(event.token_ids).tobytes()
    if not any(keys):
        return chain_hashes(parent, token_bytes, event.block_size)
    step = event.block_size * TOKEN_BYTES
    hashes: list[BlockHash] = []
    for index, others in enumerate(keys[: len(token_bytes) // step]):
        if others:
            parent = xxhash.xxh3_128_digest(parent + msgspec.msgpack.encode(others))
        (parent,) = chain_hashes(parent, token_bytes[index * step : (index + 1) * step], event.block_size)
        hashes.append(parent)
    return hashes


def _salt(event: BlockStored) -> bytes:
    """The cache salt: the only text, besides the adapter's name, among the keys of a prompt's first block."""
    texts = [key for key in _without_adapter(event, 0) if isinstance(key, str)]
    return texts[0].encode() if texts else b""


def _other_keys(event: BlockStored, index: int) -> list[object]:
    """Extra keys of one block that the chain's root does not carry already."""
    keys = _without_adapter(event, index)
    return [key for key in keys if not isinstance(key, str)] if index == 0 and event.parent_block_hash is None else keys


def _without_adapter(event: BlockStored, index: int) -> list[object]:
    keys: list[object] = list((event.extra_keys[index] if event.extra_keys else None) or ())
    return keys[1:] if event.lora_name and keys[:1] == [event.lora_name] else keys


def block_names(hashes: Sequence[EngineHash]) -> Sequence[int]:
    """Each as `block_name`."""
    try:
        return array("Q", hashes)  # type: ignore[arg-type]  # what is no int raises
    except (TypeError, OverflowError):
        return [block_name(name) for name in hashes]


def block_name(name: EngineHash) -> int:
    """The engine's hash in 64 bits: what it sends by default is the low end of the long form."""
    return name & _NAME_MASK if isinstance(name, int) else int.from_bytes(name[-NAME_BYTES:], "big")
