"""That a new session of a client ends the one before: learnt where it is so, not believed where it is not; scored on clients held back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from admission.eviction.policy import Fate
from admission.last_turn import TurnEnd
from admission.lifecycle import Lifecycle
from admission.returns import ReturnModel, ReturnParameters
from admission.succession import IDLE_SECONDS, Clients, Succession

TOOLS = TurnEnd(ends_turn=False, tools=("Bash",))
TURN_SECONDS = 5.0
CAP_SECONDS = 300.0
SOON_SECONDS = 60.0
PLAY_SECONDS = 2000.0


def test_the_factor_starts_at_one_and_follows_what_is_seen() -> None:
    succession = Succession()
    cell = succession.cell(2.0, 0)
    assert succession.factor(cell) == 1
    assert succession.chance(cell, 0.2) == pytest.approx(0.2)
    for _ in range(1000):
        succession.learn(cell, 0.9, came_back=True)
    for _ in range(100):
        succession.learn(cell, 0.9, came_back=False)
    assert succession.factor(cell) == pytest.approx(1.0, abs=0.15), "as many as were expected anyway"
    for _ in range(900):
        succession.learn(cell, 0.9, came_back=False)
    assert succession.factor(cell) == pytest.approx(9.0, rel=0.1)
    assert succession.factor(succession.cell(20.0, 0)) == 1, "other cells have learnt nothing"
    succession.learn(succession.cell(20.0, 0), 0.9, came_back=False)
    succession.learn(succession.cell(20.0, 0), 0.9, came_back=False, weight=-1)
    assert succession.factor(succession.cell(20.0, 0)) == 1


def test_every_cell_is_one_of_its_own() -> None:
    cells = [Succession.cell(idle, others) for idle in (0.0, *IDLE_SECONDS) for others in (0, 1, 4)]
    assert sorted(cells) == list(range(len(cells)))
    assert {Succession().factor(cell) for cell in cells} == {1.0}


def test_of_each_client_the_latest_idle_sessions_are_known() -> None:
    clients = Clients()
    for number in range(100):
        clients.rests("a", str(number))
    clients.rests("b", "x")
    assert next(clients.idle("a")) == "36"
    clients.rests("a", "36")
    assert next(clients.idle("a")) == "37"
    for number in range(100):
        clients.leaves("a", str(number))
    clients.leaves("b", "x")
    assert len(clients) == 0


@dataclass(slots=True)
class Verdicts:
    """Of sessions that count as ended within a minute of their last turn so far, how many had; and how many ended at all."""

    declared: int = 0
    right: int = 0
    ended: int = 0

    @property
    def precision(self) -> float:
        return self.right / self.declared

    @property
    def recall(self) -> float:
        return self.right / self.ended


def _turns(rng: random.Random, lane: str, seconds: float, mean_turns: float) -> Iterator[tuple[float, str, bool]]:
    """Start, session and whether it is its last turn, of one thread of work."""
    now, number = rng.uniform(0, 60), 0
    while now < seconds:
        turns = 1 + int(rng.expovariate(1 / mean_turns))
        for turn in range(turns):
            yield now, f"{lane}/{number}", turn == turns - 1
            # As recorded: nine seconds at the median, capped.
            now += TURN_SECONDS + min(rng.lognormvariate(2.2, 1.6), CAP_SECONDS)
        number += 1


def _play(life: Lifecycle, rng: random.Random, start: float, lanes: list[tuple[str | None, str]], mean_turns: float) -> Verdicts:
    """Some clients' lanes, (client, lane) each."""
    turns = [(client, turn) for client, lane in lanes for turn in _turns(rng, lane, PLAY_SECONDS, mean_turns)]
    events = [(start + turn[0], True, client, *turn[1:]) for client, turn in turns]
    events += [(start + turn[0] + TURN_SECONDS, False, client, *turn[1:]) for client, turn in turns]
    verdicts, last_turns, over = Verdicts(), dict[str, float](), set[str]()
    for now, begins, client, session, is_last in sorted(events, key=lambda event: event[:2]):
        changed = life.due(now)
        if begins:
            changed += life.turn_started(session, now, tenant=client)
        else:
            life.turn_ended(session, now, TOOLS)
            last_turns[session] = now
            over |= {session} if is_last else set()
        early = [name for name in changed if life.fate(name) is Fate.PRESUMED and now - last_turns.get(name, -1e9) <= SOON_SECONDS]
        verdicts.declared += len(early)
        verdicts.right += len(over.intersection(early))
    verdicts.ended = len(over)
    life.check_integrity()
    return verdicts


def _held_back(lanes_a_client: int, mean_turns: float, *, num_clients: int = 12, known: bool = True) -> Verdicts:
    """So many clients teach, of as many others the verdicts are scored."""
    rng = random.Random(7)
    life = Lifecycle(ReturnModel(ReturnParameters(longest_gap_seconds=CAP_SECONDS)))
    verdicts = Verdicts()
    for half in range(2):
        names = [f"{half}-{number}" for number in range(num_clients)]
        lanes = [(name if known else None, f"{name}-{lane}") for name in names for lane in range(lanes_a_client)]
        verdicts = _play(life, rng, half * 2 * PLAY_SECONDS, lanes, mean_turns)
    return verdicts


def test_on_clients_held_back_ends_are_found_soon_where_sessions_follow_each_other() -> None:
    one_by_one = _held_back(1, 12)
    assert one_by_one.precision > 0.95
    assert one_by_one.recall > 0.65
    side_by_side = _held_back(3, 12, num_clients=5)
    assert side_by_side.precision > 0.6
    assert 0.25 < side_by_side.recall < one_by_one.recall
    assert _held_back(1, 12, known=False).declared == 0, "of silence alone nothing follows so soon"
