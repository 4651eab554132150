"""Twins: of several turns that need the same uncomputed head, one computes it and the others find it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from admission.twins import TwinGate
from agentserve.twins import TwinRoom
from tests.processes import wait_until
from tests.real_engine import RealEngine
from tests.scripted import assert_nothing_is_held
from tests.serving import Reply, chat, serving
from tests.upstream import FormatRenderer, KvModel, Upstream, in_thread

pytestmark = pytest.mark.anyio


def blocks(text: str) -> list[bytes]:
    """Chained block hashes: each names all up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


# Who is whose twin


def test_a_twin_is_who_needs_blocks_that_another_computes() -> None:
    gate = TwinGate(min_blocks=2)
    gate.enter("a", blocks("headAA"), 1)
    found = gate.twin(blocks("headBB"), 1)
    assert found is not None
    assert (found[0].request_id, found[1]) == ("a", 4)
    assert gate.twin(blocks("headBB"), 2) is not None, "the mirror may know the first of those blocks already"
    assert gate.twin(blocks("headBB"), 3) is None, "one block is not worth a wait"
    assert gate.twin(blocks("headBB"), 0) is None, "what comes before is not being computed by it"
    assert gate.twin(blocks("other"), 1) is None
    assert gate.leave("a")
    assert gate.twin(blocks("headBB"), 1) is None
    assert not gate.leave("a")


def test_of_several_the_one_that_computes_most_is_waited_for() -> None:
    gate = TwinGate(min_blocks=1)
    for name, text in (("short", "heX"), ("long", "headX"), ("other", "Xead")):
        gate.enter(name, blocks(text), 0)
    for text, leader, end in (("headB", "long", 4), ("heXB", "short", 3), ("headXXXX", "long", 5)):
        found = gate.twin(blocks(text), 0)
        assert found is not None
        assert (found[0].request_id, found[1]) == (leader, end)


def test_blocks_that_join_the_chain_later_are_not_being_computed() -> None:
    gate = TwinGate(min_blocks=1)
    growing = blocks("head")
    gate.enter("a", growing, 0)
    growing += blocks("headmore")[4:]
    found = gate.twin(blocks("headmore"), 0)
    assert found is not None
    assert found[1] == 4


def test_without_a_least_number_nobody_waits() -> None:
    gate = TwinGate(min_blocks=0)
    gate.enter("a", blocks("head"), 0)
    assert (gate.num_leads, gate.twin(blocks("head"), 0)) == (0, None)


# Waiting


class Holds:
    def __init__(self, limit_seconds: float = 5.0) -> None:
        self.ends: list[bool] = []
        self.gate = TwinGate(min_blocks=1)
        clock = asyncio.get_running_loop().time
        self.room = TwinRoom(self.gate, limit_seconds=limit_seconds, clock=clock, held=lambda _, computed: self.ends.append(computed))


async def test_a_turn_waits_until_its_twin_has_the_head_and_is_told_how_far() -> None:
    holds = Holds()
    with holds.room.computing("a", blocks("headA"), 0):
        waiting = asyncio.create_task(holds.room.wait(blocks("headB"), 0))
        await asyncio.sleep(0.01)
        assert (waiting.done(), holds.room.num_held) == (False, 1)
        holds.room.computed("a")
        assert await waiting == 4
    assert (holds.ends, holds.room.num_held, holds.gate.num_leads) == ([True], 0, 0)


async def test_a_twin_that_breaks_off_wakes_those_who_wait() -> None:
    holds = Holds()

    async def breaks_off() -> None:
        with holds.room.computing("a", blocks("head"), 0):
            await asyncio.sleep(0.02)
            raise RuntimeError

    leader = asyncio.create_task(breaks_off())
    await asyncio.sleep(0.01)
    assert await holds.room.wait(blocks("head"), 0) == 4
    with pytest.raises(RuntimeError):
        await leader


async def test_the_wait_is_bounded_in_all() -> None:
    holds = Holds(limit_seconds=0.05)
    with holds.room.computing("a", blocks("headA"), 0):
        assert await asyncio.wait_for(holds.room.wait(blocks("headB"), 0), 1) == 0
    assert holds.ends == [False]


async def test_who_leaves_while_waiting_leaves_nothing() -> None:
    holds = Holds()
    with holds.room.computing("a", blocks("head"), 0):
        waiting = asyncio.create_task(holds.room.wait(blocks("head"), 0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert holds.room.num_held == 0
    assert (holds.ends, holds.gate.num_leads) == ([], 0)


async def test_who_needs_nothing_that_is_being_computed_goes_at_once() -> None:
    holds = Holds()
    with holds.room.computing("a", blocks("head"), 0):
        assert await holds.room.wait(blocks("other"), 0) == 0
    assert holds.ends == []


# The server

HEAD_TOKENS = 8_000
NUM_TWINS = 4


def head(about: str = "") -> dict[str, Any]:
    return {
        "role": "system",
        "content": about + "".join(f"Rule {number}: keep module {number * 7919 % 1000} tidy.\n" for number in range(700)),
    }


async def ask_twins(url: str, about: str = "") -> list[Reply]:
    asked = (
        chat(url, [head(about), {"role": "user", "content": f"Agent {n}, begin."}], stream=True, max_tokens=4) for n in range(NUM_TWINS)
    )
    return await asyncio.gather(*asked)


def computed_tokens(replies: list[Reply]) -> list[int]:
    """Prompt tokens that the engine did not take from its cache, the most first."""
    assert all(reply.usage is not None for reply in replies)
    usages = [reply.usage for reply in replies if reply.usage is not None]
    assert min(usage["prompt_tokens"] for usage in usages) > HEAD_TOKENS
    return sorted((usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages), reverse=True)


@pytest.mark.case("SES-06")
@pytest.mark.parametrize("twin_blocks", [8, 0])
async def test_four_twins_compute_a_cold_head_once(renderer: FormatRenderer, model_folder: Path, twin_blocks: int) -> None:
    kv = KvModel(num_blocks=4096, block_size=128, prefill_tokens_per_second=40_000, max_num_batched_tokens=16_384)
    settings = {"alignment_twin_blocks": twin_blocks, "limits_keep_alive_seconds": 0.05}
    with in_thread(Upstream(renderer=renderer, kv=kv)) as upstream, serving(upstream.url, model_folder, **settings) as served:
        replies = await ask_twins(served.url)
        computed = computed_tokens(replies)
        metrics = served.server.metrics.text().decode()
        if twin_blocks:
            assert sum(computed) <= computed[0] + (NUM_TWINS - 1) * 2 * kv.block_size
            assert 'agentserve_twin_hold_seconds_count{end="computed"} 3.0' in metrics
            assert sum(reply.comments > 0 for reply in replies) >= NUM_TWINS - 1, "who waits is kept alive"
        else:
            assert sum(computed) <= computed[0] + (NUM_TWINS - 1) * 2 * kv.block_size, "vLLM finds blocks that are only scheduled yet"
            assert "agentserve_twin_hold_seconds_count{" not in metrics
        assert_nothing_is_held(served)


async def test_held_turns_are_shown_while_they_wait(renderer: FormatRenderer, model_folder: Path) -> None:
    kv = KvModel(num_blocks=4096, block_size=128, prefill_tokens_per_second=20_000, max_num_batched_tokens=16_384)
    with in_thread(Upstream(renderer=renderer, kv=kv)) as upstream, serving(upstream.url, model_folder) as served:
        twins = asyncio.create_task(ask_twins(served.url))
        shown = f"agentserve_held_turns {NUM_TWINS - 1}.0"
        assert await asyncio.to_thread(wait_until, lambda: shown in served.server.metrics.text().decode(), 5)
        await twins
        assert "agentserve_held_turns 0.0" in served.server.metrics.text().decode()


async def test_a_client_that_leaves_while_its_twin_computes_never_reaches_the_engine(renderer: FormatRenderer, model_folder: Path) -> None:
    kv = KvModel(num_blocks=4096, block_size=128, prefill_tokens_per_second=10_000, max_num_batched_tokens=16_384)
    with in_thread(Upstream(renderer=renderer, kv=kv)) as upstream, serving(upstream.url, model_folder) as served:
        first = asyncio.create_task(chat(served.url, [head(), {"role": "user", "content": "One."}], stream=True))
        assert await asyncio.to_thread(wait_until, lambda: any(request.prompt_ids for request in upstream.requests), 5)
        second = asyncio.create_task(chat(served.url, [head(), {"role": "user", "content": "Two."}], stream=True))
        assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.first.twins.num_held == 1, 5)
        second.cancel()
        assert await asyncio.to_thread(wait_until, lambda: served.server.replicas.first.twins.num_held == 0, 2)
        await first
        assert sum(bool(request.prompt_ids) for request in upstream.requests) == 1
        assert_nothing_is_held(served)


@pytest.mark.case("SES-06")
@pytest.mark.parametrize("twin_blocks", [8, 0])
async def test_four_twins_on_a_real_engine_compute_a_cold_head_once(engine: RealEngine, twin_blocks: int) -> None:
    events = {"engine_events": engine.events_endpoint, "engine_events_replay": engine.replay_endpoint}
    with serving(engine.url, engine.model_folder, alignment_twin_blocks=twin_blocks, **events) as served:
        computed = computed_tokens(await ask_twins(served.url, f"held by {twin_blocks}"))
        assert computed[0] > HEAD_TOKENS
        assert sum(computed[1:]) <= (NUM_TWINS - 1) * 2 * 128
        held = 'agentserve_twin_hold_seconds_count{end="computed"} 3.0' in served.server.metrics.text().decode()
        assert held == bool(twin_blocks)
