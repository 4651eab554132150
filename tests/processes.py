"""What processes there are, read from /proc: tests use it to prove that none is left."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    parent: int
    group: int
    command: str


def living() -> list[Process]:
    """Every process that runs; zombies do not."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # "pid (name) state parent group …", where the name may hold anything.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] not in "ZX":
            found.append(Process(int(folder.name), int(fields[1]), int(fields[2]), command))
    return found


def descendants(pid: int) -> list[Process]:
    """The children of `pid`, theirs, and so on."""
    everything = living()
    tree = {pid}
    while grown := {process.pid for process in everything if process.parent in tree} - tree:
        tree |= grown
    return [process for process in everything if process.pid in tree and process.pid != pid]


def adopt_orphans() -> None:
    """From now on a process whose parent died becomes a child of this one, so that `descendants` sees it (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether `true` came true within `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return true()
