"""The mirror against a small engine that announces what it stores and removes: what is resident, and for whom."""

from __future__ import annotations

import itertools

import pytest

from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from prefix_cache.mirror import Mirror
from tests.engine_events import BLOCK, A, B, batch, fed, hashes, removed, stored


def test_leading_resident_blocks_match() -> None:
    mirror = fed(stored(A))
    assert mirror.match(hashes(A)) == 4
    assert mirror.match(hashes([*A, 1, 2, 3, 4])) == 4
    assert mirror.match(hashes([*A[:8], 1, 2, 3, 4, 5, 6, 7, 8])) == 2
    assert mirror.match(hashes(B)) == 0
    assert (mirror.num_resident_blocks, mirror.num_resident_tokens) == (4, 16)


def test_a_prediction_never_covers_the_last_token() -> None:
    mirror = fed(stored(A))
    assert mirror.predict(hashes(A), 16) == 12
    assert mirror.predict(hashes([*A, 1]), 17) == 16


def test_blocks_continue_their_parent_of_an_earlier_batch() -> None:
    mirror = fed(stored(A[:8]), stored(A, skip=2))
    assert mirror.match(hashes(A)) == 4
    assert mirror.match(hashes(A), start=3) == 4


def test_a_hole_ends_the_match_and_counts_as_removed() -> None:
    event = stored(A)
    mirror = fed(event, removed(event, 1))
    assert mirror.match(hashes(A)) == 1
    assert [mirror.was_removed(block_hash) for block_hash in hashes(A)] == [False, True, False, False]
    assert not mirror.was_removed(hashes(B)[0])


def test_a_block_stored_again_is_not_removed() -> None:
    event = stored(A)
    mirror = fed(event, removed(event, 3), stored(A, skip=3))
    assert mirror.match(hashes(A)) == 4
    assert not mirror.was_removed(hashes(A)[3])


def test_copies_are_counted() -> None:
    event = stored(A)
    mirror = fed(event, event, removed(event, 3))
    assert (mirror.match(hashes(A)), mirror.num_resident_blocks) == (4, 4)
    mirror.apply(3, batch(removed(event, 3), at=3.0))
    assert (mirror.match(hashes(A)), mirror.num_resident_blocks) == (3, 3)


@pytest.mark.case("KVM-04")
def test_a_reset_clears_at_once_and_counts_as_removal() -> None:
    mirror = fed(stored(A), AllBlocksCleared())
    assert (mirror.match(hashes(A)), mirror.num_resident_blocks) == (0, 0)
    assert mirror.was_removed(hashes(A)[0])
    mirror.apply(2, batch(stored(B), at=2.0))
    assert mirror.match(hashes(B)) == 3


def test_removals_of_unknown_blocks_change_nothing() -> None:
    mirror = fed(stored(A), BlockRemoved([1, b"two"]))
    assert mirror.match(hashes(A)) == 4


def test_a_full_engine_hash_in_bytes_works_as_a_short_one() -> None:
    event = stored(A)
    event.block_hashes = [int(name).to_bytes(32, "big") for name in event.block_hashes]
    mirror = fed(event, removed(event, 3))
    assert mirror.match(hashes(A)) == 3


# What must not be shared


@pytest.mark.case("KVM-09")
def test_salts_isolate() -> None:
    mirror = fed(stored(A, salt="tenant"))
    assert mirror.match(hashes(A)) == 0
    assert mirror.match(hashes(A, salt=b"other")) == 0
    assert mirror.match(hashes(A, salt=b"tenant")) == 4


@pytest.mark.case("KVM-09")
def test_adapters_isolate_also_from_a_salt_of_the_same_name() -> None:
    event = stored(A)
    event.lora_name = "X"
    event.extra_keys = [["X"]] * 4
    mirror = fed(event)
    assert mirror.match(hashes(A)) == 0
    assert mirror.match(hashes(A, salt=b"X")) == 0


@pytest.mark.case("KVM-09")
def test_blocks_with_images_match_no_text_from_there_on() -> None:
    event = stored(A)
    event.extra_keys = [None, [["image-1", 2]], None, None]
    mirror = fed(event)
    assert mirror.match(hashes(A)) == 1
    assert mirror.num_resident_blocks == 4


@pytest.mark.case("KVM-06")
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_only_full_attention_groups_count_in_any_order(order: tuple[int, ...]) -> None:
    mamba = [BlockStored([77], None, list(A[-4:]), BLOCK, group_idx=group, kv_cache_spec_kind="mamba") for group in range(3)]
    events = [*mamba, stored(A, kind="mla_attention", group=3)]
    mirror = fed(*(events[index] for index in order))
    assert mirror.match(hashes(A)) == 4
    assert mirror.num_ignored_events == 3
    mirror.apply(4, batch(BlockRemoved([77], group_idx=0), at=4.0))
    assert mirror.match(hashes(A)) == 4


@pytest.mark.case("KVM-06")
def test_the_hit_is_the_minimum_over_groups() -> None:
    second = stored(A, kind="full_attention", group=1)
    mirror = fed(stored(A, kind="full_attention", group=0), second, removed(second, 2))
    assert mirror.match(hashes(A)) == 2
    assert mirror.was_removed(hashes(A)[2])


@pytest.mark.case("KVM-07")
def test_other_block_sizes_earn_nothing_and_are_shown() -> None:
    mirror = Mirror(16)
    mirror.apply(0, batch(BlockStored([1], None, list(range(128)), 128)))
    assert mirror.match(hashes(list(range(100)), block_size=16)) == 0
    assert (mirror.event_block_size, mirror.num_ignored_events) == (128, 1)


@pytest.mark.case("KVM-07")
def test_other_media_are_ignored() -> None:
    event = stored(A)
    other = BlockStored(event.block_hashes, None, [], 0, medium="CPU")
    mirror = fed(event, other, BlockRemoved(event.block_hashes, medium="CPU"))
    assert (mirror.match(hashes(A)), mirror.num_ignored_events) == (4, 2)


def test_children_of_an_unknown_parent_wait_for_it() -> None:
    mirror = fed(stored([*A, *B], skip=4), stored([*A, *B, 1, 2, 3, 4], skip=7))
    assert (mirror.match(hashes([*A, *B])), mirror.num_unresolved_blocks) == (0, 4)
    mirror.apply(2, batch(stored(A), at=2.0))
    assert mirror.match(hashes([*A, *B, 1, 2, 3, 4])) == 8
    assert mirror.num_unresolved_blocks == 0


def test_the_log_of_removals_is_bounded_and_keeps_the_latest() -> None:
    mirror = Mirror(BLOCK, max_blocks=4)
    events = [stored([number] * 4) for number in range(6)]
    for seq, number in enumerate([0, 1, 2, 3, 0, 4, 5]):
        mirror.apply(seq, batch(events[number], removed(events[number], 0), at=float(seq)))
    assert [number for number in range(6) if mirror.was_removed(hashes([number] * 4)[0])] == [0, 3, 4, 5]


def test_memory_is_bounded_when_removals_get_lost() -> None:
    mirror = Mirror(BLOCK, max_blocks=100)
    for seq in range(300):
        mirror.apply(seq, batch(stored([seq, *A[1:]]), at=float(seq)))
    assert mirror.num_resident_blocks == 100
    assert mirror.match(hashes([299, *A[1:]])) == 4
