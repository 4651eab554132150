"""OpenAI chat completions: the answer side, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentserve.dialects.account import account
from agentserve.dialects.errors import error_body
from agentserve.dialects.logprob_form import written
from agentserve.errors import AgentserveError
from agentserve.plans import Outcome, Plan
from model.chat import CallArguments, CallStart, Delta, ReasoningDelta, TextDelta
from model.conversation import AssistantItem

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Writes one answer, or one of several choices. `created` in Unix seconds."""

    id: str
    model: str
    created: int
    include_usage: bool = False
    index: int = 0

    def choice(self, index: int) -> ChatAnswer:
        """The writer of another choice of the same answer."""
        return replace(self, index=index)

    @property
    def keep_alive(self) -> bytes:
        """A comment."""
        return KEEP_ALIVE

    def opening(self, plan: Plan) -> bytes:
        """The first event: the role."""
        return self._event({"role": "assistant", "content": ""})

    def deltas(self, deltas: list[Delta]) -> bytes:
        """One event for each delta."""
        return b"".join(self._event(_delta(delta), logprobs=_logprobs((delta,))) for delta in deltas)

    def closing(self, plan: Plan, outcome: Outcome) -> bytes:
        """The finish reason, the usage if asked for, and the end mark."""
        return self.finish(outcome) + self.end(plan, [outcome])

    def finish(self, outcome: Outcome) -> bytes:
        """The event that ends this choice."""
        return self._event({}, outcome.finish_reason, outcome.stop_reason)

    def end(self, plan: Plan, outcomes: Sequence[Outcome]) -> bytes:
        """What follows the end of the last choice; `outcomes` are those of all choices."""
        if not self.include_usage:
            return DONE
        return _sse({**self._frame("chat.completion.chunk"), "choices": [], "usage": usage(plan, outcomes)}) + DONE

    def failure(self, error: AgentserveError) -> bytes:
        """An error after the first byte: an error event, and no end mark, as nothing ended well."""
        return _sse(error_body(error))

    def refusal(self, error: AgentserveError) -> dict[str, Any]:
        """The body of an error status."""
        return error_body(error)

    def whole(self, plan: Plan, outcome: Outcome, deltas: Iterable[Delta]) -> bytes:
        """The body of an answer that is not streamed; `deltas` are all of it, for the model's own text of its arguments."""
        return self.whole_choices(plan, [(outcome, list(deltas))])

    def whole_choices(self, plan: Plan, choices: Sequence[tuple[Outcome, Sequence[Delta]]]) -> bytes:
        """The same for the choices of one prompt, in their order."""
        shown = [
            {
                "index": index,
                "message": message(outcome.item, argument_texts(deltas)),
                "logprobs": _logprobs(deltas),
                "finish_reason": outcome.finish_reason,
                "stop_reason": outcome.stop_reason,
            }
            for index, (outcome, deltas) in enumerate(choices)
        ]
        return _encode({**self._frame("chat.completion"), "choices": shown, "usage": usage(plan, [outcome for outcome, _ in choices])})

    def _frame(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _event(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return _sse({**self._frame("chat.completion.chunk"), "choices": [choice]})


def argument_texts(deltas: Iterable[Delta]) -> list[str]:
    """The JSON text of each call's arguments, as the stream would have sent it."""
    texts: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, CallStart):
            texts[delta.index] = ""
        elif isinstance(delta, CallArguments):
            texts[delta.index] += delta.fragment
    return list(texts.values())


def message(item: AssistantItem, arguments: Sequence[str]) -> dict[str, Any]:
    """An assistant item as a chat message; reasoning under both names that clients read."""
    shown: dict[str, Any] = {"role": "assistant", "content": item.text if item.text or not item.calls else None}
    if item.reasoning is not None:
        shown["reasoning"] = shown["reasoning_content"] = item.reasoning
    if item.calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
            for call, text in zip(item.calls, arguments, strict=True)
        ]
    return shown


def usage(plan: Plan, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The engine's counts, and the account of this turn under `agentserve`. What is unknown is absent, not zero.

    Of several choices the generated tokens add up; the prompt and its account are the first one's, which computed it for all.
    """
    num_generated = sum(outcome.num_generated_tokens for outcome in outcomes)
    shown: dict[str, Any] = {
        "prompt_tokens": plan.num_prompt_tokens,
        "completion_tokens": num_generated,
        "total_tokens": plan.num_prompt_tokens + num_generated,
    }
    if outcomes[0].hits.actual is not None:
        shown["prompt_tokens_details"] = {"cached_tokens": outcomes[0].hits.actual}
    shown["agentserve"] = account(plan, outcomes[0])
    return shown


def _logprobs(deltas: Iterable[Delta]) -> dict[str, Any] | None:
    tokens = [token for delta in deltas if isinstance(delta, TextDelta) for token in delta.logprobs]
    return {"content": written(tokens), "refusal": None} if tokens else None


def _delta(delta: Delta) -> dict[str, Any]:
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning": text, "reasoning_content": text}
        case CallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}


def _sse(event: Any) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"
