"""Hit accounting: the causes of every miss add up, and what is unknown stays unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.hits import Cause, Elsewhere, HitTotals, TurnHits, account

# Also counts that no sane engine or caller would give.
tokens = st.integers(-50, 2000)
maybe_tokens = st.none() | tokens

turns = st.builds(
    account,
    num_prompt_tokens=st.integers(0, 1500),
    ceiling=tokens,
    block_size=st.none() | st.sampled_from([1, 16, 128, 4096]),
    actual=maybe_tokens,
    predicted=maybe_tokens,
    history_tokens=tokens,
    shared_tokens=tokens,
    volatile_tokens=tokens,
    confirmed_evicted=maybe_tokens,
    in_flight=maybe_tokens,
)


@pytest.mark.case("KVM-11")
@given(turns)
def test_causes_add_up_to_what_was_missed(hits: TurnHits) -> None:
    if hits.actual is None:
        assert hits.missed is None
        return
    assert hits.missed is not None
    assert sum(hits.missed.values()) == hits.num_prompt_tokens - hits.actual
    assert all(count > 0 for count in hits.missed.values())


@given(turns)
def test_a_hit_is_never_above_the_ceiling(hits: TurnHits) -> None:
    assert 0 <= hits.ceiling <= hits.num_prompt_tokens
    if hits.ceiling_blocks is not None:
        assert hits.ceiling_blocks <= hits.ceiling
    if hits.actual is not None:
        assert 0 <= hits.actual <= hits.ceiling
        assert hits.ceiling_blocks is None or hits.actual <= hits.ceiling_blocks


@given(st.lists(turns))
def test_totals_are_sums_over_sums(all_hits: list[TurnHits]) -> None:
    totals = HitTotals()
    for hits in all_hits:
        totals.add(hits)
    known = [hits for hits in all_hits if hits.actual is not None]
    num_known_tokens = sum(hits.num_prompt_tokens for hits in known)
    assert totals.num_turns == len(all_hits)
    assert sum(totals.missed.values()) == num_known_tokens - totals.actual
    assert totals.actual_hit_rate == (sum(hits.actual or 0 for hits in known) / num_known_tokens if num_known_tokens else None)


def test_an_appended_turn_misses_its_new_tokens_and_the_tail() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=900, block_size=128, actual=896, history_tokens=900, shared_tokens=900)
    assert hits.ceiling_blocks == 896
    assert hits.missed == {Cause.NEW: 100, Cause.TAIL: 4}


def test_the_last_token_is_always_computed() -> None:
    hits = account(num_prompt_tokens=256, ceiling=256, block_size=128, actual=128)
    assert hits.ceiling_blocks == 128
    assert hits.missed == {Cause.TAIL: 128}


def test_an_edit_takes_the_history_behind_it_and_the_rest_is_new() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=256, block_size=128, actual=256, history_tokens=900, shared_tokens=256)
    assert hits.missed == {Cause.CLIENT_EDIT: 644, Cause.NEW: 100}


def test_confirmed_removals_are_evicted_and_the_rest_of_the_gap_is_unknown() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=900, block_size=100, actual=200, confirmed_evicted=400, in_flight=100)
    assert hits.missed == {Cause.NEW: 100, Cause.EVICTED: 400, Cause.IN_FLIGHT: 100, Cause.UNKNOWN: 200}


def test_a_hit_beyond_what_we_saw_raises_the_ceiling() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=0, block_size=128, actual=512)
    assert (hits.ceiling, hits.ceiling_blocks) == (512, 512)
    assert hits.missed == {Cause.NEW: 488}


@pytest.mark.case("KVM-11")
@pytest.mark.parametrize(("actual", "shown", "clamped"), [(-7680, 0, 7680), (1200, 1000, 200), (500, 500, 0)])
def test_counts_outside_the_prompt_are_clamped_and_counted(actual: int, shown: int, clamped: int) -> None:
    hits = account(num_prompt_tokens=1000, ceiling=0, block_size=None, actual=actual)
    assert (hits.actual, hits.num_clamped_tokens) == (shown, clamped)


@pytest.mark.case("TRC-04")
def test_unknown_is_not_zero() -> None:
    totals = HitTotals()
    assert [totals.actual_hit_rate, totals.coverage] == [None] * 2
    totals.add(account(num_prompt_tokens=100, ceiling=50, block_size=None))
    assert [totals.actual_hit_rate, totals.ceiling_block_hit_rate, totals.predicted_hit_rate] == [None] * 3
    assert [totals.ceiling_hit_rate, totals.coverage] == [0.5, 0.0]
    totals.add(account(num_prompt_tokens=300, ceiling=150, block_size=10, actual=150, predicted=120))
    rates = [totals.actual_hit_rate, totals.ceiling_block_hit_rate, totals.predicted_hit_rate, totals.coverage]
    assert rates == [0.5, 0.5, 0.4, 0.75]


@given(st.lists(turns))
def test_no_hit_rate_is_above_its_ceilings(all_hits: list[TurnHits]) -> None:
    totals = HitTotals()
    for hits in all_hits:
        totals.add(hits)
    if totals.actual_hit_rate is not None:
        assert totals.ceiling_hit_rate is not None
        assert totals.actual_hit_rate <= totals.ceiling_hit_rate


def test_what_broke_off_is_in_no_rate_beside_those_that_are_known() -> None:
    totals = HitTotals()
    totals.add(account(num_prompt_tokens=1000, ceiling=700, block_size=100, actual=690, predicted=600))
    totals.add(account(num_prompt_tokens=1000, ceiling=0, block_size=100, predicted=0))  # a client left: no count of the engine
    rates = [totals.ceiling_hit_rate, totals.ceiling_block_hit_rate, totals.predicted_hit_rate, totals.actual_hit_rate]
    assert rates == [0.7, 0.7, 0.6, 0.69]
    assert (totals.coverage, totals.num_prompt_tokens, totals.ceiling) == (0.5, 2000, 700)


@pytest.mark.case("KVM-11")
def test_an_external_hit_is_a_part_of_the_actual_one() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=900, block_size=128, actual=768, predicted=256, external_predicted=640, external=512)
    assert (hits.actual, hits.external, hits.external_predicted) == (768, 512, 640)
    assert account(num_prompt_tokens=1000, ceiling=900, block_size=128, actual=768).external is None
    assert account(num_prompt_tokens=100, ceiling=100, block_size=32, actual=500, external=400).external == 100
    totals = HitTotals()
    totals.add(hits)
    totals.add(account(num_prompt_tokens=5000, ceiling=0, block_size=128, actual=0))
    assert (totals.external_hit_rate, totals.external_predicted_hit_rate) == (0.512, 0.64)


def test_what_a_tier_did_not_return_is_not_called_evicted() -> None:
    hits = account(num_prompt_tokens=1000, ceiling=1000, block_size=128, actual=0, confirmed_evicted=1000, elsewhere=Elsewhere(offload=768))
    assert hits.missed == {Cause.OFFLOAD_MISSING: 768, Cause.EVICTED: 128, Cause.TAIL: 104}
