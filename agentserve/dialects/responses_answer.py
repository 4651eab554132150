"""OpenAI Responses: the answer side, streamed and whole. Each output item has one id, in its events and in the final object."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from agentserve.dialects.account import account
from agentserve.dialects.blocks import Block, BlockCutter, Change, Closed, Grown, Kind, Opened, cut
from agentserve.dialects.errors import error_body
from agentserve.dialects.logprob_form import written
from agentserve.dialects.responses import ResponsesRequest
from agentserve.dialects.sse import named_event
from agentserve.errors import AgentserveError
from agentserve.plans import Outcome, Plan
from model.chat import Delta, TokenLogprob

KEEP_ALIVE = b": keep-alive\n\n"

_ID_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_DELTAS: dict[Kind, str] = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
"""The name of a block's delta and done events behind "response."."""

Keep = Callable[[Plan, dict[str, Any]], None]
"""Takes the plan and the finished response, which may be asked for later."""


NUMBER_DIGITS = 48


def response_of(item_id: str) -> str:
    """The id of the response that has an item with this id."""
    return f"resp_{item_id.partition('_')[2][:NUMBER_DIGITS]}"


class ResponsesAnswer:
    """Writes one answer.

    `number`, of NUMBER_DIGITS characters, makes its ids; `created` is in Unix seconds; `keep` takes a whole answer that is to be stored.
    """

    keep_alive = KEEP_ALIVE

    def __init__(self, request: ResponsesRequest, number: str, model: str, created: int, keep: Keep) -> None:
        self.id = f"resp_{number}"
        self._request = request
        self._number = number
        self._model = model
        self._created = created
        self._keep = keep
        self._cutter = BlockCutter()
        self._num_events = 0
        self._opened = False

    def opening(self, plan: Plan | None) -> bytes:
        """response.created and response.in_progress."""
        self._opened = True
        begun = self._response("in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def deltas(self, deltas: list[Delta]) -> bytes:
        """Items and their parts begin, grow and end."""
        return b"".join(self._events(change, "completed") for change in self._cutter.feed(deltas))

    def closing(self, plan: Plan, outcome: Outcome) -> bytes:
        """The end of the last item; then response.completed, or response.incomplete where the length limit ended the turn."""
        status = _status(outcome)
        changes = (*self._cutter.say_something(), *self._cutter.finish())
        last = b"".join(self._events(change, status) for change in changes)
        return last + self._event(f"response.{status}", response=self._final(plan, outcome, self._cutter.blocks))

    def failure(self, error: AgentserveError) -> bytes:
        """response.failed."""
        opening = b"" if self._opened else self.opening(None)
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = self._response("failed", self._items(self._cutter.blocks, "completed"))
        return opening + self._event("response.failed", response={**failed, "error": {"code": code, "message": error.message}})

    def refusal(self, error: AgentserveError) -> dict[str, Any]:
        """The body of an error status."""
        return error_body(error)

    def whole(self, plan: Plan, outcome: Outcome, deltas: Iterable[Delta]) -> bytes:
        """The body of an answer that is not streamed."""
        return msgspec.json.encode(self._final(plan, outcome, cut(deltas, say_something=True)))

    def _final(self, plan: Plan, outcome: Outcome, blocks: list[Block]) -> dict[str, Any]:
        """The finished response, handed to `keep` before the client can know of it."""
        status = _status(outcome)
        response = self._response(status, self._items(blocks, status))
        response["usage"] = usage(plan, outcome)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._keep(plan, response)
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request = self._request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt_cache_key": request.prompt_cache_key,
            "reasoning": request.reasoning,
            "store": request.store is not False,
            "temperature": request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools if bytes(request.tools) not in (b"", b"null") else [],
            "top_p": request.top_p,
            "truncation": request.truncation or "disabled",
            "usage": None,
            "user": request.user,
        }

    def _items(self, blocks: list[Block], last_status: str) -> list[dict[str, Any]]:
        return [self._item(block, last_status if block is blocks[-1] else "completed") for block in blocks]

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """A block as an output item; one that is in progress has no content yet."""
        item: dict[str, Any] = {"id": self._item_id(block), "status": status}
        content = [] if status == "in_progress" else [_part(block)]
        match block.kind:
            case "reasoning":
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": content}
            case "call":
                return {**item, "type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": block.text}

    def _item_id(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self._number}{block.index:02d}"

    def _events(self, change: Change, status: str) -> bytes:
        block = change.block
        name = f"response.{_DELTAS[block.kind]}"
        place: dict[str, Any] = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            place["content_index"] = 0
        match change:
            case Opened():
                added = self._event("response.output_item.added", output_index=block.index, item=self._item(block, "in_progress"))
                return added if block.kind == "call" else added + self._event("response.content_part.added", **place, part=_part(block))
            case Grown(_, fragment, logprobs):
                return self._event(f"{name}.delta", **place, delta=fragment, **_logprobs(block, logprobs))
            case Closed():
                field = {"arguments": block.text, "name": block.name} if block.kind == "call" else {"text": block.text}
                done = self._event(f"{name}.done", **place, **field, **_logprobs(block, block.logprobs))
                if block.kind != "call":
                    done += self._event("response.content_part.done", **place, part=_part(block))
                return done + self._event("response.output_item.done", output_index=block.index, item=self._item(block, status))

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event({"type": kind, "sequence_number": number, **fields})


def usage(plan: Plan, outcome: Outcome) -> dict[str, Any]:
    """The engine's counts. Clients need a number of cached tokens; whether it is known is said by the account under `agentserve`."""
    return {
        "input_tokens": plan.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": outcome.hits.actual or 0},
        "output_tokens": outcome.num_generated_tokens,
        "output_tokens_details": {"reasoning_tokens": outcome.num_reasoning_tokens},
        "total_tokens": plan.num_prompt_tokens + outcome.num_generated_tokens,
        "agentserve": account(plan, outcome),
    }


def _status(outcome: Outcome) -> str:
    return "incomplete" if outcome.finish_reason == "length" else "completed"


def _part(block: Block) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": written(block.logprobs)}


def _logprobs(block: Block, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Text events always have a list of log probabilities, which is empty where none were asked for."""
    return {"logprobs": written(logprobs)} if block.kind == "text" else {}
