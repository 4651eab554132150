"""Identity: the headers that known clients send name the session; a request id never does."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from agentserve.identity import IDENTITY_HEADERS, MAX_ID_LENGTH, HeaderRow, Identity, identify
from tests.client_requests import OTHER_UUID, REQUESTS, UUID, ClientRequest
from tests.scripted import post
from tests.serving import Served


@pytest.mark.parametrize("row", IDENTITY_HEADERS, ids=lambda row: row.session)
def test_each_known_client_is_recognised(row: HeaderRow) -> None:
    headers = {row.session: "s-1", "x-request-id": "r-1", "user-agent": f"{row.user_agent or 'any'}/1.0"}
    assert identify(headers) == Identity("s-1", None)
    if row.parent:
        assert identify({**headers, row.parent: "p-1"}) == Identity("s-1", "p-1")


def test_a_sub_agent_is_a_session_of_its_own_below_its_parent() -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "explore-1"}
    assert identify(headers) == Identity("s/explore-1", "s")
    headers["x-claude-code-parent-agent-id"] = "plan-7"
    assert identify(headers) == Identity("s/explore-1", "s/plan-7")


def test_headers_that_are_per_request_elsewhere_count_for_their_own_client_only() -> None:
    assert identify({"x-correlation-id": "c", "user-agent": "aiperf/1.0.12"}).session == "c"
    assert identify({"x-correlation-id": "c", "user-agent": "nginx"}).session is None


def test_request_and_trace_ids_are_never_a_session() -> None:
    assert identify({"x-request-id": "r", "x-trace-id": "t", "traceparent": "00-1-2-01"}).session is None


@pytest.mark.parametrize("value", ["", "a\x00b", "a\tb", "x" * (MAX_ID_LENGTH + 1)])
def test_ids_that_cannot_be_trusted_do_not_count(value: str) -> None:
    assert identify({"x-session-id": value}, body_session=value).session is None


def test_the_body_names_the_session_where_no_header_does() -> None:
    assert identify({}, body_session="b").session == "b"
    assert identify({"x-session-id": "h"}, body_session="b").session == "h"


@pytest.mark.anyio
@pytest.mark.parametrize("request_of", REQUESTS, ids=lambda row: row.name)
async def test_requests_of_known_clients_find_their_session_and_parent(served: Served, request_of: ClientRequest) -> None:
    found = await session_of(served, request_of)
    if request_of.session is not None:
        assert found["id"] == request_of.session
    else:
        assert found["id"] not in (UUID, OTHER_UUID, *request_of.headers.values())
    assert found["parent"] == request_of.parent
    assert (await session_of(served, request_of))["id"] == found["id"] or request_of.session is None


async def session_of(served: Served, sent: ClientRequest) -> dict[str, Any]:
    """The session that answers, as the server shows it."""
    reply = await post(served.url + sent.path, sent.body, sent.headers)
    assert reply.status == 200, reply.body
    async with aiohttp.ClientSession() as http, http.get(f"{served.url}/v1/sessions/{reply.headers['x-agentserve-session']}") as response:
        found: dict[str, Any] = await response.json()
        return found


@pytest.mark.anyio
@pytest.mark.parametrize("request_of", [row for row in REQUESTS if row.session is None], ids=lambda row: row.name)
async def test_a_client_that_names_no_session_stays_in_its_own(served: Served, request_of: ClientRequest) -> None:
    first = await post(served.url + request_of.path, request_of.body, request_of.headers)
    body = request_of.body
    said = {"role": "assistant", "content": "ok"}
    for name in ("messages", "input"):
        if name in body:
            body[name] = [*body[name], said, {"role": "user", "content": "go on"}]
    second = await post(served.url + request_of.path, body, request_of.headers)
    assert second.headers["x-agentserve-session"] == first.headers["x-agentserve-session"]
    assert second.headers["x-agentserve-turn"] == "exact"


@pytest.mark.anyio
async def test_a_response_names_the_session_that_it_is_of(served: Served) -> None:
    first = await post(f"{served.url}/v1/responses", {"input": "hi", "litellm_session_id": "s-9"})
    second = await post(f"{served.url}/v1/responses", {"input": "go on", "previous_response_id": first.body["id"]})
    assert second.headers["x-agentserve-session"] == "s-9"
