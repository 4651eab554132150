"""Generated sessions on the whole server, without sockets: each with its heads as they are, then disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agentserve.app import build_app
from agentserve.boot import build
from agentserve.canonical.table import CANONICAL_RULES
from agentserve.settings import CanonicaliseSettings, Settings
from benchmarks.ledger.agent import Agent, Tally
from benchmarks.ledger.left import Left, look
from benchmarks.ledger.script import Script
from benchmarks.ledger.simulated_engine import SimulatedEngine
from model.chat import ChatFormat
from model.tokenizer import Tokenizer

BLOCK_SIZE = 128
CONCURRENCY = 4
EVERY_RULE = Settings(canonicalise=CanonicaliseSettings(on=tuple(CANONICAL_RULES)))
EVERY_TURN_SECONDS = 1e-6
"""As a rhythm: what moves changes with every request."""


@dataclass(slots=True)
class Replayed:
    """One replay of all scripts on a server of its own."""

    tally: Tally = field(default_factory=Tally)
    hit_rate: float = 0.0
    respelled_share: float = 0.0
    """Answers in other ids than their text encodes to."""
    left: Left | None = None
    """At the end."""


async def replay(
    scripts: Sequence[Script],
    tokenizer: Tokenizer,
    chat: ChatFormat,
    *,
    disturbed: bool,
    rhythm_seconds: float = 60.0,
    settings: Settings = EVERY_RULE,
    done: Callable[[], object] = lambda: None,
) -> Replayed:
    """Play `scripts`, some at a time; `done` is called after each."""
    engine = SimulatedEngine(tokenizer, chat, BLOCK_SIZE)
    server = build(settings, engine, tokenizer, chat, None)
    app = build_app(server)
    replayed = Replayed()
    waiting = iter(scripts)

    async def lane(mine: Iterable[Script]) -> None:
        for script in mine:
            await Agent(app, script, replayed.tally, disturbed=disturbed, rhythm_seconds=rhythm_seconds).play()
            done()

    await asyncio.gather(*(lane(waiting) for _ in range(CONCURRENCY)))
    replayed.hit_rate, replayed.respelled_share = engine.hit_rate, engine.num_respelled / engine.num_answers
    replayed.left = look([server], 0)
    return replayed
