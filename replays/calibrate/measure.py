"""Measures a running engine over HTTP: prefills, cold, behind a cached prefix and beside sequences that decode, and decode steps.

Prompts are random token ids, so nothing is found that was not put there. Each point is the median of a few repeats, after one that is
thrown away: engines compile and capture on first use.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import aiohttp
import msgspec

from replays.simulator.profile_file import Measured

_FIRST_ID, _LAST_ID = 300, 2000
_LEAST_SECONDS = 1e-5
_ANSWER_TOKENS = 8
"""While the first token is on its way, an engine that shares cores computes the next, as for a client's prompt."""
_JOINED_CONTEXT, _LONG_ANSWER = 128, 512
"""Tokens of each sequence that decodes while another joins: its prompt, and what it generates before it starts anew."""
_JOINS = 6
"""Prompts that join, for each repeat; the first sixth is thrown away."""
_JOIN_PAUSE_SECONDS = 0.05, 0.15
_METRIC = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)


class CalibrationError(RuntimeError):
    """The engine cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, tokens."""

    prefills: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
    cached: tuple[tuple[int, int], ...] = ((2048, 256), (8192, 256), (8192, 1024), (32_768, 256), (32_768, 1024))
    """(context, new)."""
    sequences: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (256, 2048, 8192)
    joined: tuple[tuple[int, int], ...] = ((1, 256), (2, 256), (4, 256), (8, 256), (2, 2048), (4, 2048), (8, 2048))
    """(sequences that decode, new)."""
    num_decode_tokens: int = 64
    repeats: int = 3
    pause_seconds: float = 0.25
    """Before each prompt that finds the engine idle: clients' prompts come seldom enough that its processes sleep by then."""

    def within(self, max_model_len: int, capacity_tokens: int) -> Plan:
        """Without what the engine cannot hold."""
        most = min(max_model_len, capacity_tokens) - self.num_decode_tokens
        return Plan(
            tuple(n for n in self.prefills if n <= most),
            tuple((context, new) for context, new in self.cached if context + new <= most),
            self.sequences,
            tuple(context for context in self.contexts if context <= most),
            tuple((others, new) for others, new in self.joined if others * (_JOINED_CONTEXT + _LONG_ANSWER) + new <= most),
            self.num_decode_tokens,
            self.repeats,
            self.pause_seconds,
        )

    def decodes(self, capacity_tokens: int) -> list[tuple[int, int]]:
        """(sequences, context) of all that fit at once."""
        each = [(number, context) for context in self.contexts for number in self.sequences]
        return [(number, context) for number, context in each if number * (context + self.num_decode_tokens) <= capacity_tokens * 0.9]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of itself."""

    name: str
    model: str
    max_model_len: int
    block_size: int
    num_blocks: int

    @property
    def capacity_tokens(self) -> int:
        return self.block_size * self.num_blocks


@dataclass(slots=True)
class _Stream:
    """When a request was sent, and its first and last token came."""

    sent: float
    first: float = 0.0
    last: float = 0.0


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


class _Version(msgspec.Struct):
    version: str


_EVENT = msgspec.json.Decoder(_Event)


@dataclass(eq=False)
class Meter:
    """Measures the engine at `url` through an open client session."""

    http: aiohttp.ClientSession
    url: str
    model: str
    rng: random.Random = field(default_factory=lambda: random.Random(time.monotonic_ns()))

    def prompt(self, num_tokens: int) -> list[int]:
        return self.rng.choices(range(_FIRST_ID, _LAST_ID), k=num_tokens)

    async def stream(self, prompt: Sequence[int], num_tokens: int) -> _Stream:
        """Send a prompt and note when its tokens come. Raises CalibrationError where the engine refuses."""
        body: dict[str, object] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        body["return_token_ids"] = True
        raw = msgspec.json.encode(body)
        seen = _Stream(time.perf_counter())
        headers = {"Content-Type": "application/json"}
        try:
            async with self.http.post(f"{self.url}/v1/completions", data=raw, headers=headers) as response:
                if response.status != 200:
                    raise CalibrationError(f"{self.url} refused a prompt of {len(prompt)} tokens: {(await response.text())[:300]}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if any(choice.token_ids for choice in _EVENT.decode(line[6:]).choices):
                        seen.last = time.perf_counter()
                        seen.first = seen.first or seen.last
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            raise CalibrationError(f"{self.url} broke off: {error!r}") from error
        if not seen.first:
            raise CalibrationError(f"{self.url} gave no token for a prompt of {len(prompt)} tokens")
        return seen

    async def prefill(self, num_new: int, context: int, repeats: int, pause_seconds: float) -> Measured:
        """Time to the first token of a prompt whose first `context` tokens are cached."""
        seconds = []
        for _ in range(repeats + 1):
            prefix = self.prompt(context)
            if context:
                await self.stream(prefix, 1)
            await asyncio.sleep(pause_seconds)
            seen = await self.stream(prefix + self.prompt(num_new), _ANSWER_TOKENS)
            seconds.append(seen.first - seen.sent)
        return Measured("prefill", num_new, context, 1, median(seconds[1:]))

    async def decode(self, num_sequences: int, context: int, num_tokens: int, repeats: int) -> Measured:
        """Time of a token while so many sequences decode, which is a step's time where there is no draft.

        It is what a batch takes longer with `num_tokens` each than with one each, prompts cached both times: how tokens are put together
        into events on their way here does not matter.
        """
        seconds: list[float] = []
        for _ in range(repeats):
            prompts = [self.prompt(context) for _ in range(num_sequences)]
            await self._batch(prompts, num_tokens)
            short = await self._batch(prompts, 1)
            seconds.append((await self._batch(prompts, num_tokens) - short) / (num_tokens - 1))
        return Measured("decode", 0, context + num_tokens // 2, num_sequences, max(_LEAST_SECONDS, median(seconds)))

    async def joined(self, num_sequences: int, num_new: int, repeats: int) -> Measured:
        """Time to the first token of a new prompt while so many sequences decode. It comes at any moment of a step: a mean of many."""
        others = [asyncio.create_task(self._decode_on()) for _ in range(num_sequences)]
        seconds = []
        try:
            for _ in range(_JOINS * repeats):
                prompt = self.prompt(num_new)
                await asyncio.sleep(self.rng.uniform(*_JOIN_PAUSE_SECONDS))
                seen = await self.stream(prompt, _ANSWER_TOKENS)
                seconds.append(seen.first - seen.sent)
        finally:
            for task in others:
                task.cancel()
            await asyncio.wait(others)
        for task in others:
            if not task.cancelled():
                await task  # why it could not decode
        return Measured("joined", num_new, _JOINED_CONTEXT + _LONG_ANSWER // 2, num_sequences, fmean(seconds[repeats:]))

    async def _decode_on(self) -> None:
        while True:
            await self.stream(self.prompt(_JOINED_CONTEXT), _LONG_ANSWER)

    async def _batch(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Seconds until the last of them has ended."""
        streams = await asyncio.gather(*(self.stream(prompt, num_tokens) for prompt in prompts))
        return max(seen.last for seen in streams) - min(seen.sent for seen in streams)


async def read_facts(http: aiohttp.ClientSession, url: str) -> EngineFacts:
    """Raises CalibrationError where the engine does not answer as vLLM does."""
    try:
        models = msgspec.json.decode(await _get(http, f"{url}/v1/models"), type=_Models).data
        version = msgspec.json.decode(await _get(http, f"{url}/version"), type=_Version).version
        metrics = (await _get(http, f"{url}/metrics")).decode()
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise CalibrationError(f"{url} does not answer as vLLM does: {error}") from error
    found = _METRIC.search(metrics)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1))) if found else {}
    if not labels.get("block_size", "").isdigit() or not labels.get("num_gpu_blocks", "").isdigit() or not models:
        raise CalibrationError(f"{url} does not say its block size and blocks (vllm:cache_config_info): is it vLLM itself?")
    return EngineFacts(
        f"vllm {version}", models[0].id, models[0].max_model_len, int(labels["block_size"]), int(labels["num_gpu_blocks"]) - 1
    )


async def _get(http: aiohttp.ClientSession, url: str) -> bytes:
    async with http.get(url) as response:
        response.raise_for_status()
        return await response.read()


async def measure(url: str, plan: Plan, progress: Callable[[str], None]) -> tuple[EngineFacts, list[Measured]]:
    """All points of the plan that the engine can hold. Raises CalibrationError."""
    # Connections of their own: one kept open may be closed by the engine just when it is wanted.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0)) as http:
        facts = await read_facts(http, url)
        meter = Meter(http, url, facts.model)
        plan = plan.within(facts.max_model_len, facts.capacity_tokens)
        points = []
        for context, new in [*((0, n) for n in plan.prefills), *plan.cached]:
            progress(f"prefill of {new:,} tokens behind {context:,}")
            points.append(await meter.prefill(new, context, plan.repeats, plan.pause_seconds))
        for others, new in plan.joined:
            progress(f"prefill of {new:,} tokens beside {others}")
            points.append(await meter.joined(others, new, plan.repeats))
        for sequences, context in plan.decodes(facts.capacity_tokens):
            progress(f"decode of {sequences} × {context:,} tokens")
            points.append(await meter.decode(sequences, context, plan.num_decode_tokens, plan.repeats))
        return facts, points
