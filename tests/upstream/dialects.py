"""The request and answer bodies of the three generating routes, field for field as vLLM 0.32 writes them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from model.conversation import Json, canonical_json
from tests.upstream.script import Generation, Renderer

# JSON objects on their way to the wire.
Body: TypeAlias = dict[str, Any]


class BadRequest(ValueError):
    """The body is not what the route takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a body is written from."""

    request_id: str
    model: str
    created: int
    generation: Generation
    chunks: tuple[tuple[int, ...], ...]
    hidden_chunks: frozenset[int]
    prompt_ids: tuple[int, ...]
    renderer: Renderer

    def texts(self) -> Iterator[str]:
        """The decoded text of each chunk, whole characters only, without the stop id."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for number, chunk in enumerate(self.chunks, start=1):
            visible = [token for token in chunk if token != self.renderer.stop_id]
            yield decoder.decode(self.renderer.decode_bytes(visible), final=number == len(self.chunks))

    def shown_ids(self, number: int) -> list[int]:
        return [] if number in self.hidden_chunks else list(self.chunks[number])

    def end(self, number: int) -> Body:
        """finish_reason and stop_reason of chunk `number`: None before the last."""
        if number < len(self.chunks) - 1:
            return {"finish_reason": None, "stop_reason": None}
        return {"finish_reason": self.generation.finish_reason, "stop_reason": self.generation.stop_reason}


class Dialect(Protocol):
    """One route's bodies."""

    def prompt_ids(self, body: Mapping[str, Any], renderer: Renderer) -> list[int]: ...

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Json]: ...

    def events(self, body: Mapping[str, Any], answer: Answer) -> Iterator[Body]:
        """One body a chunk, in order."""
        ...

    def usage_event(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body: ...

    def full(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body: ...


def logprob_of(token: int) -> float:
    """The upstream's log probability of a generated id: made up, finite but for ids that 97 divides, and another one for most ids."""
    return float("-inf") if token % 97 == 0 else -0.25 - token % 16 / 8


def likeliest(token: int, number: int) -> list[tuple[int, float]]:
    """As many ids in place of `token`, itself first."""
    return [(token, logprob_of(token)), *((token + step, -5.0 - step) for step in range(1, number))] if number else []


def _content(ids: list[int], number: int) -> Body:
    """Log probabilities by id, as the token-id route writes them: the sampled token first, then the likeliest ones."""
    return {
        "content": [
            {
                "token_id": token,
                "logprob": max(logprob_of(token), -9999.0),
                "rank": 1,
                "top_logprobs": [
                    {"token_id": one, "logprob": max(value, -9999.0), "rank": 1} for one, value in likeliest(token, number + 1)
                ],
            }
            for token in ids
        ]
    }


def _lists(ids: list[int], number: int) -> Body:
    """The same as the completions route writes it with `return_tokens_as_token_ids`."""
    return {
        "text_offset": [0] * len(ids),
        "tokens": [f"token_id:{token}" for token in ids],
        "token_logprobs": [max(logprob_of(token), -9999.0) for token in ids],
        "top_logprobs": [{f"token_id:{one}": max(value, -9999.0) for one, value in likeliest(token, number)} or None for token in ids],
    }


def _ids(value: object, name: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise BadRequest(f"{name} must be a list of token ids")
    return value


class Generate:
    """POST /inference/v1/generate: `token_ids` and `sampling_params` in, `token_ids` out."""

    def prompt_ids(self, body: Mapping[str, Any], renderer: Renderer) -> list[int]:
        return _ids(body.get("token_ids"), "token_ids")

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Json]:
        sampling = body.get("sampling_params")
        if not isinstance(sampling, dict):
            raise BadRequest("sampling_params: Field required")
        return sampling

    def events(self, body: Mapping[str, Any], answer: Answer) -> Iterator[Body]:
        text_mode = body.get("output_mode") == "text"
        for number, text in enumerate(answer.texts()):
            choice = {"index": 0, **answer.end(number), "token_ids": answer.shown_ids(number), "routed_experts": None}
            choice |= {"sampling_mask": None, "weight_versions": None} | ({"text": text} if text_mode else {}) | {"logprobs": None}
            if not text_mode and (number_of := body["sampling_params"].get("logprobs")) is not None:
                choice["logprobs"] = _content(answer.shown_ids(number), number_of)
            event: Body = {"request_id": answer.request_id, "usage": None, "output_mode": "text" if text_mode else "tokens"}
            if number == 0 and body.get("return_token_ids"):
                event["prompt_token_ids"] = list(answer.prompt_ids)
            yield event | {"choices": [choice]}

    def usage_event(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        mode = "text" if body.get("output_mode") == "text" else "tokens"
        return {"request_id": answer.request_id, "usage": usage, "output_mode": mode, "choices": []}

    def full(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        text_mode = body.get("output_mode") == "text"
        choice = {"index": 0, **answer.end(len(answer.chunks) - 1), "token_ids": list(answer.generation.ids), "logprobs": None}
        choice |= {"text": "".join(answer.texts())} if text_mode else {}
        return {
            "request_id": answer.request_id,
            "model": answer.model,
            "created": answer.created,
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": list(answer.prompt_ids) if body.get("return_token_ids") else None,
            "kv_transfer_params": None,
            "output_mode": "text" if text_mode else "tokens",
            "choices": [choice],
        }


class Completions:
    """POST /v1/completions: `prompt` as ids or text; with `return_token_ids` the ids come back too."""

    def prompt_ids(self, body: Mapping[str, Any], renderer: Renderer) -> list[int]:
        prompt = body.get("prompt")
        return renderer.encode(prompt) if isinstance(prompt, str) else _ids(prompt, "prompt")

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Json]:
        return body

    def events(self, body: Mapping[str, Any], answer: Answer) -> Iterator[Body]:
        with_ids = bool(body.get("return_token_ids"))
        for number, text in enumerate(answer.texts()):
            choice: Body = {"index": 0, "text": text, "logprobs": None, **answer.end(number)}
            choice["prompt_token_ids"] = list(answer.prompt_ids) if with_ids and number == 0 else None
            choice["token_ids"] = answer.shown_ids(number) if with_ids else None
            if body.get("return_tokens_as_token_ids") and body.get("logprobs") is not None:
                choice["logprobs"] = _lists(answer.shown_ids(number), body["logprobs"])
            yield self._head(answer) | {"choices": [choice], "usage": None}

    def usage_event(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        return self._head(answer) | {"choices": [], "usage": usage}

    def full(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        with_ids = bool(body.get("return_token_ids"))
        choice = {"index": 0, "text": "".join(answer.texts()), "logprobs": None, **answer.end(len(answer.chunks) - 1)}
        choice["token_ids"] = list(answer.generation.ids) if with_ids else None
        choice["prompt_token_ids"] = list(answer.prompt_ids) if with_ids else None
        return self._head(answer) | {"choices": [choice], "usage": usage}

    def _head(self, answer: Answer) -> Body:
        return {"id": f"cmpl-{answer.request_id}", "object": "text_completion", "created": answer.created, "model": answer.model}


class Chat:
    """POST /v1/chat/completions, the least of it: messages are encoded as JSON text, the answer is the script's item."""

    def prompt_ids(self, body: Mapping[str, Any], renderer: Renderer) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: Field required")
        return renderer.encode(canonical_json(messages))

    def sampling(self, body: Mapping[str, Any]) -> Mapping[str, Json]:
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        return {**body, "max_tokens": limit}

    def events(self, body: Mapping[str, Any], answer: Answer) -> Iterator[Body]:
        deltas = self._deltas(answer)
        for number in range(len(answer.chunks)):
            choice: Body = {"index": 0, "delta": next(deltas), "logprobs": None, "finish_reason": None, "token_ids": None}
            if number == len(answer.chunks) - 1:
                choice |= {"finish_reason": self._finish(answer), "stop_reason": answer.generation.stop_reason}
            if body.get("return_token_ids"):
                choice["token_ids"] = answer.shown_ids(number)
            yield self._head(answer, "chat.completion.chunk") | {"choices": [choice]}

    def usage_event(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        return self._head(answer, "chat.completion.chunk") | {"choices": [], "usage": usage}

    def full(self, body: Mapping[str, Any], answer: Answer, usage: Body) -> Body:
        item = answer.generation.item
        message = {"role": "assistant", "content": item.text or None, "reasoning": item.reasoning, "tool_calls": self._calls(answer)}
        choice: Body = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._finish(answer)}
        choice |= {"stop_reason": answer.generation.stop_reason, "token_ids": None}
        if body.get("return_token_ids"):
            choice["token_ids"] = list(answer.generation.ids)
        return self._head(answer, "chat.completion") | {"choices": [choice], "usage": usage}

    def _finish(self, answer: Answer) -> str:
        stopped = answer.generation.finish_reason == "stop"
        return "tool_calls" if stopped and answer.generation.item.calls else answer.generation.finish_reason

    def _calls(self, answer: Answer) -> list[Body]:
        calls: list[Body] = []
        for call in answer.generation.item.calls:
            arguments = call.arguments if isinstance(call.arguments, str) else msgspec.json.encode(call.arguments).decode()
            calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
        return calls

    def _deltas(self, answer: Answer) -> Iterator[Body]:
        """The whole item in the first chunk, nothing in later ones."""
        item = answer.generation.item
        first: Body = {"role": "assistant", "content": item.text}
        if item.reasoning is not None:
            first["reasoning"] = item.reasoning
        if item.calls:
            first["tool_calls"] = [{"index": index, **call} for index, call in enumerate(self._calls(answer))]
        yield first
        while True:
            yield {"content": ""}

    def _head(self, answer: Answer, kind: str) -> Body:
        return {"id": f"chatcmpl-{answer.request_id}", "object": kind, "created": answer.created, "model": answer.model}


DIALECTS: dict[str, Dialect] = {
    "/inference/v1/generate": Generate(),
    "/v1/completions": Completions(),
    "/v1/chat/completions": Chat(),
}
