"""Hints and state while the engine runs: a utility method of vLLM's EngineCore, and HTTP routes on its API server.

vLLM loads the routes only where VLLM_PLUGINS names agentserve. Without them hints ride on requests.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from admission.eviction.choice import PolicyParameterError
from agentserve.engines.plugin.wire import HINTS_PATH, STATE_PATH, BadHint, HintBatch, PluginState, encode, read_batch

METHOD = "agentserve_plugin"
"""Of EngineCore, for vLLM's `call_utility`."""


class Controlled(Protocol):
    """What the routes reach: `Ordering`, in the engine's process."""

    def take_batch(self, batch: HintBatch) -> None: ...

    def state(self) -> PluginState: ...


current: Controlled | None = None
"""The ordering of this process; a process has one engine core."""


def handle(body: str) -> dict[str, Any]:
    """In the engine's process: a batch as JSON, or nothing to ask for the state. `{"status": HTTP status, "body": JSON text}`."""
    if current is None:
        return _answer(404, {"error": "the engine runs without agentserve's plugin"})
    if body:
        try:
            current.take_batch(read_batch(body.encode()))
        except (BadHint, PolicyParameterError) as error:
            return _answer(400, {"error": str(error)})
        except KeyError as error:
            return _answer(400, {"error": f"no policy {error}"})
    return {"status": 200, "body": encode(current.state()).decode()}


def _answer(status: int, body: dict[str, str]) -> dict[str, Any]:
    return {"status": status, "body": msgspec.json.encode(body).decode()}


def install() -> None:
    """Give EngineCore its method, in this process."""
    core = importlib.import_module("vllm.v1.engine.core").EngineCore

    def agentserve_plugin(self: Any, body: str) -> dict[str, Any]:
        return handle(body)

    if not hasattr(core, METHOD):
        setattr(core, METHOD, agentserve_plugin)


class Endpoint:
    """vLLM's `endpoint_plugins` entry: the routes, in the API server's process."""

    name = "agentserve"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        fastapi = importlib.import_module("fastapi")
        router = fastapi.APIRouter()
        router.add_api_route(HINTS_PATH, _route(fastapi, has_body=True), methods=["POST"])
        router.add_api_route(STATE_PATH, _route(fastapi, has_body=False), methods=["GET"])
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.agentserve_engine = engine_client


def _route(fastapi: Any, *, has_body: bool) -> Callable[..., Any]:
    async def route(request: Any) -> Any:
        client = getattr(request.app.state, "agentserve_engine", None)
        if client is None:
            return fastapi.Response("{}", 404, media_type="application/json")
        body = (await request.body()).decode(errors="replace") if has_body else ""
        try:
            answer = await client.engine_core.call_utility_async(METHOD, body)
        except Exception as error:  # noqa: BLE001 # vLLM raises bare Exception for a method that the engine does not have
            answer = _answer(404, {"error": f"the engine runs without agentserve's plugin: {error}"})
        return fastapi.Response(answer["body"], answer["status"], media_type="application/json")

    # FastAPI hands over the request by its annotation, which must be the class itself.
    route.__annotations__ = {"request": fastapi.Request}
    return route
