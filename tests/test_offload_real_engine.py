"""A real LMCache with a real Valkey behind it, beside a real vLLM that evicts: what is predicted comes, and losing it changes no answer."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from uuid import uuid4

import aiohttp
import pytest
import redis.asyncio as redis

from agentserve.engines import Engine
from agentserve.engines.vllm import VllmEngine
from benchmarks.history import code
from benchmarks.offload import Played, Player, external_prediction_error_points, offloading
from prefix_cache.tiers.offload import Offload
from tests.processes import Process, descendants, wait_until
from tests.real_engine import CACHE_FOLDER, Generated, RealEngine, generated
from tests.redis_server import running_redis

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed: make offload"),
]

NUM_REQUESTS = 40
NUM_SESSIONS = 8
KV_TOKENS = 4096
NUM_PROBES = 3
BLOCK, CHUNK = 128, 256
CHUNKS = (1, 1, 1, 1, 2, 2, 2, 3)
BEYOND = (-4, -1, 0, 1, 4, 15, 16, 17)
"""Tokens from the end of a chunk."""
NUM_GENERATED = 3
NUM_AT_ONCE = 4


def cache_servers() -> list[Process]:
    """The LMCache servers themselves, without the guard and the shell that started them."""
    return [process for process in descendants(os.getpid()) if process.command.startswith(f"{sys.executable} -m lmcache.cli.main server")]


def engines() -> set[int]:
    return {process.pid for process in descendants(os.getpid()) if "vllm.entrypoints" in process.command}


async def push_out(player: Player, kv_tokens: int = KV_TOKENS) -> None:
    """Long prompts, until the GPU has lost what it had."""
    num_tokens = 0
    while num_tokens < 1.2 * kv_tokens:
        one = await player.ask([{"role": "user", "content": code(player.rng, 3 * kv_tokens // 2)}], 1)
        num_tokens += one.num_prompt_tokens


async def probes(player: Player) -> list[Played]:
    """The same prompts whenever it is called."""
    asked = []
    for number in range(NUM_PROBES):
        text = " ".join(f"{number}{word}" for word in range(300))
        asked.append(await player.ask([{"role": "user", "content": text}], 20))
    return asked


async def generate(engine: Engine, name: str, ids: Sequence[int]) -> Generated:
    """A few tokens after exactly these."""
    return await generated(engine, f"{name}-{uuid4().hex}", ids, NUM_GENERATED)


def edge_prompts() -> list[list[int]]:
    """Of all lengths around the ends of chunks, none with a beginning of another."""
    rng = random.Random(12)
    lengths = [CHUNK * chunks + beyond for chunks in CHUNKS for beyond in BEYOND]
    return [[rng.randrange(900) for _ in range(length)] for length in lengths]


async def passed_over(prompts: Sequence[list[int]], ask: Callable[[Sequence[int]], Awaitable[Generated]]) -> list[Generated]:
    """What is generated for each prompt, a few at once."""
    groups = [prompts[start : start + NUM_AT_ONCE] for start in range(0, len(prompts), NUM_AT_ONCE)]
    return [one for group in groups for one in await asyncio.gather(*map(ask, group))]


async def chunk_edges(offloaded: Engine, plain: Engine, block_size: int) -> None:
    """Chunks loaded behind blocks that the engine has itself, and a last one that ends where the prompt does: the same tokens come out.

    Each pass over the prompts, in one order, pushes out what the pass before left on the GPU.
    """
    prompts = edge_prompts()

    async def behind_own_blocks(prompt: Sequence[int]) -> Generated:
        # An odd number of blocks, of which a chunk has two: it is then loaded from its middle on.
        num_own = block_size * (1 if len(prompt) <= 2 * CHUNK else 3)
        await generate(offloaded, "own", prompt[: num_own + 1])
        return await generate(offloaded, "behind", prompt)

    expected = await passed_over(prompts, partial(generate, plain, "plain"))
    stored = await passed_over(prompts, partial(generate, offloaded, "stored"))
    loaded = await passed_over(prompts, partial(generate, offloaded, "loaded"))
    behind_own = await passed_over(prompts, behind_own_blocks)
    for passed in (stored, loaded, behind_own):
        assert [each.ids for each in passed] == [each.ids for each in expected]
    assert not any(each.num_cached_tokens for each in stored)
    whole = [min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1) for prompt in prompts]
    for passed in (loaded, behind_own):
        # A busy machine's vLLM takes the cache server for dead now and then, and computes instead.
        assert sum(each.num_cached_tokens == size > 0 for each, size in zip(passed, whole, strict=True)) >= 0.7 * len(prompts)


async def probes_once_found(player: Player, num_attempts: int = 6) -> list[Played]:
    """The probes when vLLM has found the cache server again, which it does at a heartbeat: every five seconds, later on a busy machine."""
    for _ in range(num_attempts):
        await push_out(player)
        found = await probes(player)
        if all(one.external_predicted == one.external > 0 for one in found):
            break
        await asyncio.sleep(6)
    return found


async def scenario(url: str, plain: Engine) -> None:
    async with offloading(CACHE_FOLDER, url=url, kv_tokens=KV_TOKENS) as player:
        offload = player.server.books.offload
        assert isinstance(offload, Offload)
        player.open(NUM_SESSIONS)
        played = await player.play(NUM_REQUESTS)
        assert sum(one.external for one in played) > 0
        assert [one.external_booked for one in played] == [one.external for one in played]
        assert external_prediction_error_points(played) <= 2

        cold = await probes(player)
        await push_out(player)
        warm = await probes(player)
        assert all(one.external_predicted == one.external > 0 for one in warm)
        assert [one.text for one in warm] == [one.text for one in cold]

        await chunk_edges(player.server.engine, plain, BLOCK)

        before = engines()
        await push_out(player)
        (server,) = cache_servers()
        os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.to_thread(wait_until, lambda: not offload.is_up, 5)
        without = await probes(player)
        assert [one.text for one in without] == [one.text for one in cold]
        assert all((one.external_predicted, one.external) == (0, 0) for one in without)
        # What was a whole chunk is missing; behind the last whole chunk there is at most one block more.
        assert all(one.missed["offload_missing"] > 0 and one.missed.get("evicted", 0) <= 128 for one in without)
        assert all(set(one.missed) <= {"offload_missing", "evicted", "tail"} for one in without)

        assert await asyncio.to_thread(wait_until, lambda: offload.is_up, 60)
        again = await probes_once_found(player)
        assert all(one.external_predicted == one.external > 0 for one in again)
        assert [one.text for one in again] == [one.text for one in cold]
        assert engines() == before


@pytest.mark.case("KVM-12", "KVM-13")
@pytest.mark.timeout(600)
def test_external_hits_are_predicted_and_a_dead_cache_server_costs_misses_only(small_engine: RealEngine) -> None:
    async def beside_a_plain_engine(url: str) -> None:
        plain = VllmEngine(small_engine.url)
        await plain.start()
        try:
            await scenario(url, plain)
        finally:
            await plain.close()

    with running_redis() as store:
        asyncio.run(beside_a_plain_engine(store.url))
    assert not cache_servers()


def rank_of(key: bytes) -> int:
    """LMCache's key of a shard: model @ world size, rank, and their local forms in two hexadecimal digits each @ chunk hash …"""
    return int(key.split(b"@")[1][2:4], 16)


async def forget_memory() -> None:
    """The cache server's own memory goes; the second level stays."""
    (server,) = cache_servers()
    words = server.command.split()
    port = words[words.index("--http-port") + 1]
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}/cache/clear") as response:
        response.raise_for_status()


async def from_second_level(player: Player, probe: list[dict[str, str]], kv_tokens: int, num_attempts: int = 4) -> Played:
    """The probe once more when only the second level has it. On a busy machine vLLM takes the cache server for dead now and then."""
    for _ in range(num_attempts):
        await push_out(player, kv_tokens)
        await forget_memory()
        found = await player.ask(probe, 4)
        if found.external and found.external_booked:  # it was looked up, and loaded too
            break
        await asyncio.sleep(6)  # a heartbeat
    return found


async def keys_of_second_rank(store: redis.Redis) -> list[bytes]:
    """Those of all shards, once both ranks have written what they have."""
    async with asyncio.timeout(60):
        while True:
            keys = [key async for key in store.scan_iter("*")]
            lost = [key for key in keys if rank_of(key) == 1]
            if lost and 2 * len(lost) == len(keys):
                return lost
            await asyncio.sleep(0.1)


async def two_ranks(url: str, kv_tokens: int = 2048) -> None:
    async with offloading(CACHE_FOLDER, url=url, kv_tokens=kv_tokens, tensor_parallel=2) as player, redis.Redis.from_url(url) as store:
        probe = [{"role": "user", "content": " ".join(f"word{number}" for number in range(240))}]
        cold = await player.ask(probe, 4)
        whole = await from_second_level(player, probe, kv_tokens)
        assert whole.external_booked == whole.external > 256
        assert whole.external_predicted in (whole.external, 0)  # 0: after what looked like the second level's end

        lost = await keys_of_second_rank(store)
        offload = player.server.books.offload
        assert isinstance(offload, Offload)
        assert offload.ranks is not None
        ranks = offload.ranks
        assert (ranks.num_differing, ranks.num_given_up_tokens) == (0, 0)
        for _ in range(4):  # until vLLM, which may take the cache server for dead, has asked it
            await store.delete(*lost)
            half = await from_second_level(player, probe, kv_tokens, 1)
            assert half.external == 0
            if await asyncio.to_thread(wait_until, lambda: ranks.num_differing > 0, 10):
                break
        assert ranks.num_differing > 0
        assert ranks.num_given_up_tokens >= whole.external
        assert ranks.num_lookups > ranks.num_differing
        assert half.missed["offload_missing"] == whole.external

        again = await from_second_level(player, probe, kv_tokens)  # computed and stored again, on both ranks
        assert again.external == whole.external
        assert {one.text for one in (whole, half, again)} == {cold.text}
        assert "agentserve_offload_differing_lookups_total" in player.server.metrics.text().decode()


@pytest.mark.case("KVM-10")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_chunk_that_one_of_two_ranks_has_lost_is_no_hit() -> None:
    with running_redis() as store:
        asyncio.run(two_ranks(store.url))
    assert not cache_servers()
