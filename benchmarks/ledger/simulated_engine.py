"""An engine in the server's process: it says what it is told, in token ids that encoding the text would not give, over a block cache.

Who sends a request tells it what to say through the context that the request runs in, and finds there what was asked and generated.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import msgspec

from agentserve.engines import Chunk, EngineInfo, GenerateRequest, Usage
from model.chat import ChatFormat
from model.conversation import AssistantItem, UserItem
from model.tokenizer import Tokenizer
from prefix_cache.blocks import chain_hashes, root_hash

MODEL = "demo-model"
_SPLIT_SHARE = 0.15
_NUM_CHUNKS = 4


@dataclass(slots=True)
class Ask:
    """One request, from both ends: what the model is to say, then the ids that it was asked with and those that it generated."""

    item: AssistantItem
    rng: random.Random
    prompt: array[int] = field(default_factory=lambda: array("I"))
    generated: array[int] = field(default_factory=lambda: array("I"))


ASKED: ContextVar[Ask] = ContextVar("ASKED")


class Spelling:
    """Ids of what a model says. Byte-level BPE spells a text in many ways; encoding gives one of them."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._control = frozenset(tokenizer.control.values())
        self._by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if i not in self._control}

    def generated(self, item: AssistantItem, rng: random.Random) -> tuple[list[int], bool]:
        """The ids of `item` behind its generation prompt, some of them split in two, and the stop id; whether any is split."""
        asked = UserItem("")
        pieces = self._chat.item(item, asked)[len(self._chat.open_turn(asked)) :]
        while pieces and pieces[-1] in self._chat.stop_ids:
            pieces.pop()
        encoded = self._tokenizer.encode_pieces(pieces)
        ids = self._split(encoded, _SPLIT_SHARE, rng)
        if ids == encoded:
            ids = self._split(encoded, 1.0, rng)  # a few words, all of them missed
        return [*ids, self._chat.stop_ids[0]], ids != encoded

    def _split(self, ids: Iterable[int], share: float, rng: random.Random) -> list[int]:
        return [part for number in ids for part in (self._halves(number, rng) if rng.random() < share else (number,))]

    def _halves(self, number: int, rng: random.Random) -> Sequence[int]:
        text = b"" if number in self._control else self._tokenizer.token_bytes(number)
        if len(text) < 2:
            return (number,)
        cut = rng.randrange(1, len(text))
        halves = self._by_bytes.get(text[:cut]), self._by_bytes.get(text[cut:])
        return (number,) if None in halves else [half for half in halves if half is not None]


class BlockCache:
    """An unlimited prefix cache by vLLM's rules: whole blocks from the start, never the last prompt token. Sizes in tokens."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: set[bytes] = set()

    def num_hit_tokens(self, prompt: array[int]) -> int:
        """Prompt tokens that hit; changes nothing."""
        hashes = chain_hashes(root_hash(), prompt.tobytes(), self._block_size)
        num_blocks = 0
        for key in hashes[: (len(prompt) - 1) // self._block_size]:
            if key not in self._known:
                break
            num_blocks += 1
        return num_blocks * self._block_size

    def store(self, computed: array[int]) -> None:
        """Keep the full blocks of what was computed."""
        self._known.update(chain_hashes(root_hash(), computed.tobytes(), self._block_size))


class SimulatedEngine:
    """An `Engine` without a model. Sums over all requests."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat, block_size: int) -> None:
        self.info = EngineInfo("simulated", MODEL, 1 << 22, block_size=block_size, num_blocks=48_945)
        self.url = ""
        self.num_retries = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self.num_answers = 0
        self.num_respelled = 0
        """Answers in other ids than their text encodes to."""
        self._spelling = Spelling(tokenizer, chat)
        self._cache = BlockCache(block_size)

    @property
    def hit_rate(self) -> float:
        """Hit prompt tokens over all prompt tokens."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    async def healthy(self) -> bool:
        return True

    async def metrics(self) -> bytes:
        return b""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ask = ASKED.get()
        ask.prompt = array("I", msgspec.json.decode(b"[" + b"".join(request.prompt_json) + b"]", type=list[int]))
        ids, is_respelled = self._spelling.generated(ask.item, ask.rng)
        self.num_answers += 1
        self.num_respelled += is_respelled
        num_hits = self._cache.num_hit_tokens(ask.prompt)
        self.num_prompt_tokens += len(ask.prompt)
        self.num_hit_tokens += num_hits
        self._cache.store(ask.prompt)  # vLLM lets others hit what it has scheduled
        size = -(-len(ids) // _NUM_CHUNKS)
        try:
            for start in range(0, len(ids), size):
                chunk = tuple(ids[start : start + size])
                ask.generated.extend(chunk)
                yield Chunk(chunk)
                await asyncio.sleep(0)
            yield Chunk(finish_reason="stop", usage=Usage(len(ask.prompt), len(ids), num_hits))
        finally:
            self._cache.store((ask.prompt + ask.generated)[:-1])  # the last sampled token has no KV
