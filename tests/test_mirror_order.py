"""The mirror over a channel that loses, doubles and reorders, and under an engine that starts again."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, EventBatch
from prefix_cache.mirror import Gap, Mirror
from tests.engine_events import BLOCK, A, B, batch, fed, hashes, removed, stored


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
