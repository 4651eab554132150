"""Anthropic Messages: the answer side, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import msgspec
import xxhash

from agentserve.dialects.account import account
from agentserve.dialects.anthropic_errors import error_body
from agentserve.dialects.blocks import Block, BlockCutter, Change, Closed, Grown, Kind, Opened, cut
from agentserve.dialects.sse import named_event
from agentserve.divergence import Difference
from agentserve.errors import AgentserveError
from agentserve.plans import Outcome, Plan, PromptChange
from model.chat import Delta

STOP_REASONS: dict[str, str] = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
"""By finish reason; any other is end_turn, or stop_sequence where a stop string ended the turn."""

MISS_REASONS: dict[Difference, str] = {Difference.SYSTEM_CHANGED: "system_changed", Difference.TOOLS_CHANGED: "tools_changed"}
"""Anthropic's reasons by difference; any other is messages_changed."""

PING = named_event({"type": "ping"})

_DELTAS: dict[Kind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesAnswer:
    """Writes one answer."""

    keep_alive = PING

    def __init__(self, answer_id: str, model: str, *, diagnosed: bool = False) -> None:
        self._id = answer_id
        self._model = model
        self._diagnosed = diagnosed
        self._cutter = BlockCutter()

    def opening(self, plan: Plan) -> bytes:
        """message_start; what the cache gave is only known at the end, so here all of the prompt counts as input."""
        usage = {"input_tokens": plan.num_prompt_tokens, "output_tokens": 0}
        return named_event({"type": "message_start", "message": self._message(plan, [], None, None, usage)})

    def deltas(self, deltas: list[Delta]) -> bytes:
        """Blocks begin, grow and end."""
        return b"".join(map(_events, self._cutter.feed(deltas)))

    def closing(self, plan: Plan, outcome: Outcome) -> bytes:
        """The end of the last block, message_delta with the final usage, message_stop."""
        stop_reason, stop_sequence = _stop(outcome)
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        last = b"".join(map(_events, self._cutter.finish()))
        end = {"type": "message_delta", "delta": delta, "usage": usage(plan, outcome)}
        return last + named_event(end) + named_event({"type": "message_stop"})

    def failure(self, error: AgentserveError) -> bytes:
        """An error event."""
        return named_event(error_body(error))

    def refusal(self, error: AgentserveError) -> dict[str, Any]:
        """The body of an error status."""
        return error_body(error)

    def whole(self, plan: Plan, outcome: Outcome, deltas: Iterable[Delta]) -> bytes:
        """The body of an answer that is not streamed."""
        blocks = [_block(block) for block in cut(deltas)]
        return msgspec.json.encode(self._message(plan, blocks, *_stop(outcome), usage(plan, outcome)))

    def _message(
        self, plan: Plan, content: list[dict[str, Any]], stop_reason: str | None, stop_sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": usage,
        }
        return {**message, "diagnostics": diagnostics(plan.since)} if self._diagnosed else message


def usage(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """Tokens as Anthropic counts them: input + read + creation is the prompt. Cache fields are absent where the engine does not say.

    What the engine computes it also caches, at no other price; so it all counts as input and nothing as creation.
    """
    cached = outcome.hits.actual
    shown: dict[str, Any] = {"input_tokens": plan.num_prompt_tokens - (cached or 0), "output_tokens": outcome.num_generated_tokens}
    if cached is not None:
        shown |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    return {**shown, "agentserve": account(plan, outcome)}


def diagnostics(change: PromptChange | None) -> dict[str, Any] | None:
    """Why the prefix of the prompt that the client names could not be reused whole, as Anthropic's API says it; None: it could.

    What its API calls changed is found by meaning here, and what the canonicaliser takes out has not changed.
    """
    if change is None or (change.found and change.divergence is None):
        return None
    if change.divergence is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    left = change.divergence
    if left.difference is Difference.TURNS_TAKEN_BACK:  # what is asked again is all there
        return None
    kind = MISS_REASONS.get(left.difference, "messages_changed")
    return {"cache_miss_reason": {"type": kind, "cache_missed_input_tokens": left.lost_tokens}}


def signature(thinking: str) -> str:
    """Marks a thinking block as whole. Clients hand it back with the block; the ledger knows the block by its text."""
    return xxhash.xxh3_128_hexdigest(thinking.encode("utf-8", "surrogatepass"))


def _stop(outcome: Outcome) -> tuple[str, str | None]:
    if outcome.finish_reason == "stop" and isinstance(outcome.stop_reason, str):
        return "stop_sequence", outcome.stop_reason
    return STOP_REASONS.get(outcome.finish_reason, "end_turn"), None


def _events(change: Change) -> bytes:
    index = change.block.index
    match change:
        case Opened(block):
            return named_event({"type": "content_block_start", "index": index, "content_block": _empty(block)})
        case Grown(block, fragment):
            kind, field = _DELTAS[block.kind]
            return named_event({"type": "content_block_delta", "index": index, "delta": {"type": kind, field: fragment}})
        case Closed(block):
            end = named_event({"type": "content_block_stop", "index": index})
            if block.kind != "reasoning":
                return end
            delta = {"type": "signature_delta", "signature": signature(block.text)}
            return named_event({"type": "content_block_delta", "index": index, "delta": delta}) + end
    assert_never(change)


def _empty(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _block(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": signature(block.text)}
        case "call":  # the fragments of a call join to one JSON object, which is passed on as the model wrote it
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": msgspec.Raw(block.text.encode())}
