"""The tiers behind the GPU: chunks by rank, what the announcements say of them, and what a request will find there."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.blocks import HashChain
from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from prefix_cache.tiers import Tier
from prefix_cache.tiers.chunks import ChunkSet, Watermark, chunk_keys
from prefix_cache.tiers.offload import Offload

BLOCK, CHUNK = 128, 256


def ids(num_tokens: int, seed: int = 0) -> array[int]:
    return array("I", [(seed * 7919 + number) % 60_000 for number in range(num_tokens)])


def hashes(tokens: array[int], salt: bytes = b"") -> list[bytes]:
    chain = HashChain(BLOCK, salt)
    chain.extend(tokens)
    return list(chain.hashes)


def stored(tokens: array[int], first: int = 0, *, names: int = 100, size: int = CHUNK) -> list[Event]:
    """What LMCache announces of the whole chunks of `tokens` from number `first` on: one event a chunk, named 100, 101, …"""
    return [
        BlockStored(
            block_hashes=[names + number],
            parent_block_hash=names + number - 1 if number else None,
            token_ids=tokens[number * size : (number + 1) * size].tolist(),
            block_size=size,
            medium="CPU",
        )
        for number in range(first, len(tokens) // size)
    ]


def removed(*names: int, medium: str = "CPU") -> list[Event]:
    return [BlockRemoved(block_hashes=list(names), medium=medium)]


def heard(offload: Offload, *events: list[Event]) -> Offload:
    for batch in events:
        offload.apply(EventBatch(0.0, batch))
    return offload


def test_chunk_keys_are_those_of_whole_chunks() -> None:
    blocks = hashes(ids(5 * BLOCK))
    assert list(chunk_keys(blocks, 2)) == [blocks[1], blocks[3]]
    assert list(chunk_keys(blocks, 2, 3)) == [blocks[1]]
    assert list(chunk_keys(blocks, 1)) == blocks


@pytest.mark.case("KVM-10")
def test_a_chunk_is_a_hit_only_where_every_rank_has_it() -> None:
    chunks = ChunkSet(num_ranks=2)
    keys = [b"a", b"b", b"c"]
    chunks.store(keys, rank=0)
    assert chunks.match(keys) == 0
    chunks.store(keys[:2], rank=1)
    assert (chunks.match(keys), chunks.num_chunks) == (2, 2)
    chunks.remove([b"a"], rank=1)
    assert (chunks.match(keys), chunks.num_chunks) == (0, 1)
    chunks.store([b"a"], rank=1)
    assert chunks.match(keys) == 2
    chunks.remove([b"b"])
    assert chunks.match(keys) == 1


@pytest.mark.case("KVM-10")
@given(
    st.lists(st.tuples(st.sampled_from(["store", "remove"]), st.sampled_from([b"a", b"b", b"c", b"d"]), st.sampled_from([None, 0, 1, 2]))),
)
def test_ranks_are_those_of_three_sets_kept_apart(steps: list[tuple[str, bytes, int | None]]) -> None:
    chunks = ChunkSet(num_ranks=3)
    apart: list[set[bytes]] = [set(), set(), set()]
    for action, key, rank in steps:
        for each in range(3) if rank is None else (rank,):
            (apart[each].add if action == "store" else apart[each].discard)(key)
        (chunks.store if action == "store" else chunks.remove)([key], rank)
        everywhere = apart[0] & apart[1] & apart[2]
        assert chunks.num_chunks == len(everywhere)
        assert [key in chunks for key in (b"a", b"b", b"c", b"d")] == [key in everywhere for key in (b"a", b"b", b"c", b"d")]


def test_a_tier_that_announces_no_eviction_is_modelled_by_its_watermark() -> None:
    chunks = ChunkSet(watermark=Watermark(capacity_chunks=10))
    chunks.store([b"%d" % number for number in range(7)])
    assert chunks.num_chunks == 7
    chunks.store([b"new"])  # 8 of 10: a fifth goes, of one prompt its tail
    assert [b"%d" % number in chunks for number in range(7)] == [True] * 6 + [False]
    chunks.touch([b"5"])
    chunks.store([b"newer"])
    assert [b"%d" % number in chunks for number in range(7)] == [True] * 4 + [False, True, False]


def test_the_number_of_chunks_is_bounded() -> None:
    chunks = ChunkSet(max_chunks=3)
    for number in range(10):
        chunks.store([b"%d" % number])
    assert chunks.num_chunks == 3
    assert b"9" in chunks


def test_announced_chunks_are_hits_beyond_the_gpus_in_whole_chunks() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens))
    assert offload.num_resident_tokens == 3 * CHUNK
    for on_gpu, expected in ((0, 768), (384, 384), (768, 0), (896, 0)):
        hit = offload.predict(hashes(tokens), 1000, on_gpu)
        assert (hit.num_tokens, hit.tier) == (expected, Tier.DRAM if expected else None)


def test_the_last_token_is_never_loaded() -> None:
    tokens = ids(2 * CHUNK)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens))
    assert offload.predict(hashes(tokens), 2 * CHUNK, 0).num_tokens == 2 * CHUNK - 1


@pytest.mark.case("KVM-12")
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("beyond", [-4, -1, 0, 1, 4, 15, 16, 17, 127, 128, 129])
def test_around_the_end_of_a_chunk_what_is_loaded_fits_the_gpus_own_blocks_and_the_prompt(num_chunks: int, beyond: int) -> None:
    num_tokens = num_chunks * CHUNK + beyond
    tokens = ids(num_tokens)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens))
    whole = num_tokens // CHUNK * CHUNK
    for num_own_blocks in range((num_tokens - 1) // BLOCK + 1):
        own = num_own_blocks * BLOCK
        hit = offload.predict(hashes(tokens), num_tokens, own)
        assert own + hit.num_tokens == max(own, min(whole, num_tokens - 1))
        assert own + hit.num_tokens < num_tokens, "the last token is computed"


def test_a_chunk_that_left_ends_the_hit_there_and_counts_as_given() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens), removed(101))
    hit = offload.predict(hashes(tokens), 1000, 128)
    assert (hit.num_tokens, hit.num_given_tokens) == (128, 640)
    heard(offload, stored(tokens, first=1)[:1])
    assert offload.predict(hashes(tokens), 1000, 128).num_tokens == 640


def test_a_first_chunk_that_left_hides_the_rest_although_the_gpu_has_it() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens), removed(100))
    assert offload.predict(hashes(tokens), 1000, 512).num_tokens == 0


def test_other_media_and_other_chunk_sizes_earn_nothing() -> None:
    tokens = ids(1024)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens))
    heard(offload, removed(100, medium="GPU"), [AllBlocksCleared()])
    assert offload.predict(hashes(tokens), 1024, 0).num_tokens == 1023
    other = heard(Offload(BLOCK, CHUNK), stored(tokens, size=512))
    assert (other.predict(hashes(tokens), 1024, 0).num_tokens, other.num_unresolved_chunks) == (0, 2)


def test_a_chunk_below_an_unknown_one_is_counted_and_never_matches() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens, first=1))
    assert (offload.num_resident_tokens, offload.num_unresolved_chunks) == (0, 2)


def test_salted_prompts_are_followed_by_what_they_stored() -> None:
    tokens = ids(1000)
    salted = hashes(tokens, b"tenant")
    offload = heard(Offload(BLOCK, CHUNK), stored(tokens))
    assert offload.predict(salted, 1000, 0).num_tokens == 0
    offload.computed(salted, 999, salted=True)
    assert offload.predict(salted, 1000, 0).num_tokens == 768


def test_a_remote_tier_keeps_what_memory_evicts() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK, has_remote=True), stored(tokens), removed(100, 101))
    hit = offload.predict(hashes(tokens), 1000, 0)
    assert (hit.num_tokens, hit.tier) == (768, Tier.REMOTE)


def fail(offload: Offload, seed: int) -> None:
    """A prompt that only the remote tier should have, and that nobody has."""
    tokens = ids(1000, seed)
    blocks = hashes(tokens)
    offload.computed(blocks, 999, salted=False)
    offload.learn(blocks, 1000, 0, offload.predict(blocks, 1000, 0))


def test_a_remote_tier_that_fails_in_a_row_is_gone_until_it_explains_a_hit() -> None:
    offload = Offload(BLOCK, CHUNK, has_remote=True)
    tokens = ids(1000)
    blocks = hashes(tokens)
    offload.computed(blocks, 999, salted=False)
    for seed in (1, 2):
        fail(offload, seed)
    assert offload.predict(blocks, 1000, 0).num_tokens == 768
    fail(offload, 3)
    hit = offload.predict(blocks, 1000, 0)
    assert (hit.num_tokens, hit.num_given_tokens) == (0, 768)
    offload.learn(blocks, 1000, 640, offload.predict(blocks, 1000, 640))  # the GPU's own hit proves nothing
    assert offload.predict(blocks, 1000, 0).num_tokens == 0
    offload.learn(blocks, 1000, 768, hit)
    assert offload.predict(blocks, 1000, 0).num_tokens == 768


def test_a_stopped_server_has_nothing_and_what_it_was_given_counts_as_missing() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK, has_remote=True), stored(tokens))
    offload.stopped()
    hit = offload.predict(hashes(tokens), 1000, 128)
    assert (hit.num_tokens, hit.num_given_tokens, hit.tier) == (0, 640, None)
    offload.started()
    assert offload.predict(hashes(tokens), 1000, 128).num_tokens == 0  # the engine has not found it yet
    heard(offload, stored(ids(256, seed=9)))
    assert offload.predict(hashes(tokens), 1000, 128).num_tokens == 640  # from the remote tier
    without = heard(Offload(BLOCK, CHUNK), stored(tokens))
    without.stopped()
    without.started()
    assert without.predict(hashes(tokens), 1000, 128).num_tokens == 0


def test_a_hit_that_only_the_second_level_explains_shows_that_the_engine_has_found_it_again() -> None:
    tokens = ids(1000)
    offload = heard(Offload(BLOCK, CHUNK, has_remote=True), stored(tokens))
    offload.stopped()
    offload.started()
    offload.learn(hashes(tokens), 1000, 768, offload.predict(hashes(tokens), 1000, 128))
    assert offload.predict(hashes(tokens), 1000, 128).num_tokens == 640


def test_a_chunk_must_hold_whole_blocks() -> None:
    with pytest.raises(AssertionError):
        Offload(BLOCK, 200)
