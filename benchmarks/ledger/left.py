"""What is left behind when all work is over: nothing, if all is well."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from agentserve.server import Server

_FDS = Path("/proc/self/fd")


@dataclass(frozen=True, slots=True)
class Left:
    """Counts. `descriptors` is 0 where the system does not list them (/proc)."""

    tickets: int = 0
    """Out, or waited for."""
    turns: int = 0
    """Sessions' turns that have not ended."""
    holds: int = 0
    """On nodes of the ledger, beyond those of session tips."""
    tasks: int = 0
    descriptors: int = 0
    engine_requests: int = 0

    def beyond(self, before: Left) -> Left:
        """What is more than `before`."""
        names = self.__slots__
        return Left(*(max(0, getattr(self, name) - getattr(before, name)) for name in names))

    @property
    def nothing(self) -> bool:
        return not any(getattr(self, name) for name in self.__slots__)


def look(servers: Iterable[Server], num_engine_requests: int) -> Left:
    """What is held now in this process. Checks the ledgers' integrity on the way."""
    tickets = turns = holds = 0
    for server in servers:
        tickets += server.replicas.num_tickets + server.replicas.num_waiting
        for namespace in server.namespaces:
            namespace.ledger.check_integrity()
            turns += sum(session.running for session in namespace.sessions.values())
            holds += sum(node.holds for node in namespace.ledger.nodes()) - sum(len(s.tips) for s in namespace.sessions.values())
    descriptors = len(os.listdir(_FDS)) if _FDS.exists() else 0
    return Left(tickets, turns, holds, len(asyncio.all_tasks()), descriptors, num_engine_requests)


async def until(ready: Callable[[], bool], seconds: float, every: float = 0.002) -> bool:
    """Wait until `ready`; False if it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if ready():
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(every)


async def settled(now: Callable[[], Left], before: Left, seconds: float) -> Left:
    """What is left beyond `before` once nothing is, or after `seconds`."""
    await until(lambda: now().beyond(before).nothing, seconds, every=0.1)
    return now().beyond(before)
