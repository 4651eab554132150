"""Which tools the model may or must call, as the dialects say it."""

from __future__ import annotations

from typing import Any

from agentserve.conversation import ToolChoice
from agentserve.errors import InvalidRequest, Unsupported

_KNOWN = "auto, none, required, a function by name, or allowed_tools"


def openai_tool_choice(choice: Any, parallel: bool | None) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls` of chat completions and of Responses. Raises InvalidRequest and Unsupported.

    Chat completions put a function's name below `function`, Responses beside `type`; the parts of `allowed_tools` likewise.
    """
    single = parallel is False
    match choice:
        case None | "auto":
            return ToolChoice(single=single)
        case "none":
            return ToolChoice("none")
        case "required":
            return ToolChoice("required", single=single)
        case {"type": "function"}:
            return ToolChoice("required", (_name(choice),), single=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
            return _allowed(mode, tools, single)
        case {"type": "allowed_tools", "mode": mode, "tools": list(tools)}:
            return _allowed(mode, tools, single)
    raise Unsupported(f"tool_choice {choice!r} is not supported: use {_KNOWN}", param="tool_choice")


def anthropic_tool_choice(choice: dict[str, Any] | None) -> ToolChoice:
    """`tool_choice` of Messages, with `disable_parallel_tool_use` in it. Raises InvalidRequest and Unsupported."""
    said = choice or {"type": "auto"}
    single = said.get("disable_parallel_tool_use") is True
    match said.get("type"):
        case "auto":
            return ToolChoice(single=single)
        case "none":
            return ToolChoice("none")
        case "any":
            return ToolChoice("required", single=single)
        case "tool":
            return ToolChoice("required", (_name(said),), single=True)
    known = "auto, any, tool or none"
    raise Unsupported(f"tool_choice of type {said.get('type')!r} is not supported: use {known}", param="tool_choice")


def _allowed(mode: Any, tools: list[Any], single: bool) -> ToolChoice:
    names = tuple(_name(tool) for tool in tools)
    if mode not in ("auto", "required") or not names:
        raise InvalidRequest("tool_choice.allowed_tools must have a mode, auto or required, and at least one tool", param="tool_choice")
    return ToolChoice(mode, names, single=single)


def _name(form: Any) -> str:
    """The name in either form of a function."""
    match form:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequest("tool_choice must name a tool by its name", param="tool_choice")
