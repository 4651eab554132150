"""Reads what a starting vLLM wrote to its log: how far it is, and why it died; what its exit code tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

NUM_LAST_LINES: Final = 12
_CAUSE: Final = re.compile(r"\b\w+(?:Error|Exception): .*")

# In the order in which they appear: what the log says, and what vLLM does from then on.
_STAGES: Final = {
    "non-default args": "reading the model's configuration",
    "Resolved architecture": "starting the engine process",
    "Initializing a V1 LLM engine": "building the engine",
    "Starting to load model": "loading the model",
    "KV cache size": "opening the KV cache",
    "Starting vLLM server": "opening the HTTP port",
}


def stage(log: Path) -> str:
    """What the vLLM that writes `log` is doing."""
    text = log.read_text(errors="replace")
    return next((doing for marker, doing in reversed(_STAGES.items()) if marker in text), "importing vLLM")


def how_it_died(code: int) -> str:
    """What the exit code of vLLM's API server tells; it ends by itself, with 0, when the engine's own process is gone."""
    return "its engine process is gone" if code == 0 else f"code {code}"


def excerpt(log: Path) -> str:
    """The first error in `log`, which later ones only follow from, its last lines, and its path."""
    lines = log.read_text(errors="replace").splitlines()
    cause = next((match[0] for line in lines if "WARNING" not in line and (match := _CAUSE.search(line))), None)
    parts = [f"First error: {cause}"] if cause else []
    parts += ["Its last lines:", *(f"  {line}" for line in lines[-NUM_LAST_LINES:]), f"The whole log: {log}"]
    return "\n".join(parts)
