"""Brings this package's vLLM plugin into an engine that is started here, whether the package is installed or runs from a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agentserve.engines.child import import_path

PLUGIN_NAME: Final = "agentserve"
"""The entry points' name, as pyproject.toml has them too."""
_ENTRY_POINTS: Final = f"""\
[vllm.general_plugins]
{PLUGIN_NAME} = agentserve.engines.plugin:register

[vllm.endpoint_plugins]
{PLUGIN_NAME} = agentserve.engines.plugin.control:Endpoint
"""
_METADATA: Final = "Metadata-Version: 2.1\nName: agentserve-plugin\nVersion: 0\n"


def plugin_environment(folder: Path) -> dict[str, str]:
    """Variables with which vLLM, started with this Python, finds the plugin; what it needs for that is written into `folder`."""
    info = folder / "site" / "agentserve_plugin-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINTS)
    return {"VLLM_PLUGINS": PLUGIN_NAME, "PYTHONPATH": import_path(info.parent)}
