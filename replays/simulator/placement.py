"""Which replica a session goes to. It stays there: its blocks are there, and prompts that go elsewhere are computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from replays.simulator.engine import Engine

Placement: TypeAlias = Callable[[int, Sequence[Engine]], int]
"""(number of the play, replicas that take prompts) → which of them."""


def in_turn(play: int, engines: Sequence[Engine]) -> int:
    """One after the other."""
    return play % len(engines)


def fewest_requests(play: int, engines: Sequence[Engine]) -> int:
    """Where the fewest requests run or wait."""
    return min(range(len(engines)), key=lambda number: (engines[number].num_requests, number))


def most_room(play: int, engines: Sequence[Engine]) -> int:
    """Where the fewest blocks are used, by running requests or as a prefix that could be hit."""
    return max(range(len(engines)), key=lambda number: (engines[number].pool.num_plain, engines[number].pool.num_free, -number))


PLACEMENTS: dict[str, Placement] = {"in_turn": in_turn, "fewest_requests": fewest_requests, "most_room": most_room}
