"""What runs inside vLLM's own processes. Only this folder patches the engine, and it checks first what it patches."""

from __future__ import annotations

import importlib

PARTS: dict[str, str] = {
    "connector": "agentserve.engines.plugin.registry:register_connector",
}
"""What vLLM's `general_plugins` entry does in each of its processes, by name: "module:function". A part touches nothing that the
engine's configuration does not ask for, and may run twice."""


def register() -> None:
    """vLLM's entry point."""
    for place in PARTS.values():
        module, _, function = place.partition(":")
        getattr(importlib.import_module(module), function)()
