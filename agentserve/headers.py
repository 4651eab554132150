"""Response headers, and JSON written to a `Sink`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from agentserve.exchange import Sink
from agentserve.plans import Plan
from agentserve.sessions import TurnKind
from prefix_cache.hits import TurnHits

JSON: Mapping[str, str] = {"content-type": "application/json"}
EVENT_STREAM: Mapping[str, str] = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def plan_headers(plan: Plan, hits: TurnHits | None = None) -> dict[str, str]:
    """Session, kind of turn and hit figures in tokens. Unknown figures are absent; `hits` adds what only the end of a turn knows."""
    known = hits or plan.hits
    if plan.kind is TurnKind.PASSED:
        actual = {} if known.actual is None else {"x-agentserve-cached-tokens": str(known.actual)}
        return {"x-agentserve-session": plan.session_id, "x-agentserve-turn": plan.kind.value, **actual}
    figures = {
        "x-agentserve-ceiling-tokens": known.ceiling,
        "x-agentserve-ceiling-block-tokens": known.ceiling_blocks,
        "x-agentserve-predicted-tokens": known.predicted,
        "x-agentserve-external-predicted-tokens": known.external_predicted,
        "x-agentserve-cached-tokens": known.actual,
        "x-agentserve-external-tokens": known.external,
    }
    rules = ",".join(f"{rule}={effect.count}" for rule, effect in plan.canonicalised.items())
    return {
        "x-agentserve-session": plan.session_id,
        "x-agentserve-turn": plan.kind.value,
        "x-agentserve-prompt-tokens": str(plan.num_prompt_tokens),
        **({"x-agentserve-canonicalised": rules} if rules else {}),
        **{name: str(value) for name, value in figures.items() if value is not None},
    }


async def write_json(wire: Sink, body: Any, *, status: int, headers: Mapping[str, str]) -> None:
    """Send a whole JSON answer."""
    wire.prepare(status, {**JSON, **headers})
    await wire.write(msgspec.json.encode(body), more=False)


def json_response(body: Any) -> Response:
    """A JSON answer for a plain route."""
    return Response(msgspec.json.encode(body), media_type="application/json")
