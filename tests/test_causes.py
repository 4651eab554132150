"""Every cause of a miss, in a turn in which it really occurs: what the engine computed again, and why."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.cache import CacheBooks, Estimate, Sent
from agentserve.nodes import Node
from agentserve.prompt import FlatPrompt
from agentserve.sessions import Relation, Session, TurnKind
from model.conversation import Head
from prefix_cache.events import BlockRemoved, BlockStored, EventBatch
from prefix_cache.hits import Cause, Elsewhere, TurnHits, account
from prefix_cache.in_flight import InFlight
from prefix_cache.mirror import Mirror
from prefix_cache.tiers.exclusive import ExclusiveOffload
from tests.scripted import assert_nothing_is_held
from tests.serving import Reply, Served, chat, serving
from tests.upstream import FormatRenderer, KvModel, Script, Upstream, UsageOverride, in_thread

BLOCK = 32
HEAD = {"role": "system", "content": "You are the coding agent of a shop.\n" * 60}

tokens = st.integers(-50, 2000)


@given(
    st.builds(
        account,
        num_prompt_tokens=st.integers(0, 1500),
        ceiling=tokens,
        block_size=st.none() | st.sampled_from([1, 16, 128, 4096]),
        actual=st.none() | tokens,
        history_tokens=tokens,
        shared_tokens=tokens,
        volatile_tokens=tokens,
        confirmed_evicted=st.none() | tokens,
        in_flight=st.none() | tokens,
        elsewhere=st.builds(Elsewhere, tokens, tokens, tokens, tokens),
        recomputed_tokens=tokens,
        recomputed_in_gap=st.booleans(),
    )
)
def test_all_causes_together_add_up_to_what_was_missed(hits: TurnHits) -> None:
    if hits.actual is not None:
        assert hits.missed is not None
        assert sum(hits.missed.values()) == hits.num_prompt_tokens - hits.actual
        assert all(count > 0 for count in hits.missed.values())
    assert hits.num_recomputed_tokens >= 0


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def missed(reply: Reply) -> dict[str, int]:
    """The causes of a turn, after a look at their sum."""
    assert reply.usage is not None, reply
    causes: dict[str, int] = reply.usage["agentserve"].get("missed_tokens", {})
    assert sum(causes.values()) == reply.usage["prompt_tokens"] - reply.usage["prompt_tokens_details"]["cached_tokens"]
    return causes


@contextmanager
def scripted(renderer: FormatRenderer, model_folder: Path, kv: KvModel, **settings: Any) -> Iterator[tuple[Upstream, Served]]:
    """A server that follows the events of a scripted engine."""
    with in_thread(Upstream(renderer=renderer, kv=kv)) as upstream:
        assert upstream.engine.events is not None
        events = {"engine_events": upstream.engine.events.endpoint, "engine_events_replay": upstream.engine.events.replay_endpoint}
        with serving(upstream.url, model_folder, **events, **settings) as served:
            yield upstream, served
            assert_nothing_is_held(served)
            assert len(served.server.books.in_flight) == 0


@pytest.mark.anyio
async def test_a_twin_that_is_sent_while_its_head_is_computed_misses_it_in_flight(renderer: FormatRenderer, model_folder: Path) -> None:
    kv = KvModel(num_blocks=4096, block_size=BLOCK, prefill_tokens_per_second=2000, max_num_batched_tokens=BLOCK)
    with scripted(renderer, model_folder, kv, alignment_twin_blocks=0) as (_, served):  # else the twin would wait
        first = asyncio.create_task(chat(served.url, [HEAD, user("first " * 30)], stream=False))
        await asyncio.sleep(0.1)
        twin = await chat(served.url, [HEAD, user("second " * 30)], stream=False)
        assert set(missed(await first)) == {"new"}
        causes = missed(twin)
        assert causes["in_flight"] > 3 * BLOCK
        assert causes["in_flight"] % BLOCK == 0
        assert causes["new"] > 30
        later = await chat(served.url, [HEAD, user("third " * 30)], stream=False)
        assert set(missed(later)) <= {"new", "tail"}


@pytest.mark.anyio
async def test_what_another_key_has_computed_is_missed_for_isolation(renderer: FormatRenderer, model_folder: Path) -> None:
    kv = KvModel(num_blocks=4096, block_size=BLOCK)
    with scripted(renderer, model_folder, kv, api_keys=["key-a", "key-b"]) as (_, served):
        asked = [HEAD, user("the same " * 50)]
        mine = await chat(served.url, asked, stream=False, headers={"x-api-key": "key-a"})
        yours = await chat(served.url, asked, stream=False, headers={"x-api-key": "key-b"})
        assert set(missed(mine)) == {"new"}
        causes = missed(yours)
        assert causes["isolation"] == (sum(causes.values()) - 1) // BLOCK * BLOCK
        again = await chat(served.url, asked, stream=False, headers={"x-api-key": "key-b"})
        assert "isolation" not in missed(again)


@pytest.mark.anyio
async def test_keys_that_share_prefixes_miss_nothing_for_isolation(renderer: FormatRenderer, model_folder: Path) -> None:
    kv = KvModel(num_blocks=4096, block_size=BLOCK)
    with scripted(renderer, model_folder, kv, api_keys=["key-a", "key-b"], share_prefixes=True) as (_, served):
        for key in ("key-a", "key-b"):
            reply = await chat(served.url, [HEAD, user("hi")], stream=False, headers={"x-api-key": key})
        assert set(missed(reply)) <= {"tail", "new"}


@pytest.mark.anyio
@pytest.mark.parametrize("counts_last_run", [False, True])
async def test_what_a_preempted_turn_computes_twice_is_told(renderer: FormatRenderer, model_folder: Path, counts_last_run: bool) -> None:
    with scripted(renderer, model_folder, KvModel(num_blocks=4096, block_size=BLOCK)) as (upstream, served):
        history = [HEAD, user("go")]
        first = await chat(served.url, history, stream=True, headers={"x-session-id": "s"})
        await asyncio.sleep(0.1)
        usage = UsageOverride(num_cached_tokens=0) if counts_last_run else UsageOverride()
        upstream.script(Script(say="word " * 30, itl_seconds=0.01, preempt_after_chunks=20, usage=usage))
        more = [*history, first.message, user("on")]
        preempted = await chat(served.url, more, stream=True, headers={"x-session-id": "s"})
        causes, told = missed(preempted), preempted.usage["agentserve"] if preempted.usage else {}
        if counts_last_run:
            assert causes["recomputed"] == told["ceiling_block_tokens"] >= 10 * BLOCK
            assert told.get("recomputed_tokens", 0) < BLOCK * 2
        else:
            assert "recomputed" not in causes
            assert told["recomputed_tokens"] >= 10 * BLOCK
        assert {"evicted", "unknown"}.isdisjoint(causes)
        calm = await chat(served.url, [*more, preempted.message, user("on")], stream=True, headers={"x-session-id": "s"})
        assert calm.usage is not None
        assert "recomputed_tokens" not in calm.usage["agentserve"]


@pytest.mark.anyio
async def test_a_turn_that_queued_is_predicted_as_the_cache_is_when_it_leaves_the_queue(
    renderer: FormatRenderer, model_folder: Path
) -> None:
    kv = KvModel(num_blocks=64, block_size=BLOCK, prefill_tokens_per_second=3000)
    with scripted(renderer, model_folder, kv, limits_running_turns=1) as (upstream, served):
        mine = user("mine " * 600)
        first = await chat(served.url, [mine], stream=False)
        upstream.script(Script(say="word " * 20, itl_seconds=0.05))
        asked = [[user("hold the engine")], [user("other " * 600)], [mine, first.message, user("on")]]
        turns = []
        for messages in asked:  # the last one queues behind the one that takes its blocks
            turns.append(asyncio.create_task(chat(served.url, messages, stream=False)))
            await asyncio.sleep(0.1)
        *_, later = await asyncio.gather(*turns)
        assert later.usage is not None
        assert later.usage["agentserve"]["predicted_tokens"] == later.usage["prompt_tokens_details"]["cached_tokens"]
        assert missed(later)["evicted"] > 0


class Books:
    """The books of one session over a mirror that a test feeds."""

    def __init__(self, lru_blocks: int | None = None, *, follows_tier: bool = False, block_size: int = BLOCK) -> None:
        self.mirror = Mirror(block_size)
        self.books = CacheBooks(
            block_size=block_size,
            ceiling_tokens=100_000,
            mirror=self.mirror,
            offload=ExclusiveOffload(self.mirror) if follows_tier else None,
            lru_blocks=lru_blocks,
        )
        self.prompt = FlatPrompt(block_size)
        self.session = Session("s", None, self.prompt, 0.0, 0.0)
        self._seq = 0

    def tell(self, *events: BlockStored | BlockRemoved) -> None:
        self.mirror.apply(self._seq, EventBatch(float(self._seq), [*events]))
        self._seq += 1

    def stored(self, ids: list[int]) -> list[int | bytes]:
        names: list[int | bytes] = list(range(1, len(ids) // BLOCK + 1))
        self.tell(BlockStored(block_hashes=names, parent_block_hash=None, token_ids=ids[: len(names) * BLOCK], block_size=BLOCK))
        return names

    def ask(self, ids: list[int], cached: int, **known: int) -> TurnHits:
        return self.end(ids, self.begin(ids, **known), cached)

    def begin(self, ids: list[int], **known: int) -> tuple[Estimate, Sent]:
        self.prompt.move_to(Node(None, Head(), array("I", ids)))
        estimate = self.books.estimate(self.prompt, **known)
        return estimate, self.books.send(estimate)

    def end(self, ids: list[int], begun: tuple[Estimate, Sent], cached: int) -> TurnHits:
        estimate, sent = begun
        self.books.prefilled(sent)
        self.books.computed(self.prompt, len(ids))
        return self.books.book(self.session, Relation(TurnKind.FIRST), estimate, sent, cached, self.prompt)


@pytest.mark.parametrize(("known", "cause"), [({"offload": 320}, Cause.OFFLOAD_MISSING), ({"other_replica": 320}, Cause.OTHER_REPLICA)])
def test_what_was_to_come_from_elsewhere_and_did_not_has_its_own_cause(known: dict[str, int], cause: Cause) -> None:
    books, ids = Books(), list(range(640))
    books.ask(ids, 0)
    names = books.stored(ids)
    books.tell(BlockRemoved(block_hashes=names[5:]))
    hits = books.ask(ids, 5 * BLOCK, **known)
    assert hits.missed is not None
    assert hits.missed[cause] == 320 - 5 * BLOCK
    assert hits.missed[Cause.EVICTED] == 640 - BLOCK - 320


@pytest.mark.parametrize(("lru_blocks", "num_left"), [(12, 7), (100, 9), (None, 9)])
def test_a_turn_is_predicted_without_the_blocks_that_a_running_one_will_take(lru_blocks: int | None, num_left: int) -> None:
    books, ids = Books(lru_blocks), list(range(10 * BLOCK))
    books.ask(ids, 0)
    books.stored(ids)
    other = FlatPrompt(BLOCK)
    other.move_to(Node(None, Head(), array("I", range(5000, 5000 + 4 * BLOCK))))
    running = books.books.send(books.books.estimate(other))  # four blocks and the one that it writes to, two of them free
    hits = books.ask(ids, 7 * BLOCK)
    assert hits.predicted == num_left * BLOCK
    assert hits.missed == {Cause.EVICTED: 2 * BLOCK, Cause.TAIL: BLOCK}
    books.books.ended(running)
    assert books.books.demand is None or len(books.books.demand) <= 1  # the answer, whose events have not come


def test_what_a_tier_brings_that_announces_nothing_is_booked_apart_and_not_predicted() -> None:
    books, ids = Books(follows_tier=True), list(range(640))
    books.ask(ids, 0)
    names = books.stored(ids)
    books.tell(BlockRemoved(block_hashes=names[5:]))
    hits = books.ask(ids, 8 * BLOCK)
    assert (hits.predicted, hits.external_predicted, hits.external) == (5 * BLOCK, None, 3 * BLOCK)
    assert hits.missed == {Cause.EVICTED: 640 - BLOCK - 8 * BLOCK, Cause.TAIL: BLOCK}
    assert books.mirror.num_under_predictions == 0


def test_an_answer_ahead_of_the_events_is_booked_as_evicted_and_nothing_is_forgotten() -> None:
    books, ids = Books(), list(range(640))
    books.ask(ids, 0)
    names = books.stored(ids)
    hits = books.ask(ids, 5 * BLOCK)
    assert hits.missed == {Cause.EVICTED: 640 - BLOCK - 5 * BLOCK, Cause.TAIL: BLOCK}
    assert (books.mirror.num_contradictions, books.mirror.is_suspect) == (0, False)
    books.tell(BlockRemoved(block_hashes=names[5:]))
    assert books.ask(ids, 5 * BLOCK).predicted == 5 * BLOCK
    assert (books.mirror.num_over_predictions, books.mirror.num_contradictions) == (1, 0)


def test_a_miss_that_no_event_explains_counts_against_the_mirror_in_the_end() -> None:
    books, ids = Books(), list(range(640))
    books.ask(ids, 0)
    books.stored(ids)
    books.ask(ids, 5 * BLOCK)
    for number in range(16):
        assert books.mirror.num_contradictions == 0
        books.tell(BlockStored(block_hashes=[1000 + number], parent_block_hash=None, token_ids=[number] * BLOCK, block_size=BLOCK))
    books.ask(ids, 5 * BLOCK)
    assert (books.mirror.num_contradictions, books.mirror.is_suspect) == (1, True)


def test_near_capacity_the_books_are_behind_until_the_events_of_an_answer_have_come() -> None:
    books, ids = Books(), list(range(640))
    books.ask(ids, 0)
    assert not books.books.is_behind(640)  # an engine that holds nothing evicts nothing
    names = books.stored(ids)
    longer = [*ids, *range(BLOCK + 1)]
    books.ask(longer, 640)
    assert not books.books.is_behind(6400)
    assert books.books.is_behind(640)
    books.tell(
        BlockStored(block_hashes=[len(names) + 1], parent_block_hash=names[-1], token_ids=longer[640 : 640 + BLOCK], block_size=BLOCK)
    )
    assert not books.books.is_behind(640)
    books.ask(longer, 5 * BLOCK)
    assert books.books.is_behind(640)
    books.tell(BlockRemoved(block_hashes=names[5:]))
    assert not books.books.is_behind(640)


def test_blocks_are_in_flight_from_sending_until_the_prefill_of_all_who_compute_them() -> None:
    flight = InFlight()
    hashes = [bytes([number]) * 16 for number in range(6)]
    one, other = flight.begin(hashes, 0, 4), flight.begin(hashes, 2, 6)
    assert flight.match(hashes, 0, 6) == 6
    flight.end(one)
    flight.end(one)
    assert (flight.match(hashes, 0, 6), flight.match(hashes, 2, 6)) == (0, 6)
    flight.end(other)
    assert (flight.match(hashes, 2, 6), len(flight)) == (2, 0)
