"""Sessions: list, look at, end."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from agentserve.errors import NotFound
from agentserve.headers import json_response
from agentserve.retention import Standing
from agentserve.server import Server
from agentserve.sessions import Session
from prefix_cache.hits import HitTotals


def router(server: Server) -> APIRouter:
    """The session routes; each caller sees its own namespace only."""
    routes = APIRouter()

    @routes.get("/v1/sessions")
    async def sessions(request: Request) -> Response:
        namespace = server.namespace(request.headers)
        standing = server.turns.retention.standing
        data = [describe(session, standing(namespace, session)) for session in reversed(namespace.sessions.values())]
        return json_response({"object": "list", "data": data})

    @routes.get("/v1/sessions/{session_id:path}")
    async def session(request: Request, session_id: str) -> Response:
        found = find(server, request, session_id)
        return json_response(describe(found, server.turns.retention.standing(server.namespace(request.headers), found)))

    @routes.delete("/v1/sessions/{session_id:path}")
    async def end_session(request: Request, session_id: str) -> Response:
        namespace, stored = server.namespace(request.headers), server.turns.stored
        found = namespace.sessions.get(session_id)
        if found is not None:
            namespace.forget(found)
            server.turns.retention.end_said(namespace, session_id)
            if server.turns.commits.capture is not None:
                server.turns.commits.capture.end(session_id, namespace.name)
        was_stored = stored is not None and await stored.delete(namespace, session_id)
        if found is None and not was_stored:
            raise _unknown(session_id)
        return json_response({"object": "session.deleted", "id": session_id, "deleted": True})

    return routes


def describe(session: Session, standing: Standing) -> dict[str, Any]:
    """A session as JSON; what is not known is null."""
    return {
        "object": "session",
        "id": session.id,
        "parent": session.parent,
        "running_turns": session.running,
        "waiting_turns": standing.num_waiting,
        "phase": standing.phase,
        "return_class": standing.return_class,
        "expected_return_seconds": None if standing.expected_seconds is None else round(standing.expected_seconds, 1),
        "has_place": standing.is_member,
        "turns": session.num_turns,
        "turns_by_kind": {kind.value: count for kind, count in session.num_by_kind.items()},
        "context_tokens": max((tip.end for tip in session.tips), default=0),
        "branches": len(session.tips),
        "hits": describe_totals(session.totals),
    }


def describe_totals(totals: HitTotals) -> dict[str, Any]:
    """Sums and rates; a rate without known turns is null."""
    return {
        "prompt_tokens": totals.num_prompt_tokens,
        "ceiling_hit_rate": totals.ceiling_hit_rate,
        "ceiling_block_hit_rate": totals.ceiling_block_hit_rate,
        "predicted_hit_rate": totals.predicted_hit_rate,
        "actual_hit_rate": totals.actual_hit_rate,
        "external_predicted_hit_rate": totals.external_predicted_hit_rate,
        "external_hit_rate": totals.external_hit_rate,
        "coverage": totals.coverage,
        "missed_tokens": {cause.value: tokens for cause, tokens in totals.missed.items()},
        "recomputed_tokens": totals.num_recomputed_tokens,
    }


def find(server: Server, request: Request, session_id: str) -> Session:
    """The caller's session of this id. Raises NotFound."""
    session = server.namespace(request.headers).sessions.get(session_id)
    if session is None:
        raise _unknown(session_id)
    return session


def _unknown(session_id: str) -> NotFound:
    return NotFound(f"no session {session_id!r}; GET /v1/sessions lists them", code="session_not_found")
