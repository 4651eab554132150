"""Events about prompts that this server sent: read without decoding, and exactly as if they had been decoded."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.blocks import HashChain, root_hash
from prefix_cache.events import BlockStored, decode_batch
from prefix_cache.mirror import Mirror
from prefix_cache.sent_prompts import SentBlocks, SentPrompts

BLOCK = 256
EDGES = [0, 0x7F, 0x80, 0xCC, 0xCD, 0xCE, 0xFF, 0x100, 0xCDCD, 0xFFFF, 0x10000, 0xCECECE, 0xCDCDCDCD, 2**32 - 1]
token_ids = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**32 - 1))
prompts = st.lists(token_ids, min_size=1, max_size=40).map(lambda some: array("I", (some * (8 * BLOCK))[: 8 * BLOCK]))


def chained(ids: array[int], salt: bytes = b"") -> HashChain:
    chain = HashChain(BLOCK, salt)
    chain.extend(ids)
    return chain


def sent(ids: array[int], start: int = 0, session_id: str = "s") -> SentPrompts:
    prompts = SentPrompts(BLOCK)
    prompts.add(session_id, ids, chained(ids).hashes, start, len(ids) // BLOCK, root_hash())
    return prompts


def announced(prompts: SentPrompts, ids: array[int], session_id: str | None = "s") -> SentBlocks | None:
    return prompts.announced(session_id, memoryview(msgspec.msgpack.encode(ids.tolist())))


@given(prompts)
def test_what_was_sent_is_known_with_its_hashes_chunk_by_chunk(ids: array[int]) -> None:
    prompts, hashes = sent(ids), chained(ids).hashes
    for start, stop in ((0, 4), (4, 8)):
        known = announced(prompts, ids[start * BLOCK : stop * BLOCK])
        assert known is not None
        assert array("I", known) == ids[start * BLOCK : stop * BLOCK]
        assert known.hashes == hashes[start:stop]
        assert known.parent == (hashes[start - 1] if start else root_hash())
    assert announced(prompts, ids[:1024]) is None  # a second time


@given(prompts, st.integers(0, 8 * BLOCK - 1), token_ids)
def test_a_single_other_id_is_seen(ids: array[int], place: int, other: int) -> None:
    changed = array("I", ids)
    changed[place] = other
    known = announced(sent(ids), changed)
    assert (known is not None) == (changed == ids)


def test_prompts_longer_than_a_piece_are_compared_to_their_end() -> None:
    ids = array("I", [place * 7919 % 200_000 for place in range(200 * BLOCK)])
    known = announced(sent(ids), ids)
    assert known is not None
    assert array("I", known) == ids
    for place in (0, 16_383, 16_384, len(ids) - 1):
        changed = array("I", ids)
        changed[place] ^= 1
        assert announced(sent(ids), changed) is None


@pytest.mark.parametrize("packed", [[], b"\xcc" * 2048, "text" * 500, [-1] * 2048, [0.5] * 2048, [[1]] * 2048])
def test_other_things_than_ids_are_left_to_the_decoder(packed: object) -> None:
    prompts = sent(array("I", [1] * 8 * BLOCK))
    assert prompts.announced("s", memoryview(msgspec.msgpack.encode(packed))) is None


def test_sessions_are_told_apart_and_the_oldest_prompts_are_forgotten() -> None:
    ids, others = array("I", range(8 * BLOCK)), array("I", range(5, 5 + 8 * BLOCK))
    prompts = SentPrompts(BLOCK, max_ids=16 * BLOCK)
    for session_id, prompt in (("a", ids), ("b", others), ("b", ids), ("c", others)):
        prompts.add(session_id, prompt, chained(prompt).hashes, 0, 8, root_hash())
        assert prompts.num_ids <= 16 * BLOCK
    assert [announced(prompts, ids, name) is not None for name in ("a", "b", "c", None)] == [False, True, False, False]


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("engine_salt", ["", "tenant"])
@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_the_mirror_is_the_same_with_and_without_decoding(salt: bytes, engine_salt: str, start: int) -> None:
    ids = array("I", range(1000, 1000 + 8 * BLOCK))
    hashes, names = chained(ids, salt).hashes, list(range(1, 9))
    mirrors = [Mirror(BLOCK), Mirror(BLOCK)]
    mirrors[0].sent.add("s", ids, hashes, start, 8, root_hash(salt))
    extra = [[engine_salt] if engine_salt else None, *[None] * 7]
    for seq, (first, last) in enumerate(((0, start), (start, 8))):
        parent = names[first - 1] if first else None
        event = BlockStored(list(names[first:last]), parent, ids[first * BLOCK : last * BLOCK].tolist(), BLOCK)
        event.extra_keys, event.session_id = extra[first:last], "s"
        payload = msgspec.msgpack.encode([float(seq), [event] if last > first else [], 0])
        for mirror in mirrors:
            mirror.apply(seq, decode_batch(payload, mirror.sent))
    assert [mirror.sent.num_known_events for mirror in mirrors] == [1, 0]
    assert mirrors[0].resident_hashes() == mirrors[1].resident_hashes()
    assert mirrors[0].match(hashes) == mirrors[1].match(hashes) == (8 if salt == engine_salt.encode() else 0)
