"""The official clients run tool loops through the server on a real engine: streamed and whole, in each dialect and across them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import anthropic
import openai
import pytest

from model.conversation import AssistantItem, Head, Item, Json, Tool, ToolCall, ToolResultItem, UserItem
from replays.script import MARKER_BIAS, ToolScript
from tests.dialect_forms import FORMS
from tests.real_engine import RealEngine
from tests.scripted import post
from tests.serving import Served, serving

pytestmark = pytest.mark.anyio

SYSTEM = "You are the coding agent of a shop.\n" * 40
SCHEMA: dict[str, Json] = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
FUNCTION: dict[str, Any] = {"name": "read_file", "description": "Read a file.", "parameters": SCHEMA}


@dataclass(frozen=True, slots=True)
class Said:
    """A turn as the client's objects show it. Counts in tokens."""

    text: str
    reasoning: str | None
    calls: list[tuple[str, Any]]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


class Agent(Protocol):
    """One client's side of a session."""

    def result(self, text: str) -> None:
        """Answer every call of the last turn."""
        ...

    def ask(self, text: str) -> None: ...

    async def turn(self, stream: bool, extra: dict[str, Any]) -> Said: ...


@dataclass(slots=True)
class ChatAgent:
    client: openai.AsyncOpenAI
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def result(self, text: str) -> None:
        calls = self.messages[-1]["tool_calls"]
        self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]

    async def turn(self, stream: bool, extra: dict[str, Any]) -> Said:
        tools: Any = [{"type": "function", "function": FUNCTION}]
        fields: dict[str, Any] = {"model": "nano", "messages": self.messages, "tools": tools, "max_tokens": 400, "extra_body": extra}
        if stream:
            async with self.client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
                completion: Any = await events.get_final_completion()
        else:
            completion = await self.client.chat.completions.create(**fields)
        message = completion.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        usage = completion.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return Said(message.content or "", _reasoning(message), calls, usage.prompt_tokens, cached, usage.completion_tokens)


def _reasoning(message: Any) -> str | None:
    reasoning: str | None = getattr(message, "reasoning", None)
    return reasoning


@dataclass(slots=True)
class MessagesAgent:
    client: anthropic.AsyncAnthropic
    messages: list[Any] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def result(self, text: str) -> None:
        calls = [block for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        self.messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": c["id"], "content": text} for c in calls]})

    async def turn(self, stream: bool, extra: dict[str, Any]) -> Said:
        tools = [{"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": SCHEMA}]
        fields: dict[str, Any] = {"model": "nano", "system": SYSTEM, "messages": self.messages, "tools": tools}
        counted = await self.client.messages.count_tokens(**fields)
        if stream:
            async with self.client.messages.stream(**fields, max_tokens=400, extra_body=extra) as events:
                message: Any = await events.get_final_message()
        else:
            message = await self.client.messages.create(**fields, max_tokens=400, extra_body=extra)
        content = [block.model_dump(mode="json", exclude_none=True) for block in message.content]
        self.messages.append({"role": "assistant", "content": content})
        texts = {block["type"]: block.get("text", block.get("thinking")) for block in content}
        usage = message.usage
        prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        assert counted.input_tokens == prompt
        calls = [(block["name"], block["input"]) for block in content if block["type"] == "tool_use"]
        return Said(texts.get("text", ""), texts.get("thinking"), calls, prompt, usage.cache_read_input_tokens, usage.output_tokens)


@dataclass(slots=True)
class ResponsesAgent:
    client: openai.AsyncOpenAI
    items: list[Any] = field(default_factory=list)
    last: Any = None

    def ask(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def result(self, text: str) -> None:
        calls = [item for item in self.last.output if item.type == "function_call"]
        self.items += [{"type": "function_call_output", "call_id": call.call_id, "output": text} for call in calls]

    async def turn(self, stream: bool, extra: dict[str, Any]) -> Said:
        fields: dict[str, Any] = {"model": "nano", "input": self.items, "instructions": SYSTEM, "max_output_tokens": 400}
        fields |= {"tools": [{"type": "function", **FUNCTION}], "extra_body": extra}
        if self.last is not None:
            fields["previous_response_id"] = self.last.id
        if stream:
            async with self.client.responses.stream(**fields) as events:
                self.last = await events.get_final_response()
        else:
            self.last = await self.client.responses.create(**fields)
        self.items = []  # the server keeps the history
        reasoning = [item.content[0].text for item in self.last.output if item.type == "reasoning"]
        calls = [(item.name, item.arguments) for item in self.last.output if item.type == "function_call"]
        usage = self.last.usage
        cached = usage.input_tokens_details.cached_tokens
        return Said(self.last.output_text, reasoning[0] if reasoning else None, calls, usage.input_tokens, cached, usage.output_tokens)


@pytest.fixture(scope="module")
def served(engine: RealEngine) -> Iterator[Served]:
    with serving(engine.url, engine.model_folder, model_name="nano") as running:
        yield running


@pytest.fixture(scope="module")
def script(engine: RealEngine) -> ToolScript:
    return ToolScript.load(engine.model_folder)


def force(script: ToolScript, item: AssistantItem) -> dict[str, Any]:
    """The fields that let the engine say `item` and nothing else."""
    text, controls = script.text(item)
    return {"structured_outputs": {"choice": [text]}, "logit_bias": {str(control): MARKER_BIAS for control in controls}}


@asynccontextmanager
async def agent_of(dialect: str, served: Served) -> AsyncIterator[Agent]:
    if dialect == "messages":
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            yield MessagesAgent(client)
    else:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as other:
            yield ChatAgent(other) if dialect == "chat" else ResponsesAgent(other)


async def kinds(served: Served, session_id: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as http, http.get(f"{served.url}/v1/sessions/{session_id}") as response:
        found: dict[str, int] = (await response.json())["turns_by_kind"]
        return found


@pytest.mark.case("SSE-07")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
async def test_a_tool_loop_stays_exact_on_a_real_engine(
    served: Served, engine: RealEngine, script: ToolScript, dialect: str, stream: bool
) -> None:
    block_size = engine.info.block_size
    assert block_size is not None
    session_id = f"{dialect}-{stream}"
    before = 0
    async with agent_of(dialect, served) as agent:
        agent.ask(f"Fix the total ({session_id}).")
        for number in range(2):
            arguments: dict[str, Json] = {"path": f"src/{number}.py", "lines": number}
            call = AssistantItem(f"Reading {number}.", "I need the file.\n", (ToolCall("", "read_file", arguments),))
            for item in (call, AssistantItem("Done.", "Enough.")):
                said = await agent.turn(stream, {**force(script, item), "session_id": session_id})
                assert (said.text, said.reasoning) == (item.text, item.reasoning)
                assert [name for name, _ in said.calls] == [c.name for c in item.calls]
                assert all(given == arguments or str(number) in str(given) for _, given in said.calls)
                assert said.num_cached_tokens >= before // block_size * block_size
                before = said.num_prompt_tokens + said.num_generated_tokens - 1
                if item.calls:
                    agent.result("line one\n" * 20)
                else:
                    agent.ask("Next.")
    assert await kinds(served, session_id) == {"first": 1, "exact": 3}


async def test_a_session_goes_on_from_dialect_to_dialect_on_a_real_engine(served: Served, engine: RealEngine, script: ToolScript) -> None:
    block_size = engine.info.block_size
    assert block_size is not None
    head = Head(SYSTEM, (Tool("read_file", "Read a file.", SCHEMA),))
    items: list[Item] = [UserItem("Fix the total, whoever asks.")]
    call = ToolCall("", "read_file", {"path": "a.py", "lines": 7})
    before = 0
    for number, form in enumerate((*FORMS, FORMS[0])):
        wanted = AssistantItem(f"Reading {number}.", "I need the file.\n", (call,))
        reply = await post(served.url + form.path, {**form.body(head, items), **force(script, wanted), "max_tokens": 400})
        assert reply.headers["x-agentserve-turn"] == ("exact" if number else "first")
        said = form.said(reply.body)
        assert (said.text, said.reasoning, said.calls[0].arguments) == (wanted.text, wanted.reasoning, call.arguments)
        account = reply.body["usage"]["agentserve"]
        assert int(reply.headers["x-agentserve-cached-tokens"]) >= before // block_size * block_size
        before = account["ceiling_tokens"]
        items += [said, ToolResultItem(said.calls[0].id, "line one\n" * 20)]


async def test_what_the_engine_refuses_is_refused_and_not_broken(served: Served) -> None:
    """Values that only the engine can judge."""
    odd: list[dict[str, Any]] = [
        {"seed": 2**70},
        {"top_k": -7},
        {"temperature": -1},
        {"top_p": 7},
        {"min_tokens": 10**9},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"99999999": 1}},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"stop_token_ids": [2**40]},
        {"bad_words": [""]},
        {"structured_outputs": {"x": 1}},
        {"structured_outputs": {"json": "{"}},
        {"structured_outputs": {"regex": "("}},
        {"priority": 2**70},
    ]
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        for extra in odd:
            with pytest.raises(anthropic.BadRequestError):
                await client.messages.create(model="nano", max_tokens=4, messages=[{"role": "user", "content": "hi"}], extra_body=extra)
