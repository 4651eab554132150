"""Requests that hold only what follows their session's latest answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from secrets import token_bytes

from agentserve.conversation import APPEND, Onto
from agentserve.deliveries import Mark
from agentserve.errors import InvalidRequest, NotFound
from agentserve.identity import Identity, identify
from agentserve.nodes import Node, common_ancestor
from agentserve.server import Server
from agentserve.sessions import Namespace, Session
from model.conversation import AssistantItem


@dataclass(frozen=True, slots=True)
class Appending:
    """Where the messages go on: a node of the ledger, and what a conversation has to know of it."""

    node: Node
    onto: Onto


def appends(headers: Mapping[str, str]) -> bool:
    """Whether the request says that it appends. Raises InvalidRequest for a value that says neither yes nor no."""
    said = headers.get(APPEND)
    match "false" if said is None else said.strip().lower():
        case "true":
            return True
        case "false":
            return False
    raise InvalidRequest(f"{APPEND} must be true or false, not {said!r}", param=APPEND)


async def appending(server: Server, namespace: Namespace, headers: Mapping[str, str], mark: Mark | None = None) -> Appending | None:
    """Where the request's messages go on; None: they are the whole history. `mark`: which request it is, if its answer is to be kept.

    Raises InvalidRequest without a session in a header, NotFound for a session that holds nothing.
    """
    if not appends(headers):
        return None
    session_id = identify(headers).session
    if session_id is None:
        raise InvalidRequest(f"{APPEND} needs a session: name it in a header such as x-agentserve-session", param=APPEND)
    if server.turns.stored is not None:  # the latest answer may be another server's
        await server.turns.stored.load(namespace, Identity(session_id), ())
    session = namespace.sessions.get(session_id)
    node = session.tip if session is not None else None
    if session is None or node is None:
        raise NotFound(f"no session {session_id!r} to append to: send the whole history", code="session_not_found")
    if mark is not None:
        node = _followed(session, node, mark)
        session.appended = mark.key, node
    calls = node.shape.calls if isinstance(node.shape, AssistantItem) else ()
    return Appending(node, Onto(token_bytes(16), calls))


def _followed(session: Session, tip: Node, mark: Mark) -> Node:
    """What a request goes on from: one that is sent again from where it went on before, whatever has been generated for it since."""
    if session.appended is not None and (mark.is_retry or mark.is_named):
        key, node = session.appended
        if key == mark.key and common_ancestor(node, tip) is node:
            return node
    return tip
