"""What a turn costs behind a history of 2,000 messages and 100,000 tokens: from the body's bytes to the request for the engine.

Three clients: one whose bytes are known as far as the new messages, one whose head changes its bytes in every request, and one that
writes its whole history in other bytes each time. Decoding the same body to plain values is timed beside each, by the same library.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from msgspec import structs

from agentserve.boot import build, load_model_files
from agentserve.dialects import openai_chat
from agentserve.identity import Identity
from agentserve.server import Server
from agentserve.settings import Settings
from benchmarks.history import code
from benchmarks.ledger import speech
from benchmarks.ledger.disturbances import disturb
from benchmarks.ledger.forms import ChatForm, Style
from benchmarks.ledger.respelled import respelled
from benchmarks.ledger.simulated_engine import ASKED, Ask, SimulatedEngine
from benchmarks.report import percentile
from model.conversation import AssistantItem, Head, Item, ToolCall, ToolResultItem, UserItem

NUM_MESSAGES = 2_000
BYTES_PER_TEXT = 100
"""With calls and markup about 50 tokens a message."""
BLOCK_SIZE = 128


@dataclass(slots=True)
class Costs:
    """One client's turns. Seconds; tokens. `too_many`: turns that tokenised more than what was new."""

    num_messages: int = 0
    prompt_tokens: int = 0
    body_bytes: int = 0
    decode_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)
    encoded_tokens: list[int] = field(default_factory=list)
    too_many: int = 0
    inexact: int = 0

    @property
    def added_milliseconds(self) -> float:
        """The median over turns of what parsing, matching and rendering cost beyond JSON decoding; not below zero."""
        added = [whole - decode for whole, decode in zip(self.whole_seconds, self.decode_seconds, strict=True)]
        return 1000 * max(0.0, percentile(added, 50))

    @property
    def whole_milliseconds(self) -> float:
        return 1000 * percentile(self.whole_seconds, 50)

    @property
    def encoded_tokens_per_turn(self) -> float:
        return sum(self.encoded_tokens) / len(self.encoded_tokens)


def _plain(head: Head, _: int) -> Head:
    return head


def _moving(head: Head, turn: int) -> Head:
    return disturb(head, ("billing_line", "token_countdown"), turn, turn)


CLIENTS: dict[str, tuple[Callable[[Head, int], Head], bool]] = {
    "known bytes": (_plain, False),
    "moving head": (_moving, False),
    "rewritten": (_plain, True),
}
"""How each client's head changes, and whether it writes its history in other bytes."""


def measure_clients(model_folder: Path, num_turns: int) -> dict[str, Costs]:
    """`num_turns` turns of each client behind its long history."""
    tokenizer, chat = load_model_files(Settings().engine, model_folder)
    found = {}
    for name, (change, rewrites) in CLIENTS.items():
        server = build(Settings(), SimulatedEngine(tokenizer, chat, BLOCK_SIZE), tokenizer, chat, None)
        found[name] = asyncio.run(_Client(server, change, rewrites).run(num_turns))
    return found


class _Client:
    def __init__(self, server: Server, change: Callable[[Head, int], Head], rewrites: bool) -> None:
        self._server = server
        self._change = change
        self._rewrites = rewrites
        self._rng = random.Random(7)
        self._head = replace(speech.head(0, 4_000), tools=speech.TOOLS)
        self._items = self._history()
        self._costs = Costs()
        self._before = array("I")

    async def run(self, num_turns: int) -> Costs:
        await self._turn(0)  # the whole history is new
        self._costs = Costs()
        for number in range(1, num_turns + 1):
            self._items += [UserItem(code(self._rng, 3 * BYTES_PER_TEXT))]
            await self._turn(number)
        return self._costs

    def _history(self) -> list[Item]:
        items: list[Item] = []
        while len(items) < NUM_MESSAGES - 1:
            number = len(items)
            calls = (ToolCall(f"call_{number}", "read_file", {"path": f"src/{number}.py", "offset": number, "whole": True}),)
            text = code(self._rng, BYTES_PER_TEXT // 2)
            items += [UserItem(code(self._rng, BYTES_PER_TEXT)), AssistantItem(text, None, calls)]
            items += [ToolResultItem(f"call_{number}", code(self._rng, BYTES_PER_TEXT)), AssistantItem(code(self._rng, BYTES_PER_TEXT))]
        return [*items, UserItem("Go on.")]

    async def _turn(self, number: int) -> None:
        style = Style(lambda call: respelled(call.arguments, self._rng)) if self._rewrites else Style()
        items = [self._rewritten(item, number) for item in self._items] if self._rewrites else self._items
        body = msgspec.json.encode({**ChatForm().body(self._change(self._head, number), items, style), "stream": True})
        ask = Ask(speech.answer(self._rng, 400), random.Random(number))
        ASKED.set(ask)
        started = time.perf_counter()
        msgspec.json.decode(body)
        decoded = time.perf_counter()
        request = openai_chat.parse(body)
        conversation, wanted = openai_chat.ChatConversation(request), openai_chat.options(request)
        async with self._server.turns.turn(conversation, wanted, Identity("s"), self._server.namespaces.of(None)) as turn:
            whole = time.perf_counter()
            async for _ in turn.deltas():
                pass
        assert turn.outcome is not None
        self._items.append(turn.outcome.item)
        self._book(body, decoded - started, whole - decoded, turn.plan.num_encoded_tokens, ask)

    @staticmethod
    def _rewritten(item: Item, number: int) -> Item:
        return structs.replace(item, text=item.text + " " * (number % 3)) if isinstance(item, AssistantItem) else item

    def _book(self, body: bytes, decode: float, whole: float, num_encoded: int, ask: Ask) -> None:
        costs = self._costs
        costs.num_messages, costs.prompt_tokens, costs.body_bytes = len(self._items) - 1, len(ask.prompt), len(body)
        costs.decode_seconds.append(decode)
        costs.whole_seconds.append(whole)
        costs.encoded_tokens.append(num_encoded)
        costs.inexact += ask.prompt[: len(self._before)] != self._before
        costs.too_many += num_encoded > len(ask.prompt) - len(self._before)
        self._before = ask.prompt + ask.generated
