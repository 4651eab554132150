"""Request and answer bodies of vLLM's two token-id routes, as far as clients of token ids read them (vLLM 0.32)."""

from __future__ import annotations

from array import array
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from replays.sim_engine.answers import Said

Body: TypeAlias = dict[str, Any]


class Sampling(Struct):
    """What matters of the sampling parameters: how long an answer may be, and whether it may end before that."""

    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None


class CompletionsRequest(Sampling):
    prompt: list[int] = []
    model: str | None = None
    stream: bool = False
    request_id: str = ""
    session_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False

    @property
    def ids(self) -> list[int]:
        return self.prompt

    @property
    def sampling(self) -> Sampling:
        return self


class GenerateRequest(Struct):
    token_ids: list[int]
    sampling_params: Sampling
    model: str | None = None
    stream: bool = False
    request_id: str = ""
    session_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool = False
    output_mode: str = "tokens"

    @property
    def ids(self) -> list[int]:
        return self.token_ids

    @property
    def sampling(self) -> Sampling:
        return self.sampling_params


AnyRequest: TypeAlias = CompletionsRequest | GenerateRequest


class Route(Protocol):
    """One route's bodies."""

    path: str

    def read(self, raw: bytes) -> AnyRequest:
        """Raises msgspec.MsgspecError where the body is not this route's."""
        ...

    def body(self, request: AnyRequest, choice: Body, usage: Body | None, *, stream: bool) -> Body:
        """The whole answer, or an event of it; `choice` empty: the event that has only the usage."""
        ...


class Completions:
    """POST /v1/completions with token ids."""

    path = "/v1/completions"

    def read(self, raw: bytes) -> AnyRequest:
        return msgspec.json.decode(raw, type=CompletionsRequest)

    def body(self, request: AnyRequest, choice: Body, usage: Body | None, *, stream: bool) -> Body:
        choices = [{"index": 0, "logprobs": None, **choice}] if choice else []
        head = {"id": f"cmpl-{request.request_id}", "object": "text_completion", "created": 0, "model": request.model}
        return {**head, "choices": choices, "usage": usage}


class Generate:
    """POST /inference/v1/generate."""

    path = "/inference/v1/generate"

    def read(self, raw: bytes) -> AnyRequest:
        return msgspec.json.decode(raw, type=GenerateRequest)

    def body(self, request: AnyRequest, choice: Body, usage: Body | None, *, stream: bool) -> Body:
        if choice and getattr(request, "output_mode", "tokens") != "text":
            choice = {name: value for name, value in choice.items() if name != "text"}
        choices = [{"index": 0, "logprobs": None, **choice}] if choice else []
        return {"request_id": request.request_id, "choices": choices, "usage": usage, "output_mode": "tokens"}


ROUTES: dict[str, Route] = {route.path: route for route in (Completions(), Generate())}


def choice_of(said: Said, places: range, text: str, *, is_last: bool, prompt: array[int] | None) -> Body:
    """The part of an answer that has just come. `prompt`: its ids are wanted back."""
    choice: Body = {"text": text, "token_ids": list(said.ids[places.start : places.stop])}
    choice |= {"finish_reason": said.finish_reason if is_last else None, "stop_reason": None}
    if prompt is not None:
        choice["prompt_token_ids"] = prompt.tolist()
    return choice


def usage_of(num_prompt_tokens: int, num_generated_tokens: int, num_cached_tokens: int) -> Body:
    """As vLLM counts with --enable-prompt-tokens-details."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "total_tokens": num_prompt_tokens + num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
