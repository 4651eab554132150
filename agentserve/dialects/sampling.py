"""Request fields beside the history that mean the same in every dialect, most of them vLLM's own extensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentserve.dialects.ranges import check_integers, check_ranges
from agentserve.identity import BODY_FIELDS
from model.conversation import Json


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that go to the engine under the same name, and those that this server reads on every route."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: dict[str, Any] | None = None
    priority: int | None = None
    session_id: str | None = None
    session_params: Any = None
    litellm_session_id: Any = None
    program_id: Any = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


_NOT_SAMPLING = frozenset(
    {"priority", "session_id", "session_params", "litellm_session_id", "program_id", "prompt_cache_key", "metadata", "vllm_xargs"}
)
PASSED = tuple(name for name in SamplingFields.__struct_fields__ if name not in _NOT_SAMPLING)
"""Sampling fields that go to the engine as they are."""


def sampling(
    fields: SamplingFields, structured: dict[str, Json] | None, max_tokens: int | None, names: Mapping[str, str]
) -> dict[str, Json]:
    """What the client said, in the engine's names; `structured` is what the dialect's own field asks of the answer's text.

    `max_tokens`: at most so many tokens may the answer have. `names`: as in `TurnOptions`. Raises InvalidRequest.
    """
    said: dict[str, Json] = {name: value for name in PASSED if (value := getattr(fields, name)) is not None}
    check_ranges(said if fields.priority is None else {**said, "priority": fields.priority}, max_tokens)
    if structured is not None:
        said["structured_outputs"] = structured
    check_integers(said.get("structured_outputs"), names.get("structured_outputs", "structured_outputs"))
    check_integers(fields.vllm_xargs, "vllm_xargs")
    return said


def body_session(fields: SamplingFields) -> str | None:
    """The session that the body names, by the first of the fields in `identity.BODY_FIELDS` that holds a text."""
    for row in BODY_FIELDS:
        value: Any = getattr(fields, row.path[0])
        for name in row.path[1:]:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, str) and value:
            return value
    return None
