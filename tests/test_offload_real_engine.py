"""A real LMCache with a real Valkey behind it, beside a real vLLM that evicts: what is predicted comes, and losing it changes no answer."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys

import pytest

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


async def push_out(player: Player) -> None:
    """Long prompts, until the GPU has lost what it had."""
    num_tokens = 0
    while num_tokens < 1.2 * KV_TOKENS:
        one = await player.ask([{"role": "user", "content": code(player.rng, 6_000)}], 1)
        num_tokens += one.num_prompt_tokens


async def probes(player: Player) -> list[Played]:
    """The same prompts whenever it is called."""
    asked = []
    for number in range(NUM_PROBES):
        text = " ".join(f"{number}{word}" for word in range(300))
        asked.append(await player.ask([{"role": "user", "content": text}], 20))
    return asked


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
        await asyncio.sleep(6)  # one heartbeat, by which vLLM finds it again
        await push_out(player)
        again = await probes(player)
        assert all(one.external_predicted == one.external > 0 for one in again)
        assert [one.text for one in again] == [one.text for one in cold]
        assert engines() == before


def test_external_hits_are_predicted_and_a_dead_cache_server_costs_misses_only() -> None:
    with running_redis() as store:
        asyncio.run(scenario(store.url))
    assert not cache_servers()
