"""What tests ask of a server over the scripted upstream: which prompts reached it, whether they go on from each other, what is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tests.processes import wait_until
from tests.serving import Served
from tests.upstream import LoggedRequest, Upstream


def asked(upstream: Upstream) -> list[LoggedRequest]:
    """The generation requests, without the probe of the route at start."""
    return [request for request in upstream.requests if request.prompt_ids]


def starts_with(later: LoggedRequest, earlier: LoggedRequest) -> bool:
    """prompt(k+1) starts with prompt(k) + generated(k)."""
    kept = (*earlier.prompt_ids, *earlier.generated_ids)
    return later.prompt_ids[: len(kept)] == kept


def assert_nothing_is_held(served: Served) -> None:
    """Nothing of a finished turn is left: no ticket, no running turn; every leaf of the ledger is some session's tip."""
    assert wait_until(lambda: served.server.replicas.num_tickets == 0, seconds=2)
    for namespace in served.server.namespaces:
        namespace.ledger.check_integrity()
        assert all(session.running == 0 for session in namespace.sessions.values())
        tips = [tip for session in namespace.sessions.values() for tip in session.tips]
        assert sum(node.holds for node in namespace.ledger.nodes()) == len(tips)


@dataclass(frozen=True, slots=True)
class Posted:
    """An answer as it came: a JSON body, or the named events of a stream and how many comments stood between them."""

    status: int
    headers: dict[str, str]
    body: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    num_comments: int = 0

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]


async def post(url: str, body: Any, headers: dict[str, str] | None = None) -> Posted:
    """POST `body`, raw or as JSON. In a stream each event must be named by its type."""
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as response:
        seen = {name.lower(): value for name, value in response.headers.items()}
        text = await response.read()
    if not seen["content-type"].startswith("text/event-stream"):
        return Posted(response.status, seen, msgspec.json.decode(text))
    events: list[dict[str, Any]] = []
    num_comments = 0
    for block in text.decode().removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            num_comments += 1
            continue
        name, data_line = block.split("\n")
        events.append(msgspec.json.decode(data_line.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return Posted(response.status, seen, None, events, num_comments)
