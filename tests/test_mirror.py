"""The mirror against a small engine that announces what it stores and removes, over a channel that loses, doubles and reorders."""

from __future__ import annotations

import hashlib
import itertools
import random
from array import array
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache.blocks import HashChain
from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, EventBatch, MalformedBatch, decode_batch
from prefix_cache.mirror import Gap, Mirror

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


# What is resident


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


# The order of things


@pytest.mark.case("KVM-01")
def test_a_gap_is_reported_and_filled_in_order() -> None:
    event = stored(A)
    mirror = fed(*[stored(B)] * 10)
    gap = mirror.apply(15, batch(stored([*A, *B], skip=4), at=15.0))
    assert gap == Gap(10, 15)
    assert gap.ask_from == 9
    mirror.apply(9, batch(stored(B), at=9.0), replayed=True)
    for seq in range(10, 15):
        mirror.apply(seq, batch(event, at=float(seq)), replayed=True)
    assert mirror.gap is None
    assert mirror.match(hashes([*A, *B])) == 7
    assert (mirror.num_duplicate_batches, mirror.num_restarts, mirror.is_suspect) == (1, 0, False)


@pytest.mark.case("KVM-02")
def test_a_late_replay_does_not_bring_removed_blocks_back() -> None:
    a, b, c = stored(A), stored(B), stored([9] * 8)
    mirror = fed(*[BlockRemoved([])] * 5)
    assert mirror.apply(7, batch(removed(a, 0, 1, 2, 3), at=7.0)) == Gap(5, 7)
    assert mirror.apply(8, batch(c, at=8.0)) == Gap(5, 7)
    mirror.apply(5, batch(a, at=5.0), replayed=True)
    assert mirror.apply(6, batch(b, at=6.0), replayed=True) is None
    assert [mirror.match(hashes(ids)) for ids in (A, B, [9] * 8)] == [0, 3, 2]


@pytest.mark.case("KVM-01")
def test_duplicates_do_not_count_as_copies() -> None:
    event = stored(A)
    mirror = Mirror(BLOCK)
    for seq, replayed in [(0, True), (0, False), (1, False), (1, True), (1, False)]:
        mirror.apply(seq, batch(event, at=float(seq)), replayed=replayed)
    mirror.apply(2, batch(removed(event, 3), removed(event, 3), at=2.0))
    assert mirror.match(hashes(A)) == 3
    assert (mirror.num_duplicate_batches, mirror.num_restarts) == (3, 0)


@pytest.mark.case("KVM-01")
@pytest.mark.parametrize("oldest", [13, None])
def test_a_gap_that_cannot_be_replayed_empties_the_mirror(oldest: int | None) -> None:
    mirror = fed(*[stored(A)] * 10)
    gap = mirror.apply(15, batch(stored(B), at=15.0))
    assert gap is not None
    for seq in range(oldest, 15) if oldest is not None else ():
        mirror.apply(seq, batch(stored([seq] * 8), at=float(seq)), replayed=True)
    assert mirror.end_replay(gap) is None
    assert mirror.is_suspect
    assert mirror.num_lost_batches == (3 if oldest is not None else 5)
    assert [mirror.match(hashes(ids)) for ids in (A, B, [13] * 8)] == [0, 3, 2 if oldest is not None else 0]
    assert not mirror.was_removed(hashes(A)[0])


@pytest.mark.case("KVM-03")
def test_joining_in_the_middle_asks_for_the_beginning() -> None:
    mirror = Mirror(BLOCK)
    gap = mirror.apply(137, batch(stored(A), at=137.0))
    assert gap == Gap(0, 137)
    for seq in range(137):
        mirror.apply(seq, batch(stored(B), at=float(seq)), replayed=True)
    assert (mirror.gap, mirror.is_suspect) == (None, False)
    assert (mirror.match(hashes(A)), mirror.match(hashes(B))) == (4, 3)


@pytest.mark.case("KVM-03")
def test_numbers_that_start_again_clear_the_mirror() -> None:
    mirror = fed(stored(A), stored(A), stored(A))
    assert mirror.apply(0, batch(stored(B), at=50.0)) is None
    assert (mirror.match(hashes(A)), mirror.match(hashes(B)), mirror.num_restarts) == (0, 3, 1)


def test_batches_of_the_old_life_that_wait_are_dropped_by_a_restart() -> None:
    mirror = fed(stored(A))
    mirror.apply(5, batch(stored(A), at=5.0))
    assert mirror.apply(0, batch(stored(B), at=50.0)) is None
    for seq in range(1, 6):
        mirror.apply(seq, batch(at=50.0 + seq))
    assert (mirror.match(hashes(A)), mirror.match(hashes(B)), mirror.num_duplicate_batches) == (0, 3, 0)


def test_late_copies_of_a_long_replay_are_no_restart() -> None:
    mirror = Mirror(BLOCK)
    for seq in range(3000):
        mirror.apply(seq, batch(stored([seq] * 4), at=float(seq)), replayed=True)
    for seq in range(5, 3000):
        mirror.apply(seq, batch(stored([seq] * 4), at=float(seq)))
    assert (mirror.num_restarts, mirror.num_duplicate_batches, mirror.num_resident_blocks) == (0, 2995, 3000)


@pytest.mark.case("KVM-03")
def test_a_restart_whose_first_batches_are_lost_asks_for_them() -> None:
    mirror = Mirror(BLOCK)
    mirror.apply(137, batch(stored(A), at=137.0))
    mirror.end_replay(Gap(0, 137))
    gap = mirror.apply(3, batch(stored([*B, 1, 2, 3, 4], skip=3), at=200.0))
    assert (gap, mirror.match(hashes(A))) == (Gap(0, 3), 0)
    for seq in range(3):
        mirror.apply(seq, batch(stored(B), at=190.0 + seq), replayed=True)
    assert mirror.match(hashes([*B, 1, 2, 3, 4])) == 4
    assert not mirror.is_suspect


@pytest.mark.case("KVM-03")
def test_a_restart_hidden_in_a_gap_shows_in_the_batch_before_it() -> None:
    mirror = fed(*[stored(A)] * 10)
    assert mirror.apply(15, batch(stored(B), at=115.0)) == Gap(10, 15)
    assert mirror.apply(9, batch(stored([7] * 4), at=109.0), replayed=True) == Gap(0, 9)
    assert mirror.num_restarts == 1
    for seq in range(15):
        mirror.apply(seq, batch(stored([seq] * 4), at=100.0 + seq), replayed=True)
    assert (mirror.gap, mirror.match(hashes(A)), mirror.match(hashes(B)), mirror.match(hashes([14] * 4))) == (None, 0, 3, 1)


@pytest.mark.case("KVM-02")
def test_waiting_batches_are_bounded() -> None:
    mirror = Mirror(BLOCK, max_held_batches=10)
    mirror.apply(0, batch(stored(A)))
    for seq in range(5, 16):
        mirror.apply(seq, batch(stored([seq] * 4), at=float(seq)))
    assert (mirror.gap, mirror.is_suspect, mirror.match(hashes([15] * 4))) == (None, True, 1)


def test_an_unreadable_batch_is_a_loss() -> None:
    mirror = fed(stored(A))
    assert mirror.lose(1) is None
    assert (mirror.is_suspect, mirror.match(hashes(A))) == (True, 0)
    assert mirror.apply(2, batch(stored(B), at=2.0)) is None
    assert mirror.match(hashes(B)) == 3


class Reference:
    """What is resident after all batches in order: the plainest possible count."""

    def __init__(self) -> None:
        self.copies: dict[EngineHash, int] = {}

    def apply(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for name in event.block_hashes:
                    self.copies[name] = self.copies.get(name, 0) + 1
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    self.copies[name] = max(0, self.copies.get(name, 0) - 1)
            else:
                self.copies.clear()

    def match(self, ids: Sequence[int]) -> int:
        names = stored(ids).block_hashes
        return next((index for index, name in enumerate(names) if not self.copies.get(name)), len(names))


def history(rng: random.Random, num_batches: int) -> tuple[list[EventBatch], list[list[int]]]:
    """Batches of an engine that stores prompts with common beginnings and removes leaves, and the prompts."""
    prompts = [[rng.randrange(2) for _ in range(4 * rng.randrange(1, 6))] for _ in range(8)]
    batches: list[EventBatch] = []
    live: list[tuple[BlockStored, int]] = []
    engine = Reference()
    for number in range(num_batches):
        events: list[Event] = []
        for _ in range(rng.randrange(3)):
            if live and rng.random() < 0.4:
                event, index = live.pop(rng.randrange(len(live)))
                events.append(removed(event, index))
            elif rng.random() < 0.03:
                events.append(AllBlocksCleared())
                live.clear()
            else:
                ids = rng.choice(prompts)
                num_hit = engine.match(ids) if rng.random() < 0.8 else 0
                if num_hit < len(ids) // BLOCK:
                    event = stored(ids, skip=num_hit)
                    events.append(event)
                    live += [(event, index) for index in range(len(event.block_hashes))]
            engine.apply(events[-1:])
        batches.append(batch(*events, at=float(number)))
    return batches, prompts


def test_an_answer_that_places_a_lost_parent_places_all_that_waited_below_it() -> None:
    mirror, ids = Mirror(BLOCK), list(range(6 * BLOCK))
    for seq, num_blocks in enumerate((4, 6)):
        mirror.apply(seq, batch(stored(ids[: num_blocks * BLOCK], skip=num_blocks - 2)))
    assert mirror.num_unresolved_blocks == 4
    mirror.learn(hashes(ids), 2 * BLOCK, 0)
    assert mirror.num_unresolved_blocks == 0
    assert mirror.predict(hashes(ids), len(ids) + 1) == len(ids)
    mirror.apply(2, batch(removed(stored(ids), 5), removed(stored(ids), 4)))
    assert mirror.predict(hashes(ids), len(ids) + 1) == 4 * BLOCK


@pytest.mark.case("KVM-02")
@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_any_schedule_of_losses_and_replays_ends_in_the_same_set(seed: int, num_batches: int) -> None:
    rng = random.Random(seed)
    batches, prompts = history(rng, num_batches)
    mirror, reference = Mirror(BLOCK), Reference()
    for seq, sent in enumerate(batches):
        reference.apply(sent.events)
        if seq < num_batches - 1 and rng.random() < 0.3:
            continue
        gap = mirror.apply(seq, sent)
        if gap is not None and (seq == num_batches - 1 or rng.random() < 0.5):
            for number in range(gap.ask_from, rng.randrange(gap.stop, seq + 2)):
                mirror.apply(number, batches[number], replayed=True)
            mirror.end_replay(gap)
    while (gap := mirror.gap) is not None:
        for number in range(gap.ask_from, gap.stop):
            mirror.apply(number, batches[number], replayed=True)
    assert not mirror.is_suspect
    assert [mirror.match(hashes(ids)) for ids in prompts] == [reference.match(ids) for ids in prompts]
    assert mirror.num_resident_blocks == sum(count > 0 for count in reference.copies.values())


# Correction by usage


@pytest.mark.case("KVM-05")
def test_an_empty_mirror_learns_from_the_first_turn() -> None:
    """A fresh server before a warm engine without old events: the engine announces only what is new."""
    mirror = Mirror(BLOCK)
    mirror.apply(137, batch(stored(A, skip=3), at=137.0))
    mirror.end_replay(Gap(0, 137))
    assert mirror.predict(hashes(A), 17) == 0
    mirror.learn(hashes(A), num_cached_tokens=12, predicted_tokens=0)
    assert mirror.predict(hashes([*A, *B]), 28) == 16
    mirror.apply(138, batch(stored([*A, *B], skip=4), at=138.0))
    assert mirror.predict(hashes([*A, *B, 1]), 29) == 28
    assert (mirror.num_under_predictions, mirror.num_over_predictions) == (1, 0)


@pytest.mark.case("KVM-05")
def test_events_that_come_after_the_usage_are_tied_to_it() -> None:
    mirror = Mirror(BLOCK)
    mirror.lose(0)
    mirror.learn(hashes(A), num_cached_tokens=8)
    event = stored(A, skip=2)
    mirror.apply(1, batch(event, at=1.0))
    assert mirror.num_unresolved_blocks == 0
    mirror.apply(2, batch(removed(event, 0), at=2.0))
    assert mirror.match(hashes(A)) == 2
    assert mirror.was_removed(hashes(A)[2])


@pytest.mark.case("KVM-04", "UPS-06")
def test_a_silent_reset_costs_one_wrong_prediction() -> None:
    mirror = fed(stored(A), stored(B))
    predicted = mirror.predict(hashes(A), 17)
    mirror.apply(2, batch(stored(A), at=2.0))
    mirror.learn(hashes(A), num_cached_tokens=0, predicted_tokens=predicted)
    assert mirror.is_suspect
    assert mirror.predict(hashes(B), 13) == 0
    assert mirror.predict(hashes(A), 17) == 16
    assert (mirror.num_over_predictions, mirror.num_contradictions) == (1, 1)


def test_a_response_that_overtakes_its_events_costs_nothing_once_they_are_here() -> None:
    a = stored(A)
    mirror = fed(a, stored(B))
    before = mirror.departures
    mirror.learn(hashes(A), num_cached_tokens=8, predicted_tokens=mirror.predict(hashes(A), 17))
    assert (mirror.is_suspect, mirror.match(hashes(B))) == (True, 0)
    mirror.apply(2, batch(removed(a, 3, 2), stored(A, skip=2), at=2.0))
    assert (mirror.is_suspect, mirror.num_contradictions, mirror.num_explained_contradictions) == (False, 1, 1)
    assert (mirror.match(hashes(A)), mirror.match(hashes(B))) == (4, 3)
    assert mirror.departures != before


def test_a_replay_that_brings_the_removal_ends_the_suspicion() -> None:
    a = stored(A)
    mirror = fed(a, stored(B))
    mirror.learn(hashes(A), num_cached_tokens=0, predicted_tokens=16)
    gap = mirror.apply(5, batch(stored([9] * 8), at=5.0))
    assert gap == Gap(2, 5)
    mirror.apply(2, batch(stored([8] * 4), at=2.0), replayed=True)
    assert mirror.is_suspect
    mirror.apply(3, batch(removed(a, 3, 2, 1, 0), at=3.0), replayed=True)
    mirror.apply(4, batch(a, at=4.0), replayed=True)
    assert (mirror.gap, mirror.is_suspect) == (None, False)
    assert [mirror.match(hashes(ids)) for ids in (A, B, [8] * 4, [9] * 8)] == [4, 3, 1, 2]


def test_a_contradiction_that_nothing_explains_stands() -> None:
    mirror = fed(stored(A), stored(B))
    mirror.learn(hashes(A), num_cached_tokens=0, predicted_tokens=16)
    for seq in range(2, 30):
        mirror.apply(seq, batch(stored([seq] * 4), at=float(seq)))
    mirror.apply(30, batch(BlockRemoved(stored(A).block_hashes), at=30.0))
    assert (mirror.is_suspect, mirror.match(hashes(B)), mirror.match(hashes([29] * 4))) == (True, 0, 1)


def test_an_eviction_between_prediction_and_start_is_no_contradiction() -> None:
    event = stored(A)
    mirror = fed(event, stored(B))
    predicted = mirror.predict(hashes(A), 17)
    mirror.apply(2, batch(removed(event, 2, 3), stored(A, skip=2), at=2.0))
    mirror.learn(hashes(A), num_cached_tokens=8, predicted_tokens=predicted)
    assert (mirror.num_over_predictions, mirror.num_contradictions, mirror.is_suspect) == (1, 0, False)
    assert mirror.predict(hashes(B), 13) == 12


def test_a_miss_while_events_are_missing_is_no_contradiction() -> None:
    mirror = fed(stored(A), stored(B))
    mirror.apply(3, batch(stored(A), at=3.0))
    mirror.learn(hashes(A), num_cached_tokens=0, predicted_tokens=16)
    assert (mirror.num_over_predictions, mirror.num_contradictions) == (1, 0)
    assert mirror.match(hashes(B)) == 3


@pytest.mark.case("UPS-06")
def test_a_suspect_mirror_is_trusted_again_after_a_run_of_right_predictions() -> None:
    mirror = fed(stored(A))
    mirror.lose(1)
    for _ in range(31):
        mirror.learn(hashes(A), num_cached_tokens=12, predicted_tokens=12)
    mirror.learn(hashes(A), num_cached_tokens=12, predicted_tokens=8)
    for _ in range(31):
        mirror.learn(hashes(A), num_cached_tokens=12, predicted_tokens=12)
    assert mirror.is_suspect
    mirror.learn(hashes(A), num_cached_tokens=12, predicted_tokens=12)
    assert not mirror.is_suspect


# The wire


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
