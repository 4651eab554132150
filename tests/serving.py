"""The whole server on a free loopback port, in a thread of its own, over an engine that a test runs or scripts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvicorn

from agentserve.boot import running_server
from agentserve.server import Server
from agentserve.settings import load
from agentserve.web import web_server

GROUPS = ("admission", "alignment", "canonicalise", "engine", "limits", "offload", "sessions", "state")


@dataclass(frozen=True, slots=True)
class Served:
    """A running server: its address, and its parts to look at."""

    url: str
    server: Server


@contextmanager
def serving(engine_url: str, model_folder: Path, **settings: Any) -> Iterator[Served]:
    """Serve `engine_url`; `settings` by flag name, such as engine_events or limits_body_bytes."""
    flags: dict[tuple[str, ...], Any] = {("engine", "url"): engine_url, ("engine", "model_folder"): model_folder, ("log_level",): "warning"}
    for name, value in settings.items():
        group, _, rest = name.partition("_")
        flags[(group, rest) if group in GROUPS else (name,)] = value
    started = threading.Event()
    outcome: list[Served | BaseException] = []
    stop: list[uvicorn.Server] = []

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with running_server(load(flags), lambda _: None) as server:
                web = web_server(server, grace_seconds=1)
                stop.append(web)
                outcome.append(Served(f"http://127.0.0.1:{listener.getsockname()[1]}", server))
                started.set()
                await web.serve(sockets=[listener])

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001 - handed to the caller below
            outcome.append(error)
            started.set()

    thread = threading.Thread(target=main, name="served")
    thread.start()
    started.wait()
    try:
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        yield outcome[0]
    finally:
        for web in stop:
            web.should_exit = True
        thread.join()
    if len(outcome) > 1 and isinstance(outcome[1], BaseException):
        raise outcome[1]


@dataclass(slots=True)
class Reply:
    """One answer, streamed or whole, brought to the same form."""

    status: int
    headers: dict[str, str]
    message: dict[str, Any]
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    comments: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def turn(self) -> str:
        return self.headers["x-agentserve-turn"]


async def chat(
    url: str, messages: Iterable[dict[str, Any]], *, stream: bool, headers: dict[str, str] | None = None, **fields: Any
) -> Reply:
    """POST /v1/chat/completions as a client does."""
    body: dict[str, Any] = {"messages": list(messages), "stream": stream, **fields}
    if stream:
        body["stream_options"] = {"include_usage": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        seen = {name.lower(): value for name, value in response.headers.items()}
        if response.status != 200 or not stream:
            whole = msgspec.json.decode(await response.read())
            if "error" in whole:
                return Reply(response.status, seen, {}, error=whole["error"])
            choice = whole["choices"][0]
            return Reply(response.status, seen, choice["message"], choice["finish_reason"], whole["usage"], done=True)
        return read_stream(await response.read(), response.status, seen)


def read_stream(body: bytes, status: int, headers: dict[str, str]) -> Reply:
    """Put a chat stream together as OpenAI's clients do."""
    reply = Reply(status, headers, {"role": "assistant", "content": ""})
    for block in body.decode().split("\n\n"):
        if block.startswith(":"):
            reply.comments += 1
        elif block == "data: [DONE]":
            reply.done = True
        elif block:
            assert block.startswith("data: "), block
            _add(reply, msgspec.json.decode(block[6:]))
    return reply


def _add(reply: Reply, event: dict[str, Any]) -> None:
    reply.events.append(event)
    if "error" in event:
        reply.error = event["error"]
        return
    reply.usage = event.get("usage") or reply.usage
    for choice in event["choices"]:
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
        delta = choice["delta"]
        for name in ("content", "reasoning", "reasoning_content"):
            if delta.get(name):
                reply.message[name] = reply.message.get(name, "") + delta[name]
        for part in delta.get("tool_calls", ()):
            calls = reply.message.setdefault("tool_calls", [])
            if part["index"] == len(calls):
                calls.append({"id": part["id"], "type": "function", "function": {"name": part["function"]["name"], "arguments": ""}})
            calls[part["index"]]["function"]["arguments"] += part["function"].get("arguments", "")
