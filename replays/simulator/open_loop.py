"""The open loop: sessions begin when the trace says, or at random at a given rate, whether or not the server keeps up.

Inside a session the calls go as in the closed loop: each waits for what it waited for in the recording, and for as long.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from replays.plan import PlannedCall
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock, Rank
from replays.simulator.loop import LoopOptions, Play, Plays, call_of, tenant_of
from replays.simulator.outcomes import Outcome
from replays.simulator.scripts import Script
from replays.simulator.server import Server


@dataclass(eq=False)
class OpenLoop:
    """Begins sessions by the clock. Raises ValueError where recorded arrivals are wanted and the trace has no clock."""

    clock: Clock
    server: Server
    scripts: Sequence[Script]
    options: LoopOptions
    plays: Plays = field(default_factory=Plays)
    num_overflows: int = 0
    _num_to_come: int = 0

    def __post_init__(self) -> None:
        assert self.options.arrivals is not None
        if self.options.arrivals == 0 and not all(script.plan.session.has_clock for script in self.scripts):
            raise ValueError("these sessions are not on one clock, so there are no recorded arrivals: give a rate")

    @property
    def is_cut(self) -> bool:
        """Never: sessions come at their rate, however short they are."""
        return False

    @property
    def profiling(self) -> bool:
        return self.clock.now >= self.options.unmeasured

    @property
    def profiling_started(self) -> float:
        return self.options.unmeasured

    @property
    def is_over(self) -> bool:
        """All sessions have begun, and ended."""
        return not self._num_to_come and not self.plays.live and not self.server.num_in_flight

    def start(self) -> None:
        """Plan all arrivals."""
        for number, (time, script) in enumerate(self._arrivals()):
            self._num_to_come += 1
            self.clock.at(time, lambda script=script, number=number: self._begin(script, number))  # type: ignore[misc]  # bound early
        if self.options.duration is not None:
            self.clock.at(self.options.unmeasured + self.options.duration, self._stop, Rank.TICK)

    def _arrivals(self) -> Iterator[tuple[float, Script]]:
        until = float("inf") if self.options.duration is None else self.options.unmeasured + self.options.duration
        if self.options.arrivals:
            yield from self._at_random(self.options.arrivals, until)
            return
        first = min((script.plan.start_seconds for script in self.scripts), default=0.0)
        for script in self.scripts:
            time = (script.plan.start_seconds - first) / self.options.speed
            if time < until:
                yield time, script

    def _at_random(self, rate: float, until: float) -> Iterator[tuple[float, Script]]:
        """Without an end every session once; else again and again until then."""
        dice = random.Random(f"{self.options.seed}/arrivals")
        order = list(self.scripts)
        if self.options.shuffle:
            random.Random(f"{self.options.seed}/order").shuffle(order)
        time = dice.expovariate(rate)
        number = 0
        while time < until and (until < float("inf") or number < len(order)):
            yield time, order[number % len(order)]
            number += 1
            time += dice.expovariate(rate)

    def _stop(self) -> None:
        self.clock.stopped = True

    def _begin(self, script: Script, number: int) -> None:
        self._num_to_come -= 1
        _Arrival(self, self.plays.begin(script, number, self.clock.now, self.options.idle_cap)).step()

    def uses(self, branch: Branch, now: float) -> Iterator[tuple[float, int]]:
        """(time, depth) of the calls to come that ask for a branch, by time; of sessions that have begun."""
        return self.plays.uses(branch, now)


class _Arrival:
    """One session on its way."""

    def __init__(self, loop: OpenLoop, play: Play) -> None:
        self._loop = loop
        self._play = play
        self._version = 0

    def step(self) -> None:
        """Send what is due and plan the next look."""
        loop, tree = self._loop, self._play.tree
        now = loop.clock.now
        if tree.drained:
            loop.plays.live.pop(self._play.number, None)
            return
        for call in tree.due(now):
            tree.start(call)
            self._send(call)
        due = tree.next_due()
        self._version += 1
        if due is not None:
            version = self._version
            loop.clock.at(due, lambda: self._wake(version))

    def _send(self, call: PlannedCall) -> None:
        loop, play = self._loop, self._play
        play.clock_seconds = max(play.clock_seconds, call.request.start_seconds)

        def done(outcome: Outcome | None) -> None:
            if outcome is None:
                loop.num_overflows += 1
            play.tree.finish(call, loop.clock.now, ends_stream=outcome is None)
            self.step()

        tenant = tenant_of(loop.options, play)
        loop.server.submit(call_of(play, call, done, warmup=not loop.profiling, max_tokens=None, tenant=tenant), play.number)

    def _wake(self, version: int) -> None:
        if version == self._version:
            self.step()
