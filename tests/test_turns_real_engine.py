"""The walk of a turn on a real vLLM: exact prompts, hits that equal the block ceiling, evictions that are seen and named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from agentserve.engines.prometheus import samples
from model.tokenizer import Tokenizer
from tests.processes import wait_until
from tests.real_engine import RealEngine
from tests.serving import Reply, Served, chat, serving

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

NAMESPACE = "]<]minimax[>["
TOOLS = [
    {
        "type": "function",
        "function": {"name": "read_file", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
]
TEXT = "def total(items):\n    return sum(item.price * item.count for item in items)\n"


@pytest.fixture(scope="module")
def served(engine: RealEngine) -> Iterator[Served]:
    with serving(
        engine.url, engine.model_folder, engine_events=engine.events_endpoint, engine_events_replay=engine.replay_endpoint
    ) as running:
        yield running


def tool_turn(tokenizer: Tokenizer, number: int) -> dict[str, Any]:
    """Sampling that makes random weights answer with reasoning, text and a call, spelled in whatever tokens the model picks."""
    ns = NAMESPACE
    text = f"<mm:think>File {number} first.</mm:think>Reading it.{ns}<tool_call>\n"
    text += f'{ns}<invoke name="read_file">{ns}<path>src/{number}.py{ns}</path>{ns}</invoke>\n{ns}</tool_call>'
    markers = ("<mm:think>", "</mm:think>", ns, "<tool_call>", "</tool_call>")
    bias = {str(tokenizer.control[marker]): 100 for marker in markers if marker in tokenizer.control}
    return {"structured_outputs": {"choice": [text]}, "logit_bias": bias, "tools": TOOLS, "max_tokens": 600}


def account(reply: Reply) -> dict[str, Any]:
    assert reply.usage is not None
    return {
        **reply.usage["agentserve"],
        "cached": reply.usage["prompt_tokens_details"]["cached_tokens"],
        "prompt": reply.usage["prompt_tokens"],
    }


@pytest.mark.case("TOK-08", "SSE-07")
@pytest.mark.parametrize("stream", [True, False])
async def test_sessions_with_tools_and_reasoning_are_exact_and_hit_their_block_ceiling(
    served: Served, engine: RealEngine, stream: bool
) -> None:
    tokenizer = Tokenizer.load(engine.model_folder)
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Agent {stream}."}, {"role": "user", "content": TEXT * 10}]
    kinds = []
    for number in range(8):
        first = await chat(served.url, messages, stream=stream, **tool_turn(tokenizer, number))
        assert first.finish_reason == "tool_calls", first
        assert first.message["reasoning"] == f"File {number} first."
        (call,) = first.message["tool_calls"]
        assert call["function"]["arguments"] == f'{{"path": "src/{number}.py"}}'
        messages += [first.message, {"role": "tool", "tool_call_id": call["id"], "content": TEXT * 3}]
        second = await chat(served.url, messages, stream=stream, tools=TOOLS, max_tokens=40)
        messages += [second.message, {"role": "user", "content": f"And file {number + 1}?"}]
        for reply in (first, second):
            kinds.append(reply.turn)
            got = account(reply)
            assert got["cached"] == got["ceiling_block_tokens"] == got["predicted_tokens"]
            assert sum(got["missed_tokens"].values()) == got["prompt"] - got["cached"]
            assert set(got["missed_tokens"]) <= {"new", "tail"}
    assert kinds == ["first", *["exact"] * 15]


async def test_an_evicted_context_is_predicted_missing_and_booked_as_evicted(small_engine: RealEngine) -> None:
    events = {"engine_events": small_engine.events_endpoint, "engine_events_replay": small_engine.replay_endpoint}
    with serving(small_engine.url, small_engine.model_folder, **events) as served:
        histories = [[{"role": "user", "content": f"Session {number}. " + TEXT * 140}] for number in range(4)]
        missed: dict[str, int] = {}
        wrong = 0
        for _ in range(5):
            for history in histories:
                reply = await chat(served.url, history, stream=False, max_tokens=8)
                history += [reply.message, {"role": "user", "content": "Go on."}]
                got = account(reply)
                assert sum(got["missed_tokens"].values()) == got["prompt"] - got["cached"]
                wrong += got.get("predicted_tokens") != got["cached"]
                for cause, tokens in got["missed_tokens"].items():
                    missed[cause] = missed.get(cause, 0) + tokens
        assert missed.get("evicted", 0) > 10_000, missed
        assert missed.get("unknown", 0) <= 0.01 * sum(missed.values()), missed
        assert wrong <= 1, "predictions must follow the engine's events"


@pytest.mark.case("SSE-05")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(served: Served, engine: RealEngine, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "write"}], "stream": stream, "max_tokens": 5000, "ignore_eos": True}

    async def ask() -> None:
        async with aiohttp.ClientSession() as http, http.post(f"{served.url}/v1/chat/completions", json=body) as response:
            await response.read()

    task = asyncio.create_task(ask())
    assert await asyncio.to_thread(wait_until, lambda: running_requests(served) == 1, 10)
    task.cancel()
    assert await asyncio.to_thread(wait_until, lambda: running_requests(served) == 0, 1.5)
    assert served.server.replicas.num_tickets == 0


def running_requests(served: Served) -> float:
    """What vLLM says of itself."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_running(served.server.engine.url))
    finally:
        loop.close()


async def _running(url: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as response:
        found = samples(await response.read(), "vllm:num_requests_running")
    return sum(sample.value for sample in found)


async def test_greedy_answers_are_the_same_streamed_and_whole(served: Served) -> None:
    messages = [{"role": "user", "content": "Say something."}]
    replies = [await chat(served.url, messages, stream=stream, max_tokens=30, temperature=0) for stream in (True, False)]
    assert replies[0].message["content"] == replies[1].message["content"]
