"""Identity: the headers that known clients send name the session; a request id never does."""

from __future__ import annotations

import pytest

from agentserve.identity import IDENTITY_HEADERS, MAX_ID_LENGTH, HeaderRow, Identity, identify


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
