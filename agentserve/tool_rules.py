"""What a turn's choice of tools asks of the engine, said in the engine's sampling fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentserve.conversation import TurnOptions
from agentserve.errors import InvalidRequest, Unsupported
from model.chat import ChatFormat
from model.conversation import Json, Tool

NEVER = -100.0
"""The bias under which vLLM's API says that a token is banned."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling fields for the engine. `constrained`: they hold from the first token, reasoning included."""

    fields: Mapping[str, Json]
    constrained: bool = False


def sampling_of(options: TurnOptions, chat: ChatFormat, tools: Sequence[Tool]) -> Sampling:
    """The turn's sampling fields under its choice among `tools`.

    A choice that requires a call goes before what the client asked of the answer's text; one that only limits calls does not. Raises
    InvalidRequest for a tool that is not offered, Unsupported where the model's calls cannot be required.
    """
    fields: dict[str, Json] = {**options.sampling, **({"stop": list(options.stop)} if options.stop else {})}
    choice = options.tools
    allowed = _allowed(choice.names, tools)
    if choice.mode == "required" and not allowed:
        raise InvalidRequest("tool_choice requires a call, but no tools are offered", param="tool_choice")
    if not allowed or choice.is_free:
        return Sampling(fields)
    if choice.mode == "none":
        return Sampling(_without_calls(fields, chat))
    required = choice.mode == "required"
    if not required and "structured_outputs" in fields:
        return Sampling(fields)
    constraint = chat.call_constraint(allowed, required=required, single=choice.single)
    if constraint is not None:
        return Sampling({**fields, "structured_outputs": dict(constraint)}, constrained=True)
    if required:
        raise Unsupported("tool_choice cannot require a call: the model's chat format does not mark calls", param="tool_choice")
    return Sampling(fields)


def _allowed(names: tuple[str, ...] | None, tools: Sequence[Tool]) -> list[Tool]:
    if names is None:
        return list(tools)
    offered = {tool.name: tool for tool in tools}
    for name in names:
        if name not in offered:
            raise InvalidRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    return [offered[name] for name in names]


def _without_calls(fields: dict[str, Json], chat: ChatFormat) -> dict[str, Json]:
    """Calls cannot begin; the tools stay in the prompt, so that it is the same as in the session's other turns."""
    if not chat.call_ids:
        return fields
    bias = fields.get("logit_bias")
    return {**fields, "logit_bias": {**(bias if isinstance(bias, dict) else {}), **{str(id): NEVER for id in chat.call_ids}}}
