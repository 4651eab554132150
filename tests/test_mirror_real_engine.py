"""The mirror beside a real vLLM that evicts: what it predicts is what the engine reports."""

from __future__ import annotations

import asyncio
import contextlib
import random
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest

from agentserve.engines.kv_events import KvEventSubscriber
from benchmarks.cache_truth import read_log
from prefix_cache.blocks import HashChain
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

    async def turn(self, ids: list[int], salt: str | None = None) -> Guess:
        """Append new tokens to `ids`, send them, append the answer."""
        ids += [self.rng.randrange(300, 2000) for _ in range(self.rng.randrange(100, 400))]
        await asyncio.sleep(0.2)  # the events of the turn before are on their way
        chain = HashChain(self.mirror.block_size, (salt or "").encode())
        chain.extend(array("I", ids))
        predicted = self.mirror.predict(chain.hashes, len(ids))
        missed = chain.hashes[predicted // self.mirror.block_size :][:1]
        was_removed = any(map(self.mirror.was_removed, missed))
        body = {"model": self.engine.info.model, "prompt": ids, "max_tokens": 5, "ignore_eos": True, "return_token_ids": True}
        if salt:
            body["cache_salt"] = salt
        async with self.client.post(f"{self.engine.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        actual = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.mirror.learn(chain.hashes, actual, predicted)
        ids += answer["choices"][0]["token_ids"]
        return Guess(predicted, actual, was_removed)


@contextlib.asynccontextmanager
async def playing(engine: RealEngine, *, replays: bool, seed: int) -> AsyncIterator[Player]:
    assert engine.info.block_size is not None
    mirror = Mirror(engine.info.block_size)
    subscriber = KvEventSubscriber(engine.events_endpoint, engine.replay_endpoint if replays else None, "kv-events", mirror)
    await subscriber.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Player(engine, subscriber, client, seed)
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
            for turn in range(2 * NUM_SESSIONS):
                await player.turn(sessions[turn % NUM_SESSIONS])
            await player.subscriber.start()
            await player.turn(sessions[0])
            await asyncio.sleep(1)
            truth = await read_log(small_engine.replay_endpoint)
            held = player.mirror.resident_hashes()
            assert truth.num_removed > 0
            assert len(held & truth.hashes) >= 0.995 * len(held)
            assert len(held & truth.hashes) >= 0.99 * len(truth.hashes)
            assert not player.mirror.is_suspect

    asyncio.run(scenario())
