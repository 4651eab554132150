"""Requests as known clients send them, their ids made up: what each says of its session, and where that leads.

Names of headers and fields are those of the clients, as far as they are public. `None` as the session: the history finds it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
UUID = "0f9c2a6e-5b1d-4d0e-9a57-3f6f2d8f1c11"
OTHER_UUID = "7a1d4c52-88e3-4c39-b0f5-52c7f1f0a9d2"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request and who it is from: `session` and `parent` as the server must find them."""

    name: str
    path: str
    session: str | None
    parent: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        history: dict[str, dict[str, Any]] = {
            CHAT: {"messages": [{"role": "system", "content": "You code."}, {"role": "user", "content": self.name}]},
            MESSAGES: {
                "system": [{"type": "text", "text": "You code."}],
                "messages": [{"role": "user", "content": self.name}],
                "max_tokens": 32,
            },
            RESPONSES: {"instructions": "You code.", "input": [{"type": "message", "role": "user", "content": self.name}]},
        }
        return {**history[self.path], **self.fields}


def _stainless(agent: str) -> dict[str, str]:
    """What SDKs made by Stainless add to every request."""
    return {
        "user-agent": agent,
        "x-stainless-lang": "js",
        "x-stainless-retry-count": "0",
        "x-request-id": "req-1",
        "x-stainless-timeout": "600",
    }


CLAUDE_CODE = {
    **_stainless("claude-cli/2.1.100 (external, cli)"),
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219",
}
CODEX = {"user-agent": "codex_cli_rs/0.60.1 (Linux; x86_64)", "originator": "codex_cli_rs", "version": "0.60.1"}
OPENCODE = {"user-agent": "opencode/1.2.0", "x-request-id": "req-7"}

REQUESTS = (
    ClientRequest("Claude Code", MESSAGES, UUID, None, {**CLAUDE_CODE, "x-claude-code-session-id": UUID}),
    ClientRequest(
        "Claude Code, a sub-agent",
        MESSAGES,
        f"{UUID}/agent-3",
        UUID,
        {**CLAUDE_CODE, "x-claude-code-session-id": UUID, "x-claude-code-agent-id": "agent-3"},
    ),
    ClientRequest(
        "Claude Code, a sub-agent of a sub-agent",
        MESSAGES,
        f"{UUID}/agent-4",
        f"{UUID}/agent-3",
        {
            **CLAUDE_CODE,
            "x-claude-code-session-id": UUID,
            "x-claude-code-agent-id": "agent-4",
            "x-claude-code-parent-agent-id": "agent-3",
        },
    ),
    ClientRequest(
        "Claude Code before its session header",
        MESSAGES,
        None,
        UUID,
        CLAUDE_CODE,
        {"metadata": {"user_id": f"user_{'ab' * 32}_account_{OTHER_UUID}_session_{UUID}"}},
    ),
    ClientRequest(
        "Claude Code with JSON in user_id",
        MESSAGES,
        None,
        UUID,
        CLAUDE_CODE,
        {"metadata": {"user_id": f'{{"device_id":"{"cd" * 32}","account_uuid":"","session_id":"{UUID}"}}'}},
    ),
    ClientRequest("Codex", RESPONSES, UUID, None, {**CODEX, "session_id": UUID, "conversation_id": UUID}, {"prompt_cache_key": UUID}),
    ClientRequest("Codex, dashed names", RESPONSES, UUID, None, {**CODEX, "session-id": UUID}, {"prompt_cache_key": UUID, "store": False}),
    ClientRequest("Codex, threads", RESPONSES, UUID, None, {**CODEX, "thread-id": UUID, "session-id": OTHER_UUID}),
    ClientRequest(
        "Codex, a spawned thread", RESPONSES, UUID, OTHER_UUID, {**CODEX, "thread-id": UUID, "x-codex-parent-thread-id": OTHER_UUID}
    ),
    ClientRequest("Codex, the oldest name", RESPONSES, UUID, None, {**CODEX, "conversation_id": UUID}),
    ClientRequest("OpenCode", CHAT, "ses_1", None, {**OPENCODE, "x-session-affinity": "ses_1"}),
    ClientRequest("OpenCode, a child", CHAT, "ses_2", "ses_1", {**OPENCODE, "x-session-id": "ses_2", "x-parent-session-id": "ses_1"}),
    ClientRequest("OpenCode Go", CHAT, "ses_3", None, {**OPENCODE, "x-opencode-session": "ses_3", "x-opencode-request": "msg_9"}),
    ClientRequest("OpenCode by its cache key", CHAT, None, "ses_4", OPENCODE, {"prompt_cache_key": "ses_4"}),
    ClientRequest("Cline through LiteLLM", CHAT, "cline-17", None, _stainless("OpenAI/JS 5.0"), {"litellm_session_id": "cline-17"}),
    ClientRequest("LiteLLM by header", CHAT, "chain-1", None, {"x-litellm-session-id": "chain-1", "x-litellm-call-id": "c-9"}),
    ClientRequest("LiteLLM by metadata", CHAT, "chain-2", None, {}, {"metadata": {"session_id": "chain-2", "generation_name": "g"}}),
    ClientRequest("xAI", CHAT, UUID, None, {"x-grok-conv-id": UUID}),
    ClientRequest("Amp", MESSAGES, "T-5", None, {**_stainless("Anthropic/JS"), "x-amp-thread-id": "T-5"}),
    ClientRequest("Pi", CHAT, UUID, None, {"user-agent": "pi/0.50 (linux)", "x-client-request-id": UUID}),
    ClientRequest("another client's request id", CHAT, None, None, {"user-agent": "curl/8", "x-client-request-id": UUID}),
    ClientRequest("AgentX", CHAT, UUID, None, {"user-agent": "aiperf/1.0.12", "x-correlation-id": UUID, "x-request-id": OTHER_UUID}),
    ClientRequest(
        "Dynamo's harness",
        CHAT,
        "d-2",
        "d-1",
        {"x-dynamo-session-id": "d-2", "x-dynamo-parent-session-id": "d-1"},
        {"nvext": {"agent_hints": {}}},
    ),
    ClientRequest("SMG", CHAT, "r-1", None, {"x-smg-routing-key": "r-1", "x-smg-priority": "interactive"}),
    ClientRequest("AIBrix", CHAT, "a-1", None, {"x-aibrix-session-key": "a-1"}),
    ClientRequest("vLLM's router", CHAT, "v-1", None, {}, {"session_params": {"session_id": "v-1"}}),
    ClientRequest("ThunderAgent", CHAT, "p-1", None, {}, {"program_id": "p-1"}),
    ClientRequest("the OpenAI SDK with a user", CHAT, None, None, _stainless("OpenAI/Python 2.0"), {"user": "u", "safety_identifier": "h"}),
    ClientRequest(
        "the OpenAI SDK with a shared cache key",
        RESPONSES,
        None,
        "docs-bot",
        _stainless("AsyncOpenAI/Python"),
        {"prompt_cache_key": "docs-bot"},
    ),
    ClientRequest("a proxy's request ids", CHAT, None, None, {"x-request-id": "r", "x-trace-id": "t", "traceparent": "00-1-2-01"}),
    ClientRequest(
        "our own header before all",
        MESSAGES,
        "mine",
        "above",
        {"x-agentserve-session": "mine", "x-agentserve-parent": "above", "x-claude-code-session-id": UUID},
    ),
    ClientRequest("a header before the body", CHAT, "ses_5", None, {"x-session-id": "ses_5"}, {"session_id": "b", "prompt_cache_key": "k"}),
)
