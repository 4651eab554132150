"""Child processes that end with this one: an engine, or the cache server beside it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

from agentserve.engines import guard


async def spawn(command: list[str], log: Path) -> asyncio.subprocess.Process:
    """Start `command` under the guard, which ends it when the pipe to its standard input is closed. It writes to `log`."""
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__),
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )


async def end(process: asyncio.subprocess.Process) -> None:
    """Close the guard's pipe, which makes it stop the command, and wait for it."""
    if process.stdin is not None:
        process.stdin.close()
    await process.wait()


def import_path(*first: Path) -> str:
    """PYTHONPATH for a child that imports this package, installed or run from a checkout; `first` stands in front."""
    # This process's own path behind it: it may run from PYTHONPATH itself.
    places = [*map(str, first), str(Path(__file__).parents[2]), *(place for place in sys.path if place and Path(place).is_dir())]
    return os.pathsep.join(dict.fromkeys(places))


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
