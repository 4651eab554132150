"""What a server tells over HTTP, and the part of an engine's facts that says how it was started."""

from __future__ import annotations

from typing import Any

import msgspec

from agentserve.asking import ask
from agentserve.doctor import host
from agentserve.doctor.facts import EngineFacts
from agentserve.engines.plugin.wire import STATE_PATH, BadHint, PluginState, read_state


def json_at(url: str, api_key: str | None = None, body: Any = None) -> Any:
    """The JSON at `url`; None where there is none."""
    said = ask(url, api_key=api_key, body=None if body is None else msgspec.json.encode(body))
    if said is None or said.status != 200:
        return None
    try:
        return msgspec.json.decode(said.body)
    except msgspec.DecodeError:
        return None


def object_at(url: str, api_key: str | None = None, body: Any = None) -> dict[str, Any] | None:
    """The JSON object at `url`; None where there is none."""
    value = json_at(url, api_key, body)
    return value if isinstance(value, dict) else None


def plugin_state(url: str, api_key: str | None = None) -> PluginState | None:
    """What the eviction plugin of the engine at `url` says of itself; None where it has no routes."""
    said = ask(f"{url}{STATE_PATH}", api_key=api_key)
    if said is None or said.status != 200:
        return None
    try:
        return read_state(said.body)
    except BadHint:
        return None


def launch_facts(url: str, api_key: str | None = None) -> EngineFacts:
    """Of the engine at `url` what tells its launch options: metrics, configuration, and its process where that is on this host."""
    metrics = ask(f"{url}/metrics", api_key=api_key)
    info = object_at(f"{url}/server_info?config_format=json", api_key) or {}
    return EngineFacts(
        url,
        metrics=metrics.body if metrics is not None and metrics.status == 200 else None,
        config=info.get("vllm_config"),
        process=host.vllm_process(url),
    )
