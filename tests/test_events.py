"""KV events on the wire: maps and arrays, what is skipped, and what is refused."""

from __future__ import annotations

from array import array

import msgspec
import pytest

from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, MalformedBatch, decode_batch


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("as_arrays", [False, True])
def test_maps_and_arrays_decode_to_the_same_events(as_arrays: bool, as_bytes: bool) -> None:
    name: EngineHash = b"n" * 32 if as_bytes else 2**64 - 1
    fields = {"block_hashes": [name], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2, "lora_id": None, "medium": "GPU"}
    gone = {"block_hashes": [name], "medium": "GPU"}
    events: list[object] = [
        ["BlockStored", *fields.values()] if as_arrays else {"type": "BlockStored", **fields},
        ["BlockRemoved", *gone.values()] if as_arrays else {"type": "BlockRemoved", **gone},
        ["AllBlocksCleared"] if as_arrays else {"type": "AllBlocksCleared"},
    ]
    decoded = decode_batch(msgspec.msgpack.encode([1.5, events, 0]))
    assert decoded.timestamp_seconds == 1.5
    store, remove, clear = decoded.events
    assert isinstance(store, BlockStored)
    assert (store.block_hashes, list(store.token_ids), store.block_size, store.medium, store.lora_name) == ([name], [1, 2], 2, "GPU", None)
    assert isinstance(remove, BlockRemoved)
    assert (remove.block_hashes, remove.medium, remove.group_idx) == ([name], "GPU", None)
    assert isinstance(clear, AllBlocksCleared)


def test_unknown_kinds_and_fields_are_skipped_and_counted() -> None:
    events: list[object] = [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockRemoved", "block_hashes": [1], "colour": "red"},
        ["BlockMoved", 1],
        ["BlockRemoved", [2], "GPU", 0, None, None, "more"],
        [],
    ]
    decoded = decode_batch(msgspec.msgpack.encode([1.5, events, 0, "more"]))
    assert [event.block_hashes for event in decoded.events if isinstance(event, BlockRemoved)] == [[1], [2]]
    assert decoded.num_unknown_events == 3


def test_decoded_ids_are_flat_and_ids_that_are_none_are_refused() -> None:
    def payload(token: int) -> bytes:
        fields = {"block_hashes": [1], "parent_block_hash": None, "token_ids": [token], "block_size": 1}
        return msgspec.msgpack.encode([1.5, [{"type": "BlockStored", **fields}], 0])

    (event,) = decode_batch(payload(2**32 - 1)).events
    assert isinstance(event, BlockStored)
    assert event.token_ids == array("I", [2**32 - 1])
    for token in (-1, 2**32):
        with pytest.raises(MalformedBatch):
            decode_batch(payload(token))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", msgspec.msgpack.encode("text"), msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved"}], 0]), b"\x93\x01"]
)
def test_what_is_no_batch_is_refused_by_name(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode_batch(payload)
