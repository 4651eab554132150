"""What an engine says of a request that it refuses, told in the fields that the client sent.

vLLM names its own parameters, or none, and where its own parsing fails it shows how its libraries write that down.
"""

from __future__ import annotations

import re

from agentserve.conversation import TurnOptions
from agentserve.errors import AgentserveError, EngineRefused

_OURS = {"extra_args": "vllm_xargs"}
"""Engine's name of a field: the client's, in every dialect."""
_WRAPPINGS = ("body", "sampling_params")
_FIELD_ERROR = re.compile(r"'loc': (?P<loc>'[^']*'|\([^)]*\)).*?'msg': (?P<quote>['\"])(?P<said>.*?)(?P=quote)", re.DOTALL)
_TEXT_ERROR = re.compile(r"validation errors? for [^\n]*\n(?P<loc>[^\n]*)\n\s+(?P<said>[^\n]*?)(?: \[type=[^\n]*)?(?:\n|$)")
_UNSAYABLE = re.compile(r"serialize ints|[Ii]nteger value out of range")
_GRAMMAR = re.compile(r"grammar|schema|regex|structur|guided", re.IGNORECASE)
_INDEX = re.compile(r"\.(\d+)")


def in_clients_fields(error: AgentserveError, options: TurnOptions) -> AgentserveError:
    """`error`; one of an engine that found the request wrong (400, 422) gets the path of the client's field and a plain message."""
    if not isinstance(error, EngineRefused) or error.status not in (400, 422) or error.code == "context_length_exceeded":
        return error
    found = _FIELD_ERROR.search(error.message) or _TEXT_ERROR.search(error.message)
    path = _path(error.param or "") or (_path(found["loc"]) if found is not None else "")
    param = _clients(path, options) if path else _named_in(error.message, options)
    if found is not None:
        said = found["said"].removeprefix("Value error, ")
        error.message = f"{param or path or 'the request'}: {said}"
    elif _UNSAYABLE.search(error.message):
        error.message = f"{param or 'the request'} holds an integer beyond 64 bits"
    error.param = param
    return error


def _path(loc: str) -> str:
    """An engine's path without what the engine wraps fields in; empty where nothing is left."""
    names = [name for name in re.split(r"[.,\s()']+", loc) if name]
    while names and names[0] in _WRAPPINGS:
        del names[0]
    return _INDEX.sub(r"[\1]", ".".join(names))


def _clients(path: str, options: TurnOptions) -> str:
    first, rest = re.match(r"([^.\[]*)(.*)", path, re.DOTALL).groups()  # type: ignore[union-attr]  # matches any text
    renamed = options.names.get(first)
    if renamed is not None:  # what is below it has another form there
        return renamed
    return _OURS.get(first, first) + rest


def _named_in(message: str, options: TurnOptions) -> str | None:
    """The first field that the client sent and the message names; else what a complaint about a grammar must be about."""
    sent = {*options.sampling, *_OURS} | ({"priority"} if options.priority is not None else set())
    for word in re.findall(r"\w+", message):
        if word in sent:
            return _clients(word, options)
    if not _GRAMMAR.search(message):
        return None
    if "structured_outputs" in options.sampling:
        return _clients("structured_outputs", options)
    return None if options.tools.is_free else "tools"
