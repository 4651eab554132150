"""The plugin's entry points for a vLLM started from this tree, whether or not the tree is installed."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[1]


@contextmanager
def plugin_entry_points(folder: Path) -> Iterator[None]:
    """What pyproject.toml declares for vLLM, where the processes that are started meanwhile find it."""
    declared: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    missing = {group: names for group, names in declared.items() if not entry_points(group=group, name="agentserve")}
    info = folder / "agentserve_plugin-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentserve-plugin\nVersion: 0\n")
    lines = [line for group, names in missing.items() for line in (f"[{group}]", *(f"{name} = {to}" for name, to in names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
