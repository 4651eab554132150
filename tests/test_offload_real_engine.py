"""A real LMCache with a real Valkey behind it, beside a real vLLM that evicts: what is predicted comes, and losing it changes no answer."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys

import aiohttp
import pytest
import redis.asyncio as redis

from benchmarks.history import code
from benchmarks.offload import Played, Player, external_prediction_error_points, offloading
from tests.processes import Process, descendants, wait_until
from tests.real_engine import CACHE_FOLDER
from tests.redis_server import running_redis

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="LMCache is not installed: make offload"),
]

NUM_REQUESTS = 40
NUM_SESSIONS = 8
KV_TOKENS = 4096
NUM_PROBES = 3


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


async def probes_once_found(player: Player, num_attempts: int = 6) -> list[Played]:
    """The probes when vLLM has found the cache server again, which it does at a heartbeat: every five seconds, later on a busy machine."""
    for _ in range(num_attempts):
        await push_out(player)
        found = await probes(player)
        if all(one.external_predicted == one.external > 0 for one in found):
            break
        await asyncio.sleep(6)
    return found


async def scenario(url: str) -> None:
    async with offloading(CACHE_FOLDER, url=url, kv_tokens=KV_TOKENS) as player:
        offload = player.server.books.offload
        assert offload is not None
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


@pytest.mark.case("KVM-13")
def test_external_hits_are_predicted_and_a_dead_cache_server_costs_misses_only() -> None:
    with running_redis() as store:
        asyncio.run(scenario(store.url))
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


async def two_ranks(url: str, kv_tokens: int = 2048) -> None:
    async with offloading(CACHE_FOLDER, url=url, kv_tokens=kv_tokens, tensor_parallel=2) as player, redis.Redis.from_url(url) as store:
        probe = [{"role": "user", "content": " ".join(f"word{number}" for number in range(240))}]
        cold = await player.ask(probe, 4)
        whole = await from_second_level(player, probe, kv_tokens)
        assert whole.external_booked == whole.external > 256
        assert whole.external_predicted in (whole.external, 0)  # 0: after what looked like the second level's end

        keys = [key async for key in store.scan_iter("*")]
        lost = [key for key in keys if rank_of(key) == 1]
        assert 2 * len(lost) == len(keys)
        await store.delete(*lost)
        offload = player.server.books.offload
        assert offload is not None
        assert offload.ranks is not None
        ranks = offload.ranks
        assert (ranks.num_differing, ranks.num_given_up_tokens) == (0, 0)
        half = await from_second_level(player, probe, kv_tokens, 1)
        assert half.external == 0
        assert await asyncio.to_thread(wait_until, lambda: ranks.num_differing > 0, 30)
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
