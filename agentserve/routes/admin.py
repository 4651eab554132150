"""The operator's routes: policies in force, their change, and turns that wait. They have a key of their own, `--admin-key`."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from agentserve.body import read_body
from agentserve.dialects.json_body import decode_body
from agentserve.errors import InvalidRequest, NotFound
from agentserve.headers import json_response
from agentserve.policies import Chosen
from agentserve.server import Server


class PolicyBody(msgspec.Struct, forbid_unknown_fields=True):
    policy: str
    parameters: dict[str, float] = {}


class PoliciesBody(msgspec.Struct, forbid_unknown_fields=True):
    """What is to change; what is absent stays."""

    admission: PolicyBody | None = None
    eviction: PolicyBody | None = None


_BODY = msgspec.json.Decoder(PoliciesBody)


def router(server: Server) -> APIRouter:
    """The operator's routes."""
    routes = APIRouter()

    @routes.get("/v1/admin/policies")
    async def policies(request: Request) -> Response:
        server.check_admin(request.headers)
        return json_response(await _policies(server))

    @routes.put("/v1/admin/policies")
    async def change(request: Request) -> Response:
        server.check_admin(request.headers)
        limits = server.settings.limits
        body = decode_body(_BODY, await read_body(request, max_bytes=limits.body_bytes, seconds=limits.body_seconds))
        await _change(server, body)
        return json_response(await _policies(server))

    @routes.get("/v1/admin/waiting")
    async def waiting(request: Request) -> Response:
        server.check_admin(request.headers)
        return json_response({"object": "list", "data": describe_waiting(server)})

    @routes.delete("/v1/admin/waiting/{turn_id}")
    async def cancel(request: Request, turn_id: str) -> Response:
        server.check_admin(request.headers)
        if not any(replica.room.cancel(turn_id) for replica in server.replicas):
            raise NotFound(f"no turn {turn_id!r} waits; GET /v1/admin/waiting lists them", code="turn_not_found")
        return json_response({"object": "waiting_turn.cancelled", "id": turn_id, "cancelled": True})

    return routes


def describe_waiting(server: Server) -> list[dict[str, Any]]:
    """The turns that wait for a ticket, whoever came first first."""
    return [
        {
            "object": "waiting_turn",
            "id": entry.request.id,
            "session_id": entry.request.session_id.rpartition("\n")[2],
            "tenant": entry.request.tenant,
            "seconds": round(seconds, 3),
            "is_member": entry.is_member,
            "is_cold": entry.is_cold,
            "charge_tokens": entry.request.charge_tokens,
            "resident_tokens": entry.request.resident_tokens,
        }
        for replica in server.replicas
        for entry, seconds in replica.room.waiting()
    ]


async def _change(server: Server, body: PoliciesBody) -> None:
    """All of it, or nothing. Raises InvalidRequest, EngineUnavailable."""
    policies = server.policies
    if body.admission is None and body.eviction is None:
        raise InvalidRequest("name what is to change: 'admission' or 'eviction', each with a 'policy'")
    if body.admission is not None:
        policies.check_admission(_chosen(body.admission))
    if body.eviction is not None:  # before the other, which cannot fail any more
        await policies.change_eviction(_chosen(body.eviction))
    if body.admission is not None:
        policies.change_admission(_chosen(body.admission))


async def _policies(server: Server) -> dict[str, Any]:
    policies = server.policies
    return {"object": "policies", "admission": policies.describe_admission(), "eviction": await policies.describe_eviction()}


def _chosen(body: PolicyBody) -> Chosen:
    return Chosen(body.policy, body.parameters)
