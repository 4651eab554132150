"""The players: a lane keeps one session tree live at all times, the conductor leads all lanes of a process through the phases.

Warm-up, as AgentX does it: each lane starts its first session at a random point of its time; the last request before it of every
live stream is sent with max_tokens 1, then `warmup` more per lane without idle time. When all lanes are there, profiling begins and
every next request has its full recorded idle time before it. A lane whose tree has drained takes the next session, from its start.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from uuid import uuid4

import gevent
from gevent.event import Event
from gevent.pool import Group

from replays.client import ChatClient, Reply, SessionUsage
from replays.formats import Sessions
from replays.options import ReplayOptions
from replays.plan import PlannedCall, plan_session
from replays.play import TreePlay
from replays.prompts import PromptWriter
from replays.records import End, Phase, Record
from replays.row_faults import RowFaults
from replays.script import ToolScript
from replays.traces import Session, TraceError


def record_of(phase: Phase, play: TreePlay, call: PlannedCall, reply: Reply) -> Record:
    """The record of one finished request."""
    usage = reply.usage
    ours = (usage.agentserve if usage else None) or SessionUsage()
    details = usage.prompt_tokens_details if usage else None
    return Record(
        phase=phase,
        session=play.plan.session.id,
        play=play.play,
        stream=play.plan.session.streams[call.stream].name,
        index=call.index,
        number=call.number,
        follows=None if call.edits else call.follows,
        started=reply.started,
        ended=reply.ended,
        first_content=reply.first_content,
        last_content=reply.last_content,
        error=reply.error,
        overflow=reply.overflow,
        planned_prompt_tokens=call.request.num_prompt_tokens * play.plan.scale,
        num_theoretical_blocks=call.theoretical.num_hit_blocks,
        num_blocks=call.theoretical.num_blocks,
        num_prompt_tokens=usage.prompt_tokens if usage else None,
        num_output_tokens=usage.completion_tokens if usage else None,
        num_cached_tokens=details.cached_tokens if details else None,
        turn=ours.turn,
        ceiling_tokens=ours.ceiling_tokens,
        ceiling_block_tokens=ours.ceiling_block_tokens,
        predicted_tokens=ours.predicted_tokens,
        missed_tokens=ours.missed_tokens,
        num_tool_calls=len(reply.answer.tool_call_ids) if reply.answer else None,
        edited=call.edits,
    )


@dataclass(slots=True)
class Draw:
    """Hands out the sessions in order, over and over (or once). Of `step` processes, each takes every `step`-th, from `first`.

    A play's number is its place in that order, so that no two plays of a run have the same one. What cannot be read, and a session whose id
    another one had before it, goes to `faults`.
    """

    traces: Sessions
    first: int
    step: int
    once: bool
    faults: RowFaults
    _taken: int = 0
    _first: dict[str, int] = field(default_factory=dict)

    def next(self) -> tuple[Session, int] | None:
        """The next session with calls to play and the number of its play; None when all have been played once."""
        for _ in range(len(self.traces)):
            number = self.first + self._taken * self.step
            if self.once and number >= len(self.traces):
                return None
            self._taken += 1
            session = self._read(number % len(self.traces))
            if session is not None and session.root.requests:
                return session, number
        return None

    def _read(self, index: int) -> Session | None:
        try:
            session = self.traces[index]
        except TraceError as error:
            self.faults.skip(error)
            return None
        return session if self._first.setdefault(session.id, index) == index else None


@dataclass(slots=True)
class Conductor:
    """What the lanes of one process share. `run` names the run in cache-bust lines."""

    options: ReplayOptions
    draw: Draw
    client: ChatClient
    model: str
    run: str
    on_record: Callable[[Record, Reply], None]
    on_end: Callable[[End], None]
    script: ToolScript | None = None
    template_tokens: int = 0
    phase: Phase = "warmup"
    num_in_flight: int = 0
    stopping: bool = False
    lanes: list[Lane] = field(default_factory=list)
    _num_expected: int | None = None
    _num_ready: int = 0
    _num_left: int = 0
    _profiling: Event = field(default_factory=Event)
    _all_left: Event = field(default_factory=Event)
    _last_active: float = 0.0

    def add_lane(self) -> Lane:
        lane = Lane(self, len(self.lanes))
        self.lanes.append(lane)
        return lane

    def expect(self, num_lanes: int) -> None:
        """Profiling begins when this many lanes are warm; those that come later join in."""
        self._num_expected = num_lanes
        self._begin_if_warm()

    def wait_for_profiling(self) -> None:
        """A lane is warm. The last one to come starts the profiling phase."""
        self._num_ready += 1
        self._begin_if_warm()
        self._profiling.wait()

    def _begin_if_warm(self) -> None:
        if self._num_expected is not None and self._num_ready >= self._num_expected and not self._profiling.is_set():
            self.phase = "profiling"
            self._profiling.set()
            gevent.spawn(self._run_profiling)

    def leave(self) -> None:
        """A lane has nothing more to play."""
        self._num_left += 1
        if self._num_left >= len(self.lanes):
            self._all_left.set()

    def _run_profiling(self) -> None:
        started = self._last_active = monotonic()
        watchdog = gevent.spawn(self._watch_idle)
        self._all_left.wait(self.options.duration)
        ended = monotonic()
        self.stopping = True
        for lane in self.lanes:
            lane.wake.set()
        self._all_left.wait(self.options.grace)
        watchdog.kill()
        num_cancelled = self.num_in_flight
        for lane in self.lanes:
            lane.requests.kill()
        self.on_end(End(started=started, ended=ended, num_cancelled=num_cancelled))

    def _watch_idle(self) -> None:
        """AgentX's cap on the idle time of the whole system: then the next request of all comes at once."""
        cap = self.options.system_idle_cap / self.options.pace
        while True:
            gevent.sleep(max(0.01, cap / 10))
            now = monotonic()
            if self.num_in_flight:
                self._last_active = now
            elif now - self._last_active >= cap:
                self._jump(now)
                self._last_active = now

    def _jump(self, now: float) -> None:
        plays = [lane.play for lane in self.lanes if lane.play is not None]
        next_due = min((due for play in plays if (due := play.next_due()) is not None), default=now)
        if next_due > now:
            for play in plays:
                play.jump(next_due - now)
            for lane in self.lanes:
                lane.wake.set()

    def send(self, writer: PromptWriter, call: PlannedCall, max_tokens: int | None) -> tuple[Record, Reply]:
        """Send one call and record it."""
        phase = self.phase
        stream = f"{self.run}-{writer.play.play}-{call.stream}"
        headers = {"x-request-id": uuid4().hex, "x-correlation-id": stream}
        body = writer.body(call, max_tokens=max_tokens)
        self.num_in_flight += 1
        try:
            reply = self.client.send(body, headers)
        finally:
            self.num_in_flight -= 1
        record = record_of(phase, writer.play, call, reply)
        self.on_record(record, reply)
        return record, reply


class Lane:
    """One live session tree after another."""

    def __init__(self, conductor: Conductor, number: int) -> None:
        self._conductor = conductor
        self._options = conductor.options
        self._random = random.Random(f"{conductor.options.seed}/{conductor.draw.first + number * conductor.draw.step}")
        self.wake = Event()
        self.requests = Group()
        self.play: TreePlay | None = None
        self._writer: PromptWriter | None = None

    def run(self) -> None:
        """Play until the conductor stops, or until there is nothing left to play."""
        if self._take_next() and not self._options.once:
            self._warm_up()
        self._conductor.wait_for_profiling()
        if self.play is not None:
            self.play.resume(monotonic())
        while not self._conductor.stopping and self.play is not None:
            self._step(self.play)
        self.requests.join()
        self._conductor.leave()

    def _take_next(self) -> bool:
        drawn = self._conductor.draw.next()
        if drawn is None:
            self.play = None
            return False
        session, number = drawn
        options = self._options
        plan = plan_session(session, options.scale, self._conductor.template_tokens)
        self.play = TreePlay(plan, number, now=monotonic(), time_scale=options.pace, idle_cap_seconds=options.idle_cap)
        self._writer = PromptWriter(
            self._conductor.run,
            self._conductor.model,
            self.play,
            options.assistant,
            script=self._conductor.script,
            has_marker=options.marker == "on",
        )
        return True

    def _warm_up(self) -> None:
        assert self.play is not None
        share = self._random.uniform(self._options.window_start, self._options.window_end)
        for primer in self.play.skip_to(share * self.play.plan.duration_seconds, monotonic()):
            self.requests.spawn(self._conductor.send, self._writer, primer, 1)
        self.requests.join()
        num_sent = 0
        while num_sent < self._options.warmup and self.play is not None:
            possible = self.play.possible()[: self._options.warmup - num_sent]
            for call in possible:
                self._start(self.play, call, max_tokens=1)
            num_sent += len(possible)
            self._wait_or_recycle(self.play, None)
        self.requests.join()

    def _step(self, play: TreePlay) -> None:
        now = monotonic()
        for call in play.due(now):
            self._start(play, call, max_tokens=None)
        next_due = play.next_due()
        self._wait_or_recycle(play, None if next_due is None else max(0.0, next_due - now))

    def _wait_or_recycle(self, play: TreePlay, timeout_seconds: float | None) -> None:
        if play.drained:
            self._take_next()
        elif timeout_seconds != 0:
            self.wake.wait(timeout_seconds)
            self.wake.clear()

    def _start(self, play: TreePlay, call: PlannedCall, *, max_tokens: int | None) -> None:
        play.start(call)
        self.requests.spawn(self._send, play, call, max_tokens)

    def _send(self, play: TreePlay, call: PlannedCall, max_tokens: int | None) -> None:
        assert self._writer is not None
        record, reply = self._conductor.send(self._writer, call, max_tokens)
        answer = reply.answer if record.error is None else None
        play.finish(call, monotonic(), answer=answer, ends_stream=record.overflow)
        self.wake.set()
