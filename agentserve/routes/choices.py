"""Several answers to one prompt: it is computed once, then they are generated side by side, each a branch of the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from agentserve.turns import Turn
from model.chat import Delta

Take = Callable[[int, Turn, list[Delta] | None], Awaitable[None]]
"""Takes a choice's number, its turn and one step of it; None when the turn has ended and has its outcome."""


async def generate_choices(turn: Turn, num_choices: int, stop: tuple[str, ...], take: Take) -> None:
    """Run `turn` and as many others as make `num_choices`. The first error ends them all and is raised.

    The others begin when the first one shows something: the prompt is in the engine's cache by then.
    """
    computed = asyncio.Event()

    async def generate(index: int, choice: Turn) -> None:
        async with aclosing(choice.deltas(stop)) as steps:
            async for deltas in steps:
                computed.set()
                await take(index, choice, deltas)
        computed.set()
        await take(index, choice, None)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(generate(0, turn))
            await computed.wait()
            for index in range(1, num_choices):
                group.create_task(generate(index, turn.another(index)))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
