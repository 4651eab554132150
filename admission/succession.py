"""A client that begins another session has often left the one before: how often is learnt, and nothing is taken for granted.

When a session begins, each idle session of the same client is one case, in a cell by how long it is idle and among how many. What becomes
of the cases of a cell, against what the return-time model expected of them, gives the factor by which the odds of an end grow there:
(dead + 1) ÷ (alive + 1) as seen, over the same as expected. It starts at 1. Clients whose sessions run side by side keep it near 1; those
that work on one thing at a time drive it up. Who the client is must be known: sessions of strangers say nothing of each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

IDLE_SECONDS = (0.1, 1.0, 10.0, 60.0)
"""Edges of the cells, as recorded: at once is what a machine does, within a minute what a person does."""
NUM_OTHERS = (1, 4)
"""Edges of the cells: alone, among a few, among many."""

_NUM_CELLS = (len(IDLE_SECONDS) + 1) * (len(NUM_OTHERS) + 1)
_MOST_SESSIONS = 64


class Succession:
    """One for all clients: what some do is expected of the others."""

    __slots__ = ("_alive", "_dead", "_expected_alive", "_expected_dead")

    def __init__(self) -> None:
        self._dead = [0.0] * _NUM_CELLS
        self._alive = [0.0] * _NUM_CELLS
        self._expected_dead = [0.0] * _NUM_CELLS
        self._expected_alive = [0.0] * _NUM_CELLS

    @staticmethod
    def cell(idle_seconds: float, num_others: int) -> int:
        """Of a session that is idle for so long when its client, which has `num_others` more idle sessions, begins another."""
        return bisect_right(IDLE_SECONDS, idle_seconds) * (len(NUM_OTHERS) + 1) + bisect_right(NUM_OTHERS, num_others)

    def factor(self, cell: int) -> float:
        """By which the odds of an end grow in this cell."""
        seen = (self._dead[cell] + 1) / (self._alive[cell] + 1)
        return seen * (self._expected_alive[cell] + 1) / (self._expected_dead[cell] + 1)

    def learn(self, cell: int, expected_alive: float, *, came_back: bool, weight: float = 1.0) -> None:
        """What became of a case, that came back with `expected_alive` by the model; weight −1 takes it back. Changes state."""
        counts = self._alive if came_back else self._dead
        counts[cell] += weight
        self._expected_alive[cell] += weight * expected_alive
        self._expected_dead[cell] += weight * (1 - expected_alive)

    def chance(self, cell: int, least_chance: float) -> float:
        """The chance of a return without the cell's factor at which, with it, `least_chance` is left."""
        odds = least_chance / (1 - least_chance) * self.factor(cell)
        return odds / (1 + odds)


class Clients:
    """Idle sessions by client, the latest last; of each client so many that a session's start costs little."""

    __slots__ = ("_idle",)

    def __init__(self) -> None:
        self._idle: dict[str, dict[str, None]] = {}

    def rests(self, client: str, session_id: str) -> None:
        """The session is idle from now on. Changes state."""
        idle = self._idle.setdefault(client, {})
        idle.pop(session_id, None)
        idle[session_id] = None
        if len(idle) > _MOST_SESSIONS:
            del idle[next(iter(idle))]

    def leaves(self, client: str, session_id: str) -> None:
        """It runs, or is over. Changes state."""
        idle = self._idle.get(client, {})
        idle.pop(session_id, None)
        if not idle:
            self._idle.pop(client, None)

    def idle(self, client: str) -> Iterator[str]:
        """Changes nothing."""
        return iter(self._idle.get(client, {}))

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))
