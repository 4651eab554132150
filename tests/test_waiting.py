"""The waiting room: whatever becomes of turns, every ticket comes back and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest

from admission.policies import ADMISSION_POLICIES
from admission.requests import AdmissionRequest, Limits
from admission.tickets import TicketBook
from agentserve.errors import Busy, EngineError
from agentserve.waiting import WaitingRoom

pytestmark = pytest.mark.anyio

LIMITS = Limits(max_running=24, max_waiting=40, capacity_tokens=10_000)


def room_of(book: TicketBook, limits: Limits, policy: str, **values: float) -> WaitingRoom:
    loop = asyncio.get_running_loop()
    return WaitingRoom(ADMISSION_POLICIES[policy](book, limits, values), limits, loop.time, lambda _: None)


class Site:
    """Random turns against a waiting room, an engine that fails and restarts, and an operator who changes the policy."""

    def __init__(self, seed: int) -> None:
        self.book = TicketBook()
        self.room = room_of(self.book, LIMITS, "fcfs")
        self.random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.restart = asyncio.Event()
        self._number = 0

    async def turn(self) -> None:
        self._number += 1
        number, session = self._number, f"s{self.random.randrange(60)}"
        tokens, resident = self.random.randrange(1200), self.random.randrange(800)
        request = AdmissionRequest(f"r{number}", session, tokens, resident, tenant=f"t{number % 3}", is_aside=number % 11 == 0)
        end = self.random.random()
        try:
            async with asyncio.timeout(None if end < 0.9 else 0.001), self.room.ticket(request) as ticket:
                await self._generate(end)
                self.room.prefilled(ticket)
                self.room.answered(ticket, 1000, self.random.randrange(200))
            self.outcomes["answered"] += 1
        except (EngineError, TimeoutError, Busy) as error:
            self.outcomes[type(error).__name__] += 1
        if self.random.random() < 0.1:
            self.room.session_ended(session)

    async def _generate(self, end: float) -> None:
        if end < 0.1:
            raise EngineError("upstream")
        with suppress(TimeoutError):
            await asyncio.wait_for(self.restart.wait(), self.random.random() * 0.004)
        if self.restart.is_set():
            raise EngineError("restart")

    async def client(self, num_turns: int) -> None:
        for _ in range(num_turns):
            task = asyncio.create_task(self.turn())
            if self.random.random() < 0.1:
                await asyncio.sleep(self.random.random() * 0.003)
                task.cancel()  # the client leaves, waiting or served
            with suppress(asyncio.CancelledError):
                await task

    async def operator(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            name = self.random.choice(list(ADMISSION_POLICIES))
            self.room.change_rule(ADMISSION_POLICIES[name].rule(LIMITS, {"cold_tokens": 700}))
            for entry, _ in self.room.waiting()[:1]:
                assert self.room.cancel(entry.request.id)
            self.restart.set()
            await asyncio.sleep(0.002)
            self.restart.clear()


async def test_ten_thousand_turns_end_in_every_way_and_leave_no_ticket() -> None:
    site = Site(seed=7)
    operator = asyncio.create_task(site.operator())
    await asyncio.gather(*(site.client(100) for _ in range(100)))
    operator.cancel()
    site.book.check_integrity()
    assert (site.book.num_tickets, site.book.charged_tokens, site.book.num_sessions) == (0, 0, 0)
    assert (site.room.num_tickets, site.room.num_waiting) == (0, 0)
    assert all(site.outcomes[name] > 50 for name in ("answered", "EngineError", "TimeoutError", "Busy")), site.outcomes


async def test_a_grant_to_a_client_that_leaves_in_the_same_moment_goes_to_the_next() -> None:
    book = TicketBook()
    room = room_of(book, Limits(max_running=1), "fcfs")
    served = []

    async def turn(name: str) -> None:
        async with room.ticket(AdmissionRequest(name, name, 1)):
            served.append(name)

    async with room.ticket(AdmissionRequest("first", "first", 1)):
        gone, stays = asyncio.create_task(turn("gone")), asyncio.create_task(turn("stays"))
        await asyncio.sleep(0)
        gone.cancel()  # it has not run since when the ticket comes back
    await asyncio.wait_for(stays, 1)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert served == ["stays"]
    assert (book.num_tickets, room.num_waiting) == (0, 0)


async def test_a_held_turn_is_woken_by_time_alone() -> None:
    book = TicketBook()
    room = room_of(book, Limits(capacity_tokens=100), "working_set", hold_seconds=1)
    async with room.ticket(AdmissionRequest("a", "a", 100)):
        pass
    async with asyncio.timeout(5), room.ticket(AdmissionRequest("b", "b", 50)):
        assert room.state().num_members >= 1
