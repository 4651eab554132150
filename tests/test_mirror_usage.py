"""The mirror corrected by the hits that the engine reports: what it learns, what it doubts, and when it trusts again."""

from __future__ import annotations

import pytest

from prefix_cache.events import BlockRemoved
from prefix_cache.mirror import Gap, Mirror
from tests.engine_events import BLOCK, A, B, batch, fed, hashes, removed, stored


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
