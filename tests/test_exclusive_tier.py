"""The exclusive tier as its events tell of it: what it will bring, why it did not, and what is no more known of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from prefix_cache.blocks import HashChain
from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from prefix_cache.hits import Cause
from prefix_cache.mirror import Mirror
from prefix_cache.tiers import Tier
from prefix_cache.tiers.exclusive import ExclusiveOffload
from tests.test_causes import BLOCK, Books

IDS = list(range(20 * BLOCK))


def gone(names: Sequence[int | bytes]) -> BlockRemoved:
    return BlockRemoved([*names])


def kept(names: Sequence[int | bytes]) -> BlockStored:
    """As the plugin announces it."""
    return BlockStored([*names], None, [], 0, medium="CPU")


def left(names: Sequence[int | bytes]) -> BlockRemoved:
    return BlockRemoved([*names], medium="CPU")


def again(names: Sequence[int | bytes], start: int) -> BlockStored:
    """What the GPU has loaded or computed again, from block `start` on."""
    stop = start + len(names)
    return BlockStored([*names], start or None, IDS[start * BLOCK : stop * BLOCK], BLOCK)


class Tiered(Books):
    """Of 20 blocks, named 1 to 20, the GPU keeps 5 and the tier the 7 behind those."""

    def __init__(self) -> None:
        super().__init__(follows_tier=True)
        self.ask(IDS, 0)
        self.names = self.stored(IDS)
        self.tell(gone(self.names[:4:-1]), kept(self.names[11:4:-1]))

    @property
    def tier(self) -> ExclusiveOffload:
        tier = self.books.offload
        assert isinstance(tier, ExclusiveOffload)
        return tier


def test_the_tier_continues_what_the_gpu_has_and_is_booked_apart() -> None:
    books = Tiered()
    hits = books.ask(IDS, 12 * BLOCK)
    assert (hits.predicted, hits.external_predicted, hits.external) == (5 * BLOCK, 7 * BLOCK, 7 * BLOCK)
    assert hits.missed == {Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}  # it was never given those
    assert books.tier.num_resident_tokens == 7 * BLOCK
    assert (books.mirror.num_under_predictions, books.mirror.num_over_predictions) == (0, 0)
    _, external = books.begin(IDS[: 8 * BLOCK])[0].predicted, books.begin(IDS[: 8 * BLOCK])[0].external
    assert external is not None
    assert (external.num_tokens, external.tier) == (2 * BLOCK, Tier.DRAM)  # never the last token


def test_what_is_loaded_leaves_and_comes_again_when_the_gpu_loses_it() -> None:
    books = Tiered()
    books.tell(again(books.names[5:12], 5), left(books.names[5:12]))
    hits = books.ask(IDS, 12 * BLOCK)
    assert (hits.predicted, hits.external_predicted, hits.external) == (12 * BLOCK, 0, 0)
    assert books.tier.num_resident_tokens == 0
    books.tell(gone(books.names[11:7:-1]), kept(books.names[11:7:-1]))
    hits = books.ask(IDS, 12 * BLOCK)
    assert (hits.predicted, hits.external_predicted, hits.external) == (8 * BLOCK, 4 * BLOCK, 4 * BLOCK)


def test_what_the_tier_has_lost_is_missing_there_until_the_gpu_has_had_it_again() -> None:
    books = Tiered()
    books.tell(left(books.names[11:8:-1]))
    hits = books.ask(IDS, 9 * BLOCK)
    assert hits.external_predicted == hits.external == 4 * BLOCK
    assert hits.missed == {Cause.OFFLOAD_MISSING: 3 * BLOCK, Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}
    books.tell(left(books.names[8:4:-1]))
    hits = books.ask(IDS, 5 * BLOCK)
    assert hits.missed == {Cause.OFFLOAD_MISSING: 7 * BLOCK, Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}
    books.tell(again(books.names[5:12], 5))
    books.tell(gone(books.names[11:4:-1]))  # and the tier did not take them this time
    hits = books.ask(IDS, 5 * BLOCK)
    assert hits.missed == {Cause.EVICTED: 14 * BLOCK, Cause.TAIL: BLOCK}


def test_what_left_the_tier_after_it_was_promised_is_missing_there() -> None:
    books = Tiered()
    begun = books.begin(IDS)
    books.tell(left(books.names[11:4:-1]))
    hits = books.end(IDS, begun, 5 * BLOCK)
    assert hits.missed == {Cause.OFFLOAD_MISSING: 7 * BLOCK, Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}
    assert not books.tier.is_declining


def test_what_left_the_gpu_after_it_was_promised_is_evicted_unless_the_tier_brought_it() -> None:
    for cached, missed in ((2 * BLOCK, 17 * BLOCK), (12 * BLOCK, 7 * BLOCK)):
        books = Tiered()
        begun = books.begin(IDS)
        books.tell(gone(books.names[4:1:-1]), *([kept(books.names[4:1:-1])] if cached > 2 * BLOCK else []))
        hits = books.end(IDS, begun, cached)
        assert hits.missed == {Cause.EVICTED: missed, Cause.TAIL: BLOCK}
        assert hits.predicted == 5 * BLOCK


@pytest.mark.parametrize("is_over", [False, True])
def test_a_tier_that_leaves_what_it_has_is_the_cause_and_is_expected_to(is_over: bool) -> None:
    """`is_over`: the events of the end of the request, by which the tier's copies go, are there before its answer is booked."""
    books = Tiered()
    declined = {Cause.OFFLOAD_DECLINED: 7 * BLOCK, Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}

    def turn(cached: int) -> int | None:
        begun = books.begin(IDS)
        back, over = again(books.names[5:12], 5), left(books.names[5:12])
        if cached > 5 * BLOCK:
            books.tell(back, over)
        else:
            books.tell(back)
            if is_over:
                books.tell(over)
        hits = books.end(IDS, begun, cached)
        assert hits.missed == (declined if cached == 5 * BLOCK else {Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK})
        if cached == 5 * BLOCK and not is_over:
            books.tell(over)
        books.tell(gone(books.names[11:4:-1]), kept(books.names[11:4:-1]))
        return hits.external_predicted

    assert [turn(5 * BLOCK) for _ in range(4)] == [7 * BLOCK, 7 * BLOCK, 0, 0]
    assert [turn(cached * BLOCK) for cached in (12, 5, 12, 12, 12)] == [0, 0, 0, 0, 7 * BLOCK]  # one load is a measurement


def test_what_was_lost_just_before_it_was_computed_again_is_not_taken_for_declined() -> None:
    books = Tiered()
    for is_told in (True, False):  # in one batch; not yet at all
        begun = books.begin(IDS)
        if is_told:
            books.tell(again(books.names[5:12], 5), left(books.names[5:12]))
        hits = books.end(IDS, begun, 5 * BLOCK)
        assert hits.missed == {Cause.OFFLOAD_MISSING: 7 * BLOCK, Cause.EVICTED: 7 * BLOCK, Cause.TAIL: BLOCK}
        assert not books.tier.is_declining
        books.tell(gone(books.names[11:4:-1]), kept(books.names[11:4:-1]))


def chain(ids: list[int]) -> Sequence[bytes]:
    hashed = HashChain(BLOCK)
    hashed.extend(array("I", ids))
    return hashed.hashes


def fed() -> tuple[Mirror, ExclusiveOffload]:
    mirror = Mirror(BLOCK)
    tier = ExclusiveOffload(mirror)
    mirror.apply(0, EventBatch(0.0, [BlockStored([*range(1, 21)], None, IDS, BLOCK)]))
    mirror.apply(1, EventBatch(1.0, [gone([20, 19, 18]), kept([20, 19, 18])]))
    assert tier.predict(chain(IDS), len(IDS) + 1, 17 * BLOCK).num_tokens == 3 * BLOCK
    return mirror, tier


@pytest.mark.parametrize("how", ["reset", "restart", "lost batch"])
def test_with_the_cache_the_tier_is_forgotten(how: str) -> None:
    mirror, tier = fed()
    if how == "reset":
        mirror.apply(2, EventBatch(2.0, [AllBlocksCleared(), BlockStored([1], None, IDS[:BLOCK], BLOCK)]))
    elif how == "restart":
        mirror.apply(0, EventBatch(9.0, []))
    else:
        mirror.lose(2)
    assert tier.num_resident_tokens == 0
    assert tier.predict(chain(IDS), len(IDS) + 1, 17 * BLOCK).num_given_tokens == 0


def test_a_doubt_about_the_gpu_that_is_explained_costs_nothing_of_the_tier() -> None:
    mirror, tier = fed()
    mirror.learn(chain(IDS), 3 * BLOCK, 17 * BLOCK)
    suspect = [mirror.is_suspect]
    mirror.apply(2, EventBatch(2.0, [gone([*range(17, 3, -1)]), kept([*range(17, 3, -1)])]))
    suspect.append(mirror.is_suspect)
    assert suspect == [True, False]
    assert tier.predict(chain(IDS), len(IDS) + 1, 3 * BLOCK).num_tokens == 17 * BLOCK
    mirror.learn(chain(IDS), 0, 3 * BLOCK)
    for number in range(3, 3 + 16):  # nothing explains this one
        assert tier.num_resident_tokens == 17 * BLOCK
        mirror.apply(number, EventBatch(float(number), []))
    assert tier.num_resident_tokens == 0


def test_names_that_nobody_knows_are_there_and_match_nothing() -> None:
    mirror, tier = fed()
    mirror.apply(2, EventBatch(2.0, [kept([77, b"\x00" * 31 + b"\x4e"])]))
    assert (tier.num_resident_tokens, tier.num_blocks_unknown) == (5 * BLOCK, 2)
    mirror.apply(3, EventBatch(3.0, [left([77, 78, 79])]))
    assert (tier.num_resident_tokens, tier.num_blocks_unknown) == (3 * BLOCK, 0)


def test_a_copy_that_leaves_while_another_stays_is_known_by_the_one_that_stays() -> None:
    mirror, tier = fed()
    mirror.apply(2, EventBatch(2.0, [BlockStored([1, 2], None, IDS[: 2 * BLOCK], BLOCK)]))
    mirror.apply(3, EventBatch(3.0, [gone([2]), kept([2])]))
    assert mirror.match(chain(IDS)) == 17
    assert tier.predict(chain(IDS), len(IDS) + 1, BLOCK).num_tokens == BLOCK
    assert tier.num_blocks_unknown == 0


def test_what_is_followed_is_bounded() -> None:
    mirror = Mirror(BLOCK)
    tier = ExclusiveOffload(mirror, max_blocks=4)
    mirror.apply(0, EventBatch(0.0, [BlockStored([*range(1, 21)], None, IDS, BLOCK)]))
    mirror.apply(1, EventBatch(1.0, [gone([*range(20, 10, -1)]), kept([*range(20, 10, -1)])]))
    assert tier.num_resident_tokens == 4 * BLOCK
    assert tier.predict(chain(IDS), len(IDS) + 1, 10 * BLOCK).num_tokens == 4 * BLOCK
