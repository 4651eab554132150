"""Engines: token ids in, token ids out. The interface stands here with its user; each engine is a file of this folder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from model.conversation import Json


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine says of itself. `None` where it does not say: unknown is not zero."""

    name: str
    """Engine and version for reports, such as "vllm 0.32.0"."""
    model: str
    """The served model name that requests must carry."""
    max_model_len: int
    """Prompt plus output, tokens."""
    block_size: int | None = None
    """Tokens of one KV block."""
    num_blocks: int | None = None
    """Usable KV blocks (without vLLM's null block)."""
    root: str | None = None
    """The folder or name that the engine loaded the model from."""

    @property
    def kv_capacity_tokens(self) -> int | None:
        """Tokens that the KV pool holds: num_blocks × block_size."""
        if self.block_size is None or self.num_blocks is None:
            return None
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request to the engine.

    `prompt_json` is the prompt ids as JSON text without brackets ("1,2,3") in pieces that join to it, kept so that a long prompt is never
    encoded twice. `sampling` holds vLLM's own names (temperature, top_p, stop, seed, ignore_eos, logit_bias, structured_outputs, …);
    only what the client said. `max_tokens` is already cut to the room that is left.
    """

    request_id: str
    prompt_json: tuple[bytes, ...]
    num_prompt_tokens: int
    max_tokens: int
    sampling: Mapping[str, Json] = field(default_factory=dict)
    session_id: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    xargs: Mapping[str, Json] = field(default_factory=dict)
    logprobs: int | None = None
    """How many of the likeliest tokens to name for each generated one, beside its own log probability; None: nothing."""
    constrains_reasoning: bool = False
    """Whether `structured_outputs` hold from the first token, where the engine would else wait for the end of reasoning."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own counts for one request, in tokens. `num_cached_tokens` None: the engine does not say."""

    num_prompt_tokens: int
    num_generated_tokens: int
    num_cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class IdLogprob:
    """The log probability of one generated id, and the likeliest ids in its place with theirs, in the engine's order."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A step of a generation: new ids, then at the end the finish reason ("stop", "length", …) and the usage."""

    ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop id that ended it, as the engine says."""
    text: str | None = None
    """The engine's own decoded text of this step, where it sends one (needed only to cut at stop strings)."""
    logprobs: Json = None
    id_logprobs: tuple[IdLogprob, ...] = ()
    """One for each of `ids`, where the request asked for them."""
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the engine's own chat route, which renders and parses by itself. `body` is its JSON, model and stream included."""

    body: bytes
    session_id: str


@dataclass(frozen=True, slots=True)
class ChatCallPart:
    """A piece of call `index`: its name once, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ChatChunk:
    """A step of an answer that the engine has parsed."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ChatCallPart, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None


class Engine(Protocol):
    """An engine that serves one model. Raises `agentserve.errors.EngineError` and its kinds."""

    info: EngineInfo
    url: str
    """Where the engine itself listens."""

    @property
    def num_retries(self) -> int:
        """Requests that were sent a second time, as their connection had ended before anything arrived."""
        ...

    async def start(self) -> None:
        """Connect (or start the child process) and fill `info`. Returns when the engine answers; raises if it never will."""
        ...

    async def close(self) -> None:
        """Drop connections, stop a child process and wait for it. Safe to call twice."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine answers now (one second at most)."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Run one request. Closing the generator (or cancelling its task) aborts it at the engine."""
        ...

    async def metrics(self) -> bytes:
        """The engine's Prometheus text, unchanged."""
        ...


@runtime_checkable
class ChatEngine(Protocol):
    """An engine that also renders and parses chats by itself. Raises as `Engine` does."""

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        """Run one request on the engine's own chat route. Closing the generator aborts it, as for `generate`."""
        ...
