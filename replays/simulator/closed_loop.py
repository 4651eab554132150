"""The closed loop by AgentX's rules: so many session trees live at all times, each played as the live replay plays it (`replays.play`)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from replays.plan import PlannedCall, TreePlan
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock, Rank
from replays.simulator.loop import PLAYS_EACH, LoopOptions, Play, Plays, call_of, tenant_of
from replays.simulator.outcomes import Outcome
from replays.simulator.scripts import Script
from replays.simulator.server import Server


@dataclass(eq=False)
class ClosedLoop:
    """Leads the lanes through warm-up and profiling."""

    clock: Clock
    server: Server
    scripts: Sequence[Script]
    options: LoopOptions
    profiling: bool = False
    profiling_started: float = 0.0
    plays: Plays = field(default_factory=Plays)
    num_overflows: int = 0
    is_cut: bool = False
    _taken: int = 0
    _last_taken: int | None = None
    _num_ready: int = 0
    _idle_version: int = 0

    def start(self) -> None:
        """Plan the first events; the clock does the rest."""
        self._order = list(range(len(self.scripts)))
        if self.options.shuffle:
            random.Random(f"{self.options.seed}/order").shuffle(self._order)
        self._lanes = [_Lane(self, number) for number in range(self.options.concurrency)]
        for lane in self._lanes:
            self.clock.at(0.0, lane.begin)

    def take(self) -> Play | None:
        """The next session; None when all have been played once and once is enough."""
        if self.options.duration is None and self._taken >= len(self.scripts):
            return None
        if self._last_taken is not None and self._taken >= self._last_taken:
            self.is_cut = True
            self._stop()
            return None
        number = self._taken
        self._taken += 1
        script = self.scripts[self._order[number % len(self.scripts)]]
        return self.plays.begin(script, number, self.clock.now, self.options.idle_cap)

    def ready(self) -> None:
        """A lane is warm. With the last of them profiling begins."""
        self._num_ready += 1
        if self._num_ready < len(self._lanes):
            return
        self.profiling = True
        self.profiling_started = self.clock.now
        if self.options.duration is not None:
            self.clock.at(self.clock.now + self.options.duration, self._stop, Rank.TICK)
            self._last_taken = self._taken + PLAYS_EACH * max(len(self.scripts), len(self._lanes))
        for lane in self._lanes:
            lane.profile()

    def _stop(self) -> None:
        self.clock.stopped = True

    def send(self, lane: _Lane, play: Play, call: PlannedCall, max_tokens: int | None, *, primer: bool = False) -> None:
        """Send one call; the lane hears of its end."""
        play.clock_seconds = max(play.clock_seconds, call.request.start_seconds)
        self._idle_version += 1

        def done(outcome: Outcome | None) -> None:
            if outcome is None:
                self.num_overflows += 1
            if not primer:
                play.tree.finish(call, self.clock.now, ends_stream=outcome is None)
            lane.heard(primer=primer)
            self._watch_idle()

        tenant = tenant_of(self.options, play, lane.number)
        warmup = not self.profiling
        sent = call_of(play, call, done, warmup=warmup, max_tokens=max_tokens, primer=primer, tenant=tenant)
        self.server.submit(sent, play.number)

    def _watch_idle(self) -> None:
        if self.server.num_in_flight == 0 and self.profiling:
            self._idle_version += 1
            version = self._idle_version
            self.clock.at(self.clock.now + self.options.system_idle_cap, lambda: self._jump(version), Rank.TICK)

    def _jump(self, version: int) -> None:
        """Nothing was in flight for as long as AgentX allows: the next request of all comes at once."""
        if version != self._idle_version or self.server.num_in_flight:
            return
        dues = [due for lane in self._lanes if lane.play is not None and (due := lane.play.tree.next_due()) is not None]
        ahead = min(dues, default=self.clock.now) - self.clock.now
        if ahead > 0:
            for lane in self._lanes:
                if lane.play is not None:
                    lane.play.tree.jump(ahead)
                    lane.step()

    def uses(self, branch: Branch, now: float) -> Iterator[tuple[float, int]]:
        """(time, depth) of the calls to come that ask for a branch, by time; what lanes will draw next is not among them."""
        return self.plays.uses(branch, now)

    @property
    def is_over(self) -> bool:
        """Every session has been played and nothing is in flight."""
        return not self.plays.live and not self.server.num_in_flight


def _window_seconds(plan: TreePlan, share: float, *, in_turns: bool) -> float:
    """Trace seconds from the session's start to where a lane enters it."""
    if not in_turns:
        return share * plan.duration_seconds
    call = plan.calls[min(int(share * len(plan.calls)), len(plan.calls) - 1)]
    return call.request.start_seconds - plan.start_seconds


class _Lane:
    """One live session tree after another."""

    def __init__(self, loop: ClosedLoop, number: int) -> None:
        self._loop = loop
        self.number = number
        self._random = random.Random(f"{loop.options.seed}/{number}")
        self.play: Play | None = None
        self._num_primers = 0
        self._num_warm = 0
        self._is_ready = False
        self._version = 0

    def begin(self) -> None:
        loop = self._loop
        self.play = loop.take()
        if self.play is None or loop.options.duration is None:
            self._become_ready()
            return
        share = self._random.uniform(loop.options.window_start, loop.options.window_end)
        tree = self.play.tree
        primers = tree.skip_to(_window_seconds(tree.plan, share, in_turns=loop.options.window_in_turns), loop.clock.now)
        self._num_primers = len(primers)
        for primer in primers:
            loop.send(self, self.play, primer, 1, primer=True)
        if not primers:
            self._warm_up()

    def profile(self) -> None:
        if self.play is not None:
            self.play.tree.resume(self._loop.clock.now)
            self.step()

    def heard(self, *, primer: bool) -> None:
        """A call of this lane has ended."""
        if primer:
            self._num_primers -= 1
        if self._num_primers:
            return
        if self._loop.profiling:
            self.step()
        elif not self._is_ready:
            self._warm_up()

    def _warm_up(self) -> None:
        loop = self._loop
        while self.play is not None:
            if self.play.tree.drained:
                self._recycle()
                continue
            left = loop.options.warmup - self._num_warm
            possible = self.play.tree.possible()[:left]
            self._num_warm += len(possible)
            for call in possible:
                self.play.tree.start(call)
                loop.send(self, self.play, call, 1)
            break
        if self._num_warm >= loop.options.warmup and (self.play is None or not self.play.tree.num_in_flight):
            self._become_ready()

    def _become_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._loop.ready()

    def _recycle(self) -> None:
        assert self.play is not None
        self._loop.plays.live.pop(self.play.number, None)
        self.play = self._loop.take()

    def step(self) -> None:
        """Send what is due and plan the next look."""
        loop = self._loop
        while self.play is not None and self.play.tree.drained:
            self._recycle()
        if self.play is None:
            return
        play, now = self.play, loop.clock.now
        for call in play.tree.due(now):
            play.tree.start(call)
            loop.send(self, play, call, None)
        due = play.tree.next_due()
        self._version += 1
        if due is not None:
            version = self._version
            loop.clock.at(due, lambda: self._wake(version))

    def _wake(self, version: int) -> None:
        if version == self._version:
            self.step()
