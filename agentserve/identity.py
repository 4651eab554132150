"""Who is speaking: the session and its parent, from the headers that known clients already send.

The first row of the table whose session header is present decides, then the first field of the body. Without any, the ledger finds the
session by what it contains.
`x-request-id` is in no row on purpose: it names one request, never a session.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agentserve.errors import InvalidRequest

MAX_ID_LENGTH = 255


@dataclass(frozen=True, slots=True)
class Identity:
    """Session and parent as the client names them. `session` None: it does not."""

    session: str | None = None
    parent: str | None = None
    is_last: bool = False
    """The client says that no turn of the session follows this one."""


@dataclass(frozen=True, slots=True)
class HeaderRow:
    """One client's headers. With `agent`, a sub-agent has the session's id and an agent id of its own: session/agent.

    With `user_agent`, the row counts only for clients whose User-Agent starts so, as others use the same header per request.
    """

    client: str
    session: str
    parent: str | None = None
    agent: str | None = None
    parent_agent: str | None = None
    user_agent: str | None = None


IDENTITY_HEADERS: tuple[HeaderRow, ...] = (
    HeaderRow("agentserve", "x-agentserve-session", "x-agentserve-parent"),
    HeaderRow("Dynamo-ready harnesses", "x-dynamo-session-id", "x-dynamo-parent-session-id"),
    HeaderRow("Claude Code", "x-claude-code-session-id", agent="x-claude-code-agent-id", parent_agent="x-claude-code-parent-agent-id"),
    HeaderRow("OpenCode", "x-session-affinity", "x-parent-session-id"),
    HeaderRow("OpenCode and others", "x-session-id", "x-parent-session-id"),
    HeaderRow("OpenCode Go", "x-opencode-session", "x-parent-session-id"),
    HeaderRow("Codex", "thread-id", "x-codex-parent-thread-id"),
    HeaderRow("Codex", "session-id"),
    HeaderRow("Codex", "session_id"),
    HeaderRow("Codex", "conversation_id"),
    HeaderRow("LiteLLM", "x-litellm-session-id"),
    HeaderRow("xAI clients", "x-grok-conv-id"),
    HeaderRow("Amp", "x-amp-thread-id"),
    HeaderRow("SMG users", "x-smg-routing-key"),
    HeaderRow("AIBrix users", "x-aibrix-session-key"),
    HeaderRow("AgentX", "x-correlation-id", user_agent="aiperf"),
    HeaderRow("Pi", "x-client-request-id", user_agent="pi"),
)


@dataclass(frozen=True, slots=True)
class BodyField:
    """A field of the body, by its path, in which `client` names its session."""

    client: str
    path: tuple[str, ...]


BODY_FIELDS: tuple[BodyField, ...] = (
    BodyField("any", ("session_id",)),
    BodyField("users of SGLang and of vLLM's router", ("session_params", "session_id")),
    BodyField("LiteLLM, and Cline through it", ("litellm_session_id",)),
    BodyField("LiteLLM", ("metadata", "session_id")),
    BodyField("ThunderAgent", ("program_id",)),
)


FINAL_HEADERS = ("x-agentserve-final", "x-dynamo-session-final")
"""With "true" or "1": the session's last turn. Dynamo-ready harnesses send theirs."""


def identify(headers: Mapping[str, str], body_session: str | None = None) -> Identity:
    """The identity in `headers` (lower-case names), else the body's session id. Ids that are not printable or too long do not count.

    Raises InvalidRequest for a value of our own final header that says neither yes nor no.
    """
    found = _identify(headers, body_session)
    said = [headers.get(name, "false").strip().lower() for name in FINAL_HEADERS]
    if said[0] not in ("true", "1", "false", "0"):
        raise InvalidRequest(f"{FINAL_HEADERS[0]} must be true or false, not {said[0][:40]!r}", param=FINAL_HEADERS[0])
    return replace(found, is_last=True) if not {"true", "1"}.isdisjoint(said) else found


def _identify(headers: Mapping[str, str], body_session: str | None) -> Identity:
    for row in IDENTITY_HEADERS:
        session = _usable(headers.get(row.session))
        if session is None or not _speaks(row, headers):
            continue
        agent = _usable(headers.get(row.agent)) if row.agent else None
        if agent is not None:
            above = _usable(headers.get(row.parent_agent)) if row.parent_agent else None
            return Identity(f"{session}/{agent}", f"{session}/{above}" if above is not None else session)
        return Identity(session, _usable(headers.get(row.parent)) if row.parent else None)
    return Identity(_usable(body_session))


def grouped(identity: Identity, group: str | None) -> Identity:
    """`identity`; where it names no session, `group` is the parent of the session that the ledger finds.

    For ids that clients send for an agent and all of its sub-agents alike, or for many sessions: they name no session by themselves.
    """
    return identity if identity.session is not None else replace(identity, parent=_usable(group))


def _speaks(row: HeaderRow, headers: Mapping[str, str]) -> bool:
    return row.user_agent is None or headers.get("user-agent", "").lower().startswith(row.user_agent)


def _usable(value: str | None) -> str | None:
    if value is None or not value or len(value) > MAX_ID_LENGTH or not value.isprintable():
        return None
    return value
