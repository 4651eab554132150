"""Thousands of turns in front of engines that cannot hold all sessions: who waits, for how long, and at whose cost."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from admission.policies import ADMISSION_POLICIES
from admission.policies.gate import Gate
from admission.requests import AdmissionRequest, Grant, Limits
from admission.tickets import Ticket, TicketBook
from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.fairness import fairness, jain
from replays.simulator.fates import Knowledge
from replays.simulator.loop import LoopOptions
from replays.simulator.run import Simulation, SimulationOptions
from replays.simulator.scripts import script_of
from replays.traces import session_from_weka

BLOCK_TOKENS = 1024
HOLD_SECONDS = 120.0


def test_jains_index_is_one_for_equal_shares_and_falls_to_one_of_n() -> None:
    assert jain([0.3] * 7) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([]) is None
    assert fairness([]) == {}


def test_large_sessions_wait_no_longer_than_small_ones_and_nobody_past_the_limit() -> None:
    """The simulated engine under half again as many sessions as it holds."""
    made = generate_sessions(GeneratorSettings(100, seed=5, max_turns=60, subagent_share=0.0))
    options = SimulationOptions(
        policy="class_hazard",
        admission="working_set",
        admission_parameters={"hold_seconds": HOLD_SECONDS},
        profile="light",
        capacity_tokens=2_500_000,
        block_size=BLOCK_TOKENS,
        knowledge=Knowledge(inferred=True),
        loop=LoopOptions(concurrency=36, seed=1, duration=2400.0, idle_cap=120.0),
        sample_seconds=600.0,
    )
    simulation = Simulation([script_of(session_from_weka(weka, Path(weka.id)), BLOCK_TOKENS) for weka in made], options)
    report = simulation.run()
    simulation.server.admission.check_integrity()
    waits = report.wait_seconds
    assert report.num_requests > 2000
    assert waits["p99"] > 60, "there is something to share"
    assert waits["p99_largest_tenth"] <= 3 * waits["p99_smallest_tenth"]
    assert waits["longest"] <= HOLD_SECONDS
    assert waits["jain"] >= 0.95


@dataclass(frozen=True, slots=True)
class Client:
    """A session that asks, runs for a second or two, thinks for as long, and asks again."""

    name: str
    tokens: int
    tenant: str | None = None


def waits_of(policy: Gate, clients: list[Client], num_turns: int) -> dict[str, list[float]]:
    """Seconds that each client's turns waited."""
    rng = random.Random(3)
    waits: dict[str, list[float]] = defaultdict(list)
    asked: dict[str, tuple[Client, float]] = {}
    events: list[tuple[float, int, Client, Ticket | None]] = [(rng.random(), place, client, None) for place, client in enumerate(clients)]
    heapq.heapify(events)
    number = len(events)

    def granted(grants: list[Grant], now: float) -> None:
        nonlocal number
        for grant in grants:
            client, since = asked.pop(grant.request_id)
            waits[client.name].append(now - since)
            number += 1
            heapq.heappush(events, (now + 1 + rng.random(), number, client, grant.ticket))

    while number < num_turns:
        due, now = policy.due_seconds, events[0][0]
        if due is not None and due < now:
            granted(policy.due(due), due)
            continue
        now, _, client, ticket = heapq.heappop(events)
        number += 1
        if ticket is None:
            request = AdmissionRequest(f"r{number}", client.name, client.tokens, tenant=client.tenant)
            asked[request.id] = (client, now)
            answer = policy.offer(request, now)
            granted([answer] if isinstance(answer, Grant) else [], now)
        else:
            granted(policy.returned(ticket, now), now)
            heapq.heappush(events, (now + 1 + rng.random(), number, client, None))
    policy.check_integrity()
    return waits


def p99(waits: dict[str, list[float]], prefix: str) -> float:
    return float(np.percentile([wait for name, each in waits.items() if name.startswith(prefix) for wait in each], 99))


every_budget = pytest.mark.parametrize("name", sorted(ADMISSION_POLICIES.keys() - {"fcfs"}))


def gate(name: str, **values: float) -> Gate:
    """Room for ten of the clients. Members leave soon, so that a place says little: the queue decides."""
    short = {"tau_seconds": 1.0} if name == "working_set" else {}
    return ADMISSION_POLICIES[name](TicketBook(), Limits(capacity_tokens=1000), {**short, **values})


@every_budget
def test_a_tenant_that_floods_the_queue_waits_itself(name: str) -> None:
    clients = [Client(f"flood{number}", 100, "flood") for number in range(60)]
    clients += [Client(f"small{number}", 100, "small") for number in range(4)]
    together = waits_of(gate(name, quantum_tokens=0, hold_seconds=600), clients, 8000)
    apart = waits_of(gate(name, quantum_tokens=500, hold_seconds=600), clients, 8000)
    assert p99(apart, "small") < p99(together, "small") / 2
    assert p99(apart, "small") < p99(apart, "flood") / 2


@every_budget
def test_one_huge_session_blocks_nobody_and_is_not_starved(name: str) -> None:
    small = [Client(f"small{number}", 100) for number in range(20)]
    without = waits_of(gate(name, hold_seconds=60), small, 8000)
    beside = waits_of(gate(name, hold_seconds=60), [*small, Client("huge", 900)], 8000)
    assert p99(beside, "small") <= 3 * max(p99(without, "small"), 1.0)
    assert p99(beside, "huge") <= 3 * max(p99(beside, "small"), 1.0)
    assert max(max(each) for each in beside.values()) <= 60
