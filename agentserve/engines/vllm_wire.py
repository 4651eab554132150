"""vLLM's wire format: request bodies and stream events of its two token-id routes, and its error bodies. No I/O.

Fields as in vLLM 0.32: `entrypoints/scale_out/token_in_token_out/protocol.py` and `entrypoints/openai/completion/protocol.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import msgspec

from agentserve.engines import Chunk, GenerateRequest, IdLogprob, Usage
from agentserve.errors import EngineRefused, EngineUnavailable
from model.conversation import Json

SHORT_PIECE_BYTES = 32_768
LEAST_LOGPROB = -9999.0

Body: TypeAlias = "tuple[bytes, ...]"
"""A JSON body in pieces."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way to send token ids: where to, and the JSON body for (request, served model name)."""

    path: str
    body: Callable[[GenerateRequest, str], Body]


def _generate_body(request: GenerateRequest, model: str) -> Body:
    sampling: dict[str, Json] = {"detokenize": False, **request.sampling, "max_tokens": request.max_tokens}
    # Text costs the engine a detokenizer step for every token, so it is asked for only where something is read from it.
    wants_text = bool(request.sampling.get("stop")) or request.sampling.get("logprobs") is not None
    if wants_text:
        sampling["detokenize"] = True
    if request.logprobs is not None:  # by ids, which only this mode has
        sampling["logprobs"], wants_text = request.logprobs, False
    if request.xargs:
        sampling["extra_args"] = dict(request.xargs)
    fields = _common_fields(request, model)
    fields["output_mode"] = "text" if wants_text else "tokens"
    fields["sampling_params"] = sampling
    if request.constrains_reasoning:
        fields["reasoning_ended"] = True
    return _with_ids(b'{"token_ids":[', request, fields)


def _completions_body(request: GenerateRequest, model: str) -> Body:
    fields: dict[str, Json] = {**request.sampling, **_common_fields(request, model)}
    fields["max_tokens"] = request.max_tokens
    fields["return_token_ids"] = True
    if request.logprobs is not None:
        fields["logprobs"], fields["return_tokens_as_token_ids"] = request.logprobs, True
    if request.xargs:
        fields["vllm_xargs"] = dict(request.xargs)
    return _with_ids(b'{"prompt":[', request, fields)


def _common_fields(request: GenerateRequest, model: str) -> dict[str, Json]:
    fields: dict[str, Json] = {
        "model": model,
        "request_id": request.request_id,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.priority is not None:
        fields["priority"] = request.priority
    if request.cache_salt is not None:
        fields["cache_salt"] = request.cache_salt
    return fields


def _with_ids(opening: bytes, request: GenerateRequest, fields: Mapping[str, Json]) -> Body:
    pieces = (opening, *request.prompt_json, b"]," + msgspec.json.encode(fields)[1:])
    return tuple(_coalesced(pieces))


def _coalesced(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same text with neighbouring short pieces joined: each piece is a write of its own."""
    held: list[bytes] = []
    for piece in pieces:
        if len(piece) > SHORT_PIECE_BYTES:
            if held:
                yield b"".join(held)
            held = []
            yield piece
        else:
            held.append(piece)
    if held:
        yield b"".join(held)


GENERATE = Route("/inference/v1/generate", _generate_body)
"""Token ids in and out, no prompt echo; there when vLLM runs with --enable-scale-out."""
COMPLETIONS = Route("/v1/completions", _completions_body)
"""Always there. Echoes the prompt ids in its first event, and decodes text whether it is read or not."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """Counts of one request, in tokens."""

    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Choice(msgspec.Struct):
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    text: str | None = None
    logprobs: dict[str, Any] | None = None


class WireError(msgspec.Struct):
    """What went wrong, in an error body and in a stream."""

    message: str = ""
    param: str | None = None
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: WireUsage | None = None
    error: WireError | None = None


class _ErrorBody(msgspec.Struct):
    """`{"error": {…}}`; the flat form of older versions; and FastAPI's `detail`."""

    error: WireError | None = None
    message: str | None = None
    detail: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_ERROR_BODY = msgspec.json.Decoder(_ErrorBody)


def read_event(data: bytes) -> Chunk:
    """One event of either route as a chunk.

    Raises `EngineRefused` where the event is an error (vLLM has sent status 200 by then; its own code is taken), and
    `msgspec.MsgspecError` where it is not such an event.
    """
    event = _EVENT.decode(data)
    if event.error is not None:
        raise_error(event.error)
    usage = None if event.usage is None else read_usage(event.usage)
    if not event.choices:
        return Chunk(usage=usage)
    choice = event.choices[0]
    return Chunk(
        ids=choice.token_ids or (),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        text=choice.text,
        logprobs=_chat_logprobs(choice.logprobs),
        id_logprobs=_id_logprobs(choice.logprobs),
        usage=usage,
    )


def raise_error(error: WireError) -> NoReturn:
    """Raise `EngineRefused` for an error in a stream, with the engine's own code."""
    raise _refusal(error, error.code if isinstance(error.code, int) else 500)


def read_usage(usage: WireUsage) -> Usage:
    """The counts as the server takes them."""
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, None if details is None else details.cached_tokens)


def _chat_logprobs(logprobs: dict[str, Any] | None) -> Json:
    """Log probabilities in the chat API's shape, `{"content": [{token, logprob, bytes, top_logprobs}]}`, from either route."""
    if logprobs is None or "content" in logprobs:
        return logprobs
    tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
    return {
        "content": [
            {**_logprob(token, value), "top_logprobs": [_logprob(*pair) for pair in (top or {}).items()]}
            for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
        ]
    }


_ID = "token_id:"
"""Stands before an id where a token's text would stand."""


def _id_logprobs(logprobs: dict[str, Any] | None) -> tuple[IdLogprob, ...]:
    """Log probabilities by id, from either route; none where the engine names tokens by their text."""
    if logprobs is None:
        return ()
    content = logprobs.get("content")
    if content is not None:
        return tuple(_by_id(entry) for entry in content if "token_id" in entry)
    tokens = logprobs.get("tokens") or []
    if not all(token.startswith(_ID) for token in tokens):
        return ()
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        IdLogprob(_id(token), _finite(value), tuple((_id(one), _finite(other)) for one, other in (top or {}).items()))
        for token, value, top in zip(tokens, logprobs["token_logprobs"], tops, strict=True)
    )


def _by_id(entry: Mapping[str, Any]) -> IdLogprob:
    top = tuple((one["token_id"], _finite(one["logprob"])) for one in entry.get("top_logprobs") or ())
    return IdLogprob(entry["token_id"], _finite(entry["logprob"]), top)


def _id(token: str) -> int:
    return int(token.removeprefix(_ID))


def _finite(value: float | None) -> float:
    # vLLM's own floor for a probability that it did not compute or that is not finite.
    return LEAST_LOGPROB if value is None else max(value, LEAST_LOGPROB)


def _logprob(token: str, value: float | None) -> dict[str, Json]:
    return {"token": token, "logprob": LEAST_LOGPROB if value is None else value, "bytes": list(token.encode(errors="replace"))}


def read_refusal(body: bytes, status: int) -> EngineRefused:
    """The error that an answer with an error status means, with the engine's own message."""
    try:
        parsed = _ERROR_BODY.decode(body)
    except msgspec.MsgspecError:
        parsed = _ErrorBody()
    error = parsed.error or WireError(message=parsed.message or (str(parsed.detail) if parsed.detail else ""))
    if not error.message:
        error.message = f"the engine answered with status {status} and says {body[:500].decode(errors='replace')!r}"
    return _refusal(error, status)


# Clients watch for these words and for OpenAI's error code to know that they must compact, so both are always there.
_CONTEXT_WORDS = "maximum context length"
_CONTEXT_REFUSALS = (_CONTEXT_WORDS, "maximum model length", "max_model_len")


# vLLM's EngineDeadError; it goes on to "see stack trace (above)", where a client has nothing.
_DEAD = "EngineCore encountered an issue"
_DIED = "The engine has died. Send the request again once it is up; its log says what ended it."


def _refusal(error: WireError, status: int) -> EngineRefused:
    message, code = error.message, error.code if isinstance(error.code, str) else None
    if status >= 500 and _DEAD in message:
        return EngineRefused(_DIED, status=EngineUnavailable.status)
    if status == 400 and any(words in message for words in _CONTEXT_REFUSALS):
        code = "context_length_exceeded"
        if _CONTEXT_WORDS not in message:
            message = f"The prompt exceeds this model's maximum context length. {message}"
    return EngineRefused(message, status=status, param=error.param, code=code)
