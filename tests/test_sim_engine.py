"""A simulated engine that serves: the whole server on it, its hits, its events, and its times."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from agentserve.engines import GenerateRequest, Usage
from agentserve.engines.kv_events import KvEventSubscriber
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_wire import COMPLETIONS, GENERATE, Route
from agentserve.errors import EngineRefused
from benchmarks.block_by_block import BlockByBlock
from prefix_cache.blocks import HashChain
from prefix_cache.mirror import Mirror
from replays.sim_engine.app import ServeOptions, SimulatedServer, simulated_server
from replays.sim_engine.chains import TokenChains
from replays.sim_engine.events import TOPIC
from replays.simulator.cost import StepWork
from replays.simulator.engine import Engine
from replays.simulator.pool import Use
from replays.simulator.requests import EngineRequest
from tests.serving import chat, serving

pytestmark = pytest.mark.anyio

BLOCK = 128
FAST = 500.0


@asynccontextmanager
async def engine(model_folder: Path, *, capacity_tokens: int | None = None, speed: float = FAST) -> AsyncIterator[SimulatedServer]:
    options = ServeOptions("m3-mi355x-mxfp4-tp4", model_folder, speed=speed, capacity_tokens=capacity_tokens, steps_at_once=16)
    async with simulated_server(options) as server:
        yield server


@asynccontextmanager
async def client_of(server: SimulatedServer, route: Route | None = None) -> AsyncIterator[VllmEngine]:
    """The server's own client of engines."""
    client = VllmEngine(server.url, route=route)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def turn(client: VllmEngine, ids: list[int], num_output: int, number: int = 0, **more: object) -> tuple[list[int], Usage]:
    """Send ids; the answer's ids and the usage."""
    text = b",".join(b"%d" % id for id in ids)
    request = GenerateRequest(f"r{number}", (text,), len(ids), num_output, {"ignore_eos": True}, **more)  # type: ignore[arg-type]
    answer: list[int] = []
    usage = None
    async with aclosing(client.generate(request)) as chunks:
        async for chunk in chunks:
            answer += chunk.ids
            usage = chunk.usage or usage
    assert usage is not None
    return answer, usage


@pytest.mark.parametrize("route", [COMPLETIONS, GENERATE, None], ids=["completions", "generate", "found"])
async def test_the_servers_client_speaks_with_it_and_hits_whole_blocks_with_the_answer_among_them(
    route: Route | None, model_folder: Path
) -> None:
    async with engine(model_folder) as server, client_of(server, route) as client:
        assert client.info.kv_capacity_tokens == server.engine.options.num_blocks * BLOCK
        prompt = [5 + number % 900 for number in range(1000)]
        answer, usage = await turn(client, prompt, 200)
        assert usage == Usage(1000, 200, 0)
        again, usage = await turn(client, prompt, 200, 1)
        assert again == answer
        # The last token of a prompt is always computed, and only whole blocks are found.
        assert usage.num_cached_tokens == 7 * BLOCK
        _, usage = await turn(client, prompt + answer + [7] * 10, 5, 2)
        # 1199 tokens have been computed: the last one that was generated was not.
        assert usage.num_cached_tokens == 9 * BLOCK
        _, usage = await turn(client, prompt, 5, 3, cache_salt="tenant")
        assert usage.num_cached_tokens == 0


async def test_a_prompt_that_does_not_fit_is_refused_as_vllm_refuses_it(model_folder: Path) -> None:
    async with engine(model_folder, capacity_tokens=64 * BLOCK) as server, client_of(server) as client:
        with pytest.raises(EngineRefused, match="maximum context length") as refused:
            await turn(client, [9] * (64 * BLOCK), 1)
        assert refused.value.code == "context_length_exceeded"


async def test_the_whole_server_on_it_is_exact_and_predicts_every_hit(model_folder: Path) -> None:
    async with engine(model_folder) as simulated:
        publisher = simulated.publisher
        events = {"engine_events": publisher.endpoint, "engine_events_replay": publisher.replay_endpoint}
        server = serving(simulated.url, model_folder, **events)
        served = await asyncio.to_thread(server.__enter__)  # it waits for an engine that lives in this loop
        try:
            messages = [{"role": "system", "content": "You are brief. " * 200}]
            for number in range(4):
                messages.append({"role": "user", "content": f"Question {number}: " + "why? " * 60})
                reply = await chat(served.url, messages, stream=bool(number % 2), max_tokens=150, ignore_eos=True)
                assert reply.status == 200, reply.error
                assert reply.turn == ("exact" if number else "first")
                assert reply.usage is not None
                cached, account = reply.usage["prompt_tokens_details"]["cached_tokens"], reply.usage["agentserve"]
                assert cached == account["predicted_tokens"] == account["ceiling_block_tokens"]
                assert (cached > 0) == (number > 0)
                messages.append(reply.message)
                await asyncio.sleep(0.05)  # the turn's events are on their way
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


async def test_hits_under_eviction_are_the_simulators_and_those_that_the_mirror_expects(model_folder: Path) -> None:
    capacity = 96 * BLOCK
    async with engine(model_folder, capacity_tokens=capacity) as server, client_of(server) as client:
        mirror = Mirror(BLOCK)
        subscriber = KvEventSubscriber(server.publisher.endpoint, server.publisher.replay_endpoint, TOPIC, mirror)
        rng = random.Random(3)
        sessions: list[list[int]] = [[rng.randrange(300, 2000) for _ in range(300)] for _ in range(9)]
        reference = Reference(server)
        predicted: list[int] = []
        actual: list[int] = []
        expected: list[int] = []
        seen: list[int] = []
        reached: dict[int, int] = {}
        """By session: tokens in whole blocks that were computed for it."""
        try:
            for number in range(60):
                if number == 10:  # a late joiner asks for what it has missed
                    await subscriber.start()
                    await subscriber.caught_up()
                ids = sessions[rng.randrange(9)]
                ids += [rng.randrange(300, 2000) for _ in range(rng.randrange(50, 260))]
                chain = HashChain(BLOCK)
                chain.extend(array("I", ids))
                await asyncio.sleep(0.02)  # the events of the turn before are on their way
                seen.append(reached.get(id(ids), 0))
                predicted.append(mirror.predict(chain.hashes, len(ids)))
                answer, usage = await turn(client, ids, 40, number)
                expected.append(reference.serve(ids, answer))
                assert usage.num_cached_tokens is not None
                actual.append(usage.num_cached_tokens)
                ids += answer
                reached[id(ids)] = (len(ids) - 1) // BLOCK * BLOCK
        finally:
            await subscriber.close()
    assert actual == expected
    assert actual[11:] == predicted[11:]
    assert any(0 < hit < len(sessions[0]) for hit in actual)
    assert any(hit < whole for hit, whole in zip(actual[20:], seen[20:], strict=True)), "nothing was evicted"


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, ten seconds at most."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


class Reference:
    """The simulator's scheduler over a pool that goes block by block, one request after the other."""

    def __init__(self, server: SimulatedServer) -> None:
        options = server.engine.options
        self._engine = Engine(options, BlockByBlock(options.num_blocks), server.engine.profile.cost)  # type: ignore[arg-type]
        self._chains = TokenChains(options.block_size)
        self._now = 0.0

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        """Tokens of the prompt that were found."""
        path = self._chains.add(array("I", prompt + answer))
        request = EngineRequest(id(answer), path, len(prompt), len(answer), Use("s"))
        self._engine.add(request, self._now)
        while request.finished is None:
            step = self._engine.start(self._now)
            assert step is not None
            self._now = step.ends
            self._engine.finish(self._now)
        return request.num_hit_blocks * BLOCK


async def test_a_client_that_leaves_gives_its_blocks_back(model_folder: Path) -> None:
    async with engine(model_folder, speed=1.0) as server, client_of(server) as client:
        task = asyncio.create_task(turn(client, [11] * 5000, 5000))
        await until(lambda: bool(server.engine.engine.running))
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not server.engine.engine.running)
        assert server.engine.engine.pool.usage == 0
        assert server.engine.totals.num_aborted == 1
        _, usage = await turn(client, [11] * 400, 2, 1)
        assert usage.num_cached_tokens == 3 * BLOCK


async def test_times_are_those_of_the_model_and_metrics_say_so_under_vllms_names(model_folder: Path) -> None:
    async with engine(model_folder) as server, client_of(server) as client:
        prompt = [13 + number % 700 for number in range(20_000)]
        await turn(client, prompt, 101)
        totals, cost = server.engine.totals, server.engine.profile.cost
        prefill = cost.step_seconds(StepWork(0, 0, 20_000, 20_000 * 20_000 // 2))
        decode = cost.step_seconds(StepWork(1, 20_050, 0, 0))
        assert totals.ttft_seconds == pytest.approx(prefill, rel=0.05)
        assert totals.tpot_seconds == pytest.approx(decode, rel=0.01)
        text = (await client.metrics()).decode()
    assert f'vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m3-mi355x-mxfp4-tp4"}} {totals.ttft_seconds}' in text
    assert 'source="local_compute"} 20000.0' in text


@pytest.mark.parametrize(
    ("profile", "message"), [("m3", "there is no profile 'm3'"), ("m3-mi355x-mxfp4-pd-2tp4-tp4", "prefill and decode apart")]
)
async def test_a_profile_that_cannot_be_served_is_refused_with_the_reason(profile: str, message: str, model_folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        async with simulated_server(ServeOptions(profile, model_folder)):
            raise AssertionError("it was served")


async def test_branches_that_hold_nothing_are_forgotten(model_folder: Path) -> None:
    async with engine(model_folder, capacity_tokens=8 * BLOCK) as server, client_of(server) as client:
        for number in range(270):
            await turn(client, [17 + number, *range(300, 300 + BLOCK)], 1, number)
        assert len(server.engine.chains) < 64
        server.engine.engine.pool.check_integrity()


async def test_a_simulated_second_takes_as_long_as_was_said(model_folder: Path) -> None:
    async with engine(model_folder, speed=2.0) as server, client_of(server) as client:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await turn(client, [19] * 64, 60)
        took = loop.time() - began
        step = server.engine.profile.cost.step_seconds(StepWork(1, 64, 0, 0))
        assert took * 2 >= 60 * step
        assert server.engine.options == replace(server.engine.options, max_fused_steps=16)
