"""What a turn costs the server itself as its session grows: ledger, block hashes, accounting and the encoding of new text.

The turns run in this process through the server's own `Turns`, over an engine that answers at once with ready ids in one step; its KV
events reach the mirror between turns, outside the clock. Parsing the client's body is timed apart.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop
from rich.progress import Progress

from agentserve.boot import build
from agentserve.dialects import openai_chat
from agentserve.engines import Chunk, EngineInfo, GenerateRequest, Usage
from agentserve.identity import Identity
from agentserve.server import Server
from agentserve.settings import Settings
from benchmarks.history import code
from benchmarks.report import Options, Result, Row, percentile
from benchmarks.served_model import prepare
from model.chat.formats import detect_chat_format
from model.tokenizer import Tokenizer
from prefix_cache.events import BlockStored, EventBatch
from prefix_cache.mirror import Mirror

NUM_TURNS = 200
NUM_GENERATED_TOKENS = 150
NEW_TEXT_BYTES = 1_330
BLOCK_SIZE = 128
WINDOW = 10
WINDOWS = (20, 60, 100, 140, 200)
"""Turns whose cost is shown: the last of `WINDOW` turns each."""
MODEL = "demo-model"


class ReadyEngine:
    """Answers each request with the ids that were laid ready for it."""

    def __init__(self) -> None:
        self.info = EngineInfo("ready", MODEL, 1 << 20, block_size=BLOCK_SIZE, num_blocks=48_945)
        self.url = ""
        self.num_retries = 0
        self.ready: tuple[int, ...] = ()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def healthy(self) -> bool:
        return True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        usage = Usage(request.num_prompt_tokens, len(self.ready), None)
        yield Chunk(self.ready, finish_reason="stop", usage=usage)

    async def metrics(self) -> bytes:
        return b""


@dataclass(slots=True)
class Costs:
    """Seconds by turn number, over all sessions."""

    turns: dict[int, list[float]] = field(default_factory=dict)
    parses: dict[int, list[float]] = field(default_factory=dict)
    prompt_tokens: dict[int, list[int]] = field(default_factory=dict)


class Events:
    """Tells the mirror which blocks the engine has stored, as vLLM would."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._seq = 0
        self._next_hash = 1

    def stored(self, ids: array[int], num_known_blocks: int, parent: int | None) -> tuple[int, int | None]:
        """Announce the full blocks of `ids` after the known ones; how many are known then, and the last one's hash."""
        num_blocks = (len(ids) - 1) // BLOCK_SIZE
        if num_blocks <= num_known_blocks:
            return num_known_blocks, parent
        hashes = list(range(self._next_hash, self._next_hash + num_blocks - num_known_blocks))
        self._next_hash += len(hashes)
        tokens = ids[num_known_blocks * BLOCK_SIZE : num_blocks * BLOCK_SIZE].tolist()
        event = BlockStored(block_hashes=list(hashes), parent_block_hash=parent, token_ids=tokens, block_size=BLOCK_SIZE, medium="GPU")
        self._mirror.apply(self._seq, EventBatch(0.0, [event]))
        self._seq += 1
        return num_blocks, hashes[-1]


def measure(options: Options) -> Result:
    """Run whole sessions one after the other and compare early turns with late ones."""
    folder = options.cache_folder / "nano"
    prepare(folder)
    tokenizer = Tokenizer.load(folder)
    engine, mirror = ReadyEngine(), Mirror(BLOCK_SIZE)
    server = build(Settings(), engine, tokenizer, detect_chat_format(tokenizer), mirror)
    costs, events = Costs(), Events(mirror)
    num_sessions = 3 if options.quick else 10
    uvloop.run(_sessions(server, engine, events, costs, num_sessions))
    return _result(costs, num_sessions)


async def _sessions(server: Server, engine: ReadyEngine, events: Events, costs: Costs, num_sessions: int) -> None:
    with Progress(transient=True) as progress:
        for number in progress.track(range(num_sessions), description="running sessions"):
            await _session(server, engine, events, costs, number)


async def _session(server: Server, engine: ReadyEngine, events: Events, costs: Costs, number: int) -> None:
    rng = random.Random(number)
    stop_id = server.turns.chat.stop_ids[0]
    messages = [_message("system", f"You are agent {number}.\n" + code(rng, 4_000)), _message("user", code(rng, NEW_TEXT_BYTES))]
    known: tuple[int, int | None] = (0, None)
    for turn_number in range(1, NUM_TURNS + 1):
        body = b'{"model":"%b","stream":true,"messages":[%b]}' % (MODEL.encode(), b",".join(messages))
        engine.ready = (*server.turns.tokenizer.encode(code(rng, 2_000))[:NUM_GENERATED_TOKENS], stop_id)
        started = time.perf_counter()
        request = openai_chat.parse(body)
        conversation, wanted = openai_chat.ChatConversation(request), openai_chat.options(request)
        parsed = time.perf_counter()
        namespace = server.namespaces.of(None)
        async with server.turns.turn(conversation, wanted, Identity(f"session-{number}"), namespace) as turn:
            async for _ in turn.deltas():
                pass
        ended = time.perf_counter()
        assert turn.outcome is not None
        costs.parses.setdefault(turn_number, []).append(parsed - started)
        costs.turns.setdefault(turn_number, []).append(ended - parsed)
        costs.prompt_tokens.setdefault(turn_number, []).append(turn.plan.num_prompt_tokens)
        known = events.stored(namespace.sessions[f"session-{number}"].prompt.ids, *known)
        messages += [_message("assistant", turn.outcome.item.text), _message("user", code(rng, NEW_TEXT_BYTES))]


def _message(role: str, text: str) -> bytes:
    return msgspec.json.encode({"role": role, "content": text})


def _result(costs: Costs, num_sessions: int) -> Result:
    columns = ("prompt tokens", "turn p50 ms", "turn p95 ms", f"turn p50 / turn {WINDOWS[0]}'s", "body parse p50 ms")
    base = percentile(_window(costs.turns, WINDOWS[0]), 50)
    rows = []
    for last in WINDOWS:
        turns = _window(costs.turns, last)
        median = percentile(turns, 50)
        tokens = percentile(_window(costs.prompt_tokens, last), 50)
        parse_median = percentile(_window(costs.parses, last), 50)
        figures = (tokens, 1000 * median, 1000 * percentile(turns, 95), median / base, 1000 * parse_median)
        rows.append(Row(f"turns {last - WINDOW + 1} to {last}", dict(zip(columns, figures, strict=True))))
    notes = (
        f"{num_sessions} sessions of {NUM_TURNS} turns; each adds {NEW_TEXT_BYTES:,} bytes of user text and {NUM_GENERATED_TOKENS} "
        f"generated tokens. Blocks of {BLOCK_SIZE}; the mirror is fed and predicts.",
    )
    return Result("Own cost of a turn, in process", columns, tuple(rows), notes)


def _window(values: dict[int, list[float]] | dict[int, list[int]], last: int) -> Sequence[float]:
    return [value for number in range(last - WINDOW + 1, last + 1) for value in values[number]]
