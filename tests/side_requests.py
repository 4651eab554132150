"""A main session that fills most of a real vLLM's cache, and requests beside it: titles, guesses, memory, probes, summaries."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from agentserve.engines.hints import PluginHints
from benchmarks.history import code
from tests.real_engine import RealEngine
from tests.serving import Reply, Served, chat, serving

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]
SESSION = {"x-session-id": "main"}


@contextmanager
def beside(engine: RealEngine, plugin: str) -> Iterator[Served]:
    endpoints = {"engine_events": engine.events_endpoint, "engine_events_replay": engine.replay_endpoint}
    with serving(engine.url, engine.model_folder, engine_plugin=plugin, **endpoints) as served:
        yield served


@dataclass(slots=True)
class Main:
    """A session with tools that grows turn by turn. `hits` are shares of what could be hit, in whole blocks, by turn from the second on."""

    served: Served
    rng: random.Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    num_tokens: int = 0

    async def turn(self, text: str) -> Reply:
        self.messages.append({"role": "user", "content": text})
        reply = await chat(
            self.served.url, self.messages, stream=False, headers=SESSION, tools=TOOLS, max_tokens=24, temperature=0, ignore_eos=True
        )
        self.messages.append(reply.message)
        self.book(reply)
        return reply

    def book(self, reply: Reply) -> None:
        """One more turn, whose prompt has everything before."""
        assert reply.usage is not None
        block = self.served.server.engine.info.block_size
        assert block is not None
        could = (self.num_tokens - 1) // block * block  # the last token that was generated has no KV yet
        if self.num_tokens:
            self.hits.append(reply.usage["prompt_tokens_details"]["cached_tokens"] / could)
        self.num_tokens = reply.usage["prompt_tokens"] + reply.usage["completion_tokens"]


async def aside(served: Served, system: str, text: str, *, is_named: bool, max_tokens: int) -> Reply:
    """A request of another system text and without tools."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    headers = SESSION if is_named else {}
    reply = await chat(served.url, messages, stream=False, headers=headers, max_tokens=max_tokens, temperature=0, ignore_eos=True)
    assert reply.status == 200
    return reply


async def start(served: Served, system_tokens: int) -> Main:
    """The engine is full of what nobody wants any more, and the session has not begun."""
    rng = random.Random(7)
    capacity = served.server.engine.info.kv_capacity_tokens
    assert capacity is not None
    hints = PluginHints(served.server.engine.url)  # other tests change the policy
    await hints.start()
    await hints.switch("class_hazard", {})
    await hints.close()
    await aside(served, "Fill.", text_of(rng, capacity * 9 // 10), is_named=False, max_tokens=1)
    return Main(served, rng, [{"role": "system", "content": "You are a coding agent.\n" + text_of(rng, system_tokens)}])


def text_of(rng: random.Random, num_tokens: int) -> str:
    """Roughly so many tokens."""
    return code(rng, 4 * num_tokens)


SIDE_REQUESTS = {
    "title": ("Title maker. Answer with a title and nothing else.", 60, 16),
    "next message": ("Guess what the user says next.", 150, 48),
    "memory": ("Write down what is worth remembering of this exchange.", 300, 64),
    "probe": ("Is the service there?", 200, 1),
}
"""What is asked, tokens of what it is asked about, and of the answer."""


async def side_requests(served: Served, *, is_named: bool) -> float:
    """The least share of what could be hit, over the turns of a session with side requests between them."""
    main = await start(served, 3500)
    for step in range(4):
        await main.turn(f"Step {step}.\n" + text_of(main.rng, 850))
        for system, num_tokens, max_tokens in (*SIDE_REQUESTS.values(), *SIDE_REQUESTS.values()):
            await aside(served, system, f"Step {step}: {text_of(main.rng, num_tokens)}", is_named=is_named, max_tokens=max_tokens)
    await main.turn("Go on.")
    capacity = served.server.engine.info.kv_capacity_tokens
    assert capacity is not None
    assert capacity / 1.2 < main.num_tokens < capacity / 1.05
    return min(main.hits)


@dataclass(frozen=True, slots=True)
class Compaction:
    """Shares of what could be hit: by the request in place, by a new session with the same head, and by the main session after all."""

    in_place: float
    new_session: float
    after: float


async def compaction(served: Served) -> Compaction:
    """A summary asked for in place, then in the old style as a request of its own, then a session that goes on from it."""
    main = await start(served, 5600)
    for step in range(3):
        await main.turn(f"Step {step}.\n" + text_of(main.rng, 200))
    in_place = [*main.messages, {"role": "user", "content": "Summarise the work so far for a new session."}]
    summary = await chat(served.url, in_place, stream=False, headers=SESSION, tools=TOOLS, max_tokens=24, temperature=0, ignore_eos=True)
    flat = "\n".join(f"{each['role']}: {each['content']}" for each in main.messages[1:])
    for style in ("Write a summary.", "Write it in five points.", "Write a title.", "Write what is left to do."):
        await aside(served, f"You write summaries. {style}", flat, is_named=True, max_tokens=40)
    fresh = [main.messages[0], {"role": "user", "content": f"So far: {summary.message['content'][:200]}"}]
    new = await chat(served.url, fresh, stream=False, headers={"x-session-id": "new"}, tools=TOOLS, max_tokens=8, temperature=0)
    await main.turn("Go on.")
    capacity = served.server.engine.info.kv_capacity_tokens
    assert capacity is not None
    assert capacity / 1.3 < main.num_tokens < capacity / 1.1
    return Compaction(share(summary), share(new), main.hits[-1])


def share(reply: Reply) -> float:
    """Of what had been computed before, in whole blocks: more than the head, or nothing is shown."""
    assert reply.usage is not None
    could: int = reply.usage["agentserve"]["ceiling_block_tokens"]
    assert could > 4000
    cached: int = reply.usage["prompt_tokens_details"]["cached_tokens"]
    return cached / could
