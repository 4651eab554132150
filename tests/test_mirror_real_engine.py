"""The mirror beside a real vLLM that evicts: what it predicts is what the engine reports."""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import pytest

from agentserve.engines.kv_events import KvEventSubscriber
from benchmarks.cache_truth import read_log
from prefix_cache.blocks import BlockHash, HashChain
from prefix_cache.mirror import Mirror
from tests.real_engine import RealEngine

NUM_SESSIONS = 6
NUM_TURNS = 8


@dataclass(frozen=True, slots=True)
class Guess:
    predicted: int
    actual: int
    was_announced_removed: bool
    """Of the first block that was missed, before the request was sent."""


class Player:
    """Plays sessions of random tokens, one turn after the other, and notes predictions and hits."""

    def __init__(self, engine: RealEngine, subscriber: KvEventSubscriber, client: aiohttp.ClientSession, seed: int) -> None:
        self.engine = engine
        self.subscriber = subscriber
        self.mirror = subscriber.mirror
        self.client = client
        self.rng = random.Random(seed)
        self.is_following = True
        """Whether the engine's events arrive."""

    async def joined(self) -> None:
        """Return when an event has come: what an engine says before somebody listens is not said again."""
        async with asyncio.timeout(60):
            is_heard = False
            while not is_heard:
                ids = self._new_ids(self.mirror.block_size + 1)
                await self._ask(ids, None)
                is_heard = await self._has_announced(self._chain(ids, None), seconds=1)

    async def turn(self, ids: list[int], salt: str | None = None) -> Guess:
        """Append new tokens to `ids`, send them, append the answer, and wait for its events."""
        ids += self._new_ids(self.rng.randrange(100, 400))
        chain = self._chain(ids, salt)
        predicted = self.mirror.predict(chain.hashes, len(ids))
        missed = chain.hashes[predicted // self.mirror.block_size :][:1]
        was_removed = any(map(self.mirror.was_removed, missed))
        actual, answer_ids = await self._ask(ids, salt)
        self.mirror.learn(chain.hashes, actual, predicted)
        ids += answer_ids
        if self.is_following:
            assert await self._has_announced(self._chain(ids[:-1], salt), seconds=30)
        return Guess(predicted, actual, was_removed)

    def _new_ids(self, num_ids: int) -> list[int]:
        return [self.rng.randrange(300, 2000) for _ in range(num_ids)]

    def _chain(self, ids: list[int], salt: str | None) -> HashChain:
        chain = HashChain(self.mirror.block_size, (salt or "").encode())
        chain.extend(array("I", ids))
        return chain

    async def _ask(self, ids: list[int], salt: str | None) -> tuple[int, list[int]]:
        """Cached tokens, and the generated ones, the last of which has no KV."""
        body = {"model": self.engine.info.model, "prompt": ids, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        if salt:
            body["cache_salt"] = salt
        async with self.client.post(f"{self.engine.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]

    async def _has_announced(self, chain: HashChain, seconds: float) -> bool:
        """Whether an event tells of the last block of `chain` within so many seconds: those before it, and removals, have come by then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._holds(chain.hashes):  # noqa: ASYNC110 - the mirror tells nobody
                    await asyncio.sleep(0.01)
                return True
        return False

    def _holds(self, hashes: Sequence[BlockHash]) -> bool:
        return self.mirror.match(hashes) == len(hashes) and not any(map(self.mirror.is_only_learned, hashes[-1:]))


@contextlib.asynccontextmanager
async def playing(engine: RealEngine, *, replays: bool, seed: int) -> AsyncIterator[Player]:
    assert engine.info.block_size is not None
    mirror = Mirror(engine.info.block_size)
    subscriber = KvEventSubscriber(engine.events_endpoint, engine.replay_endpoint if replays else None, "kv-events", mirror)
    await subscriber.start()
    try:
        async with aiohttp.ClientSession() as client:
            player = Player(engine, subscriber, client, seed)
            await player.joined()
            yield player
    finally:
        await subscriber.close()


@pytest.mark.case("UPS-06")
def test_predictions_equal_the_hits_of_an_engine_that_evicts(small_engine: RealEngine) -> None:
    async def scenario() -> None:
        async with playing(small_engine, replays=True, seed=1) as player:
            sessions: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
            guesses = [await player.turn(player.rng.choice(sessions)) for _ in range(NUM_SESSIONS * NUM_TURNS)]
            assert [guess.predicted for guess in guesses] == [guess.actual for guess in guesses]
            assert sum(guess.actual for guess in guesses) > 0
            assert any(guess.was_announced_removed for guess in guesses)
            assert (player.mirror.num_contradictions, player.mirror.is_suspect) == (0, False)

    asyncio.run(scenario())


@pytest.mark.case("PAR-07")
def test_salted_sessions_are_predicted_and_share_nothing(small_engine: RealEngine) -> None:
    async def scenario() -> None:
        async with playing(small_engine, replays=True, seed=2) as player:
            ids: list[int] = []
            await player.turn(ids, salt="tenant")
            again = await player.turn(ids, salt="tenant")
            other = await player.turn(ids, salt="other")
            assert again.predicted == again.actual > 0
            assert other.predicted == other.actual == 0

    asyncio.run(scenario())


@pytest.mark.case("KVM-05")
def test_a_mirror_that_joins_without_a_replay_is_right_from_the_second_turn_on(small_engine: RealEngine) -> None:
    async def scenario() -> None:
        sessions: list[list[int]] = [[] for _ in range(3)]
        async with playing(small_engine, replays=True, seed=3) as before:
            for ids in sessions:
                await before.turn(ids)
        async with playing(small_engine, replays=False, seed=4) as player:
            first = [await player.turn(ids) for ids in sessions]
            later = [await player.turn(ids) for _ in range(2) for ids in sessions]
            assert player.mirror.is_suspect
            assert any(guess.actual > guess.predicted for guess in first)
            assert all(abs(guess.actual - guess.predicted) <= player.mirror.block_size for guess in later)

    asyncio.run(scenario())


def test_after_lost_events_the_mirror_holds_exactly_what_the_engines_log_says(small_engine: RealEngine) -> None:
    async def scenario() -> None:
        async with playing(small_engine, replays=True, seed=5) as player:
            sessions: list[list[int]] = [[] for _ in range(NUM_SESSIONS)]
            for turn in range(2 * NUM_SESSIONS):
                await player.turn(sessions[turn % NUM_SESSIONS])
            await player.subscriber.close()
            player.is_following = False
            for turn in range(2 * NUM_SESSIONS):
                await player.turn(sessions[turn % NUM_SESSIONS])
            await player.subscriber.start()
            await player.joined()  # which shows the gap
            player.is_following = True
            await player.turn(sessions[0])
            truth = await read_log(small_engine.replay_endpoint)
            held = player.mirror.resident_hashes()
            assert truth.num_removed > 0
            assert len(held & truth.hashes) >= 0.995 * len(held)
            assert len(held & truth.hashes) >= 0.99 * len(truth.hashes)
            assert not player.mirror.is_suspect

    asyncio.run(scenario())
