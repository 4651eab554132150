"""Greedy answers to the same crowd of prompts, more than the cache holds, so that blocks are evicted while they are computed."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from agentserve.engines import GenerateRequest
from agentserve.engines.hints import EngineHints, TurnHints
from agentserve.engines.vllm import VllmEngine

_PROMPT_TOKENS, _OUTPUT_TOKENS, _AT_ONCE, _ROUNDS = 2_000, 24, 16, 2


async def greedy_outputs(engine: VllmEngine, hints: EngineHints, capacity_tokens: int) -> list[tuple[int, ...]]:
    """Of 1.25 times as many prompts as fit, twice over."""
    prompts = [
        [100 + (7 * number + 13 * at) % 7_900 for at in range(_PROMPT_TOKENS)]
        for number in range(5 * capacity_tokens // 4 // _PROMPT_TOKENS)
    ]
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(number: int, turn: int) -> tuple[int, ...]:
        ids: list[int] = []
        request = GenerateRequest(
            f"same-{turn}-{number}",
            (",".join(map(str, prompts[number])).encode(),),
            _PROMPT_TOKENS,
            _OUTPUT_TOKENS,
            {"temperature": 0.0, "ignore_eos": True},
            session_id=f"same-{number}",
            xargs=dict(hints.xargs(TurnHints(branch_id=""))),
        )
        async with gate, aclosing(engine.generate(request)) as chunks:
            async for chunk in chunks:
                ids += chunk.ids
        return tuple(ids)

    answers: list[tuple[int, ...]] = []
    for turn in range(_ROUNDS):
        answers += await asyncio.gather(*(one(number, turn) for number in range(len(prompts))))
    return answers
