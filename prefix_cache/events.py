"""vLLM's KV cache events as typed values.

A payload is a msgpack array `[ts, events, data_parallel_rank]`. An event is a map tagged `type`, or in older releases an array whose first
element is the tag; fields stand in the same order in both. Newer fields and kinds that are not known here are skipped, not refused.
Field meaning: `vllm/distributed/kv_events.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from prefix_cache.sent_prompts import SentPrompts

EngineHash: TypeAlias = int | bytes
"""A block's name on the wire: the low 64 bits of the engine's hash as an int, or all of it as bytes."""


def flat_ids(ids: Sequence[int]) -> array[int]:
    """Token ids in 4 bytes each, of which a list takes up to 36: batches may have to wait. Not copied if flat already."""
    return ids if isinstance(ids, array) else array("I", ids)


class BlockStored(msgspec.Struct, tag="BlockStored", gc=False):
    """Whole blocks entered a cache, in chain order. `token_ids` holds block_size ids for each (decoded: flat); other tiers send none."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """For each block what else went into its hash, untagged: adapter name, then (image id, offset) pairs, cache salt, embedding digests."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", gc=False):
    """One copy of each of these blocks left its cache."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    """The engine's prefix cache was reset."""


class _PackedStored(BlockStored, tag="BlockStored", gc=False):
    """As it comes: ids cost most, and may be known. `decode_batch` puts them in."""

    token_ids: msgspec.Raw


class _PackedStoredArray(BlockStored, array_like=True, tag="BlockStored", gc=False):
    token_ids: msgspec.Raw


class _BlockRemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _AllBlocksClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
_MapEvent: TypeAlias = _PackedStored | BlockRemoved | AllBlocksCleared
_ArrayEvent: TypeAlias = _PackedStoredArray | _BlockRemovedArray | _AllBlocksClearedArray


class EventBatch(msgspec.Struct, frozen=True):
    """The events of one engine step. `timestamp_seconds` is the engine's wall clock; only equality and order of it mean anything here."""

    timestamp_seconds: float
    events: list[Event]
    num_unknown_events: int = 0


class MalformedBatch(ValueError):
    """A payload that is no event batch. What it announced is lost."""


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_MapEvent]


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_ArrayEvent]


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _TaggedMap(msgspec.Struct):
    type: str


_MAP_BATCH = msgspec.msgpack.Decoder(_MapBatch)
_ARRAY_BATCH = msgspec.msgpack.Decoder(_ArrayBatch)
_RAW_BATCH = msgspec.msgpack.Decoder(_RawBatch)
_TAGGED_MAP = msgspec.msgpack.Decoder(_TaggedMap)
_TAGGED_ARRAY = msgspec.msgpack.Decoder(list[Any])
_MAP_EVENT = msgspec.msgpack.Decoder(_MapEvent)
_ARRAY_EVENT = msgspec.msgpack.Decoder(_ArrayEvent)
_IDS = msgspec.msgpack.Decoder(list[int])
_KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def decode_batch(payload: bytes, sent: SentPrompts | None = None) -> EventBatch:
    """Decode one message; ids of blocks that were `sent` are taken from there. Raises `MalformedBatch`."""
    batch = _decode(payload)
    try:
        for event in batch.events:
            if isinstance(event, _PackedStored | _PackedStoredArray):
                event.token_ids = _ids(event.token_ids, event.session_id, sent)  # type: ignore[assignment]  # as above
    except (OverflowError, msgspec.MsgspecError) as error:
        raise MalformedBatch(f"a token id that is none: {error}") from error
    return batch


def _ids(packed: msgspec.Raw, session_id: str | None, sent: SentPrompts | None) -> array[int]:
    known = sent.announced(session_id, memoryview(packed)) if sent is not None else None
    return array("I", _IDS.decode(packed)) if known is None else known


def _decode(payload: bytes) -> EventBatch:
    for decoder in (_MAP_BATCH, _ARRAY_BATCH):
        try:
            batch = decoder.decode(payload)
        except msgspec.MsgspecError:
            continue
        return EventBatch(batch.ts, list(batch.events))
    return _decode_each(payload)


def _decode_each(payload: bytes) -> EventBatch:
    """The tolerant way, event by event, for batches that hold a kind not known here."""
    try:
        batch = _RAW_BATCH.decode(payload)
        events = [_decode_event(raw) for raw in batch.events]
    except msgspec.MsgspecError as error:
        raise MalformedBatch(f"not a KV event batch: {error}") from error
    known: list[Event] = [event for event in events if event is not None]
    return EventBatch(batch.ts, known, num_unknown_events=len(events) - len(known))


def _decode_event(raw: msgspec.Raw) -> Event | None:
    first = memoryview(raw)[0]
    is_map = 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)
    if is_map:
        return _MAP_EVENT.decode(raw) if _TAGGED_MAP.decode(raw).type in _KINDS else None
    fields = _TAGGED_ARRAY.decode(raw)
    return _ARRAY_EVENT.decode(raw) if fields and fields[0] in _KINDS else None
