"""Tool calls and their results, as every dialect reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from agentserve.dialects.json_body import MAX_DEPTH, is_deep
from model.conversation import Json, ToolCall, ToolResultItem

_object = msgspec.json.Decoder(dict[str, Any])


def in_call_order(results: Sequence[ToolResultItem], calls: Sequence[ToolCall]) -> list[ToolResultItem]:
    """Results sorted as their calls stand; those of unknown calls keep their relative place behind the known ones."""
    order: dict[str, int] = {}
    for index, call in enumerate(calls):
        order.setdefault(call.id, index)
    return sorted(results, key=lambda result: order.get(result.call_id, len(order)))


def parse_arguments(text: str) -> dict[str, Json] | str:
    """A call's argument text as an object; the text itself where it is not one, or too deep. Empty text is no arguments."""
    if not text or text.isspace():
        return {}
    if len(text) > 2 * MAX_DEPTH and is_deep(text.encode("utf-8", "surrogatepass")):
        return text
    try:
        return _object.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
