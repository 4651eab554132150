"""What runs inside vLLM's own processes. Only this folder patches the engine, and it checks first what it patches.

vLLM finds `register` by the entry point `agentserve` in the group `vllm.general_plugins`, and calls it in each of its processes.
"""

from __future__ import annotations

from collections.abc import Callable

from agentserve.engines.plugin.m3_part import register_m3
from agentserve.engines.plugin.registry import register_connector

PARTS: dict[str, Callable[[], None]] = {"connector": register_connector, "m3": register_m3}
"""What the plugin is made of; each part costs little until it is used."""


def register() -> None:
    """Every part in turn."""
    for part in PARTS.values():
        part()
