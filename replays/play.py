"""One play of one session tree: which calls may be sent now, and when the next ones may. Time comes in; nothing is sent from here.

Idle time is counted from *our* completions, in trace seconds divided by `time_scale`. AgentX's cap on a tree's idle time is a
watchdog: that long after the tree's last call in flight has ended, whatever waits only for time may go.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from replays.plan import PlannedCall, TreePlan


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server made of a call, for clients that send it back (`live`). `message` is the assistant message as JSON values."""

    message: dict[str, object]
    tool_call_ids: tuple[str, ...] = ()


class TreePlay:
    """The state of one play. Each call goes start → finish; `due` and `next_due` change nothing.

    `play` numbers the plays of one run; with the session's id it makes the cache-bust line.
    """

    def __init__(self, plan: TreePlan, play: int, *, now: float, time_scale: float, idle_cap_seconds: float) -> None:
        self.plan = plan
        self.play = play
        self._time_scale = time_scale
        self._idle_cap = idle_cap_seconds / time_scale
        self._started = now
        self._finished: dict[int, float] = {}
        self._next = [0] * len(plan.streams)
        self._in_flight: set[int] = set()
        self._idle_since = now
        self._jumped = 0.0
        self.answers: dict[int, Answer] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def drained(self) -> bool:
        """Every stream is at its end and nothing is in flight."""
        return not self._in_flight and all(self._next[i] >= len(calls) for i, calls in enumerate(self.plan.streams))

    def _heads(self) -> Iterable[PlannedCall]:
        """The next call of each stream, where everything it waits for has finished."""
        for stream, calls in enumerate(self.plan.streams):
            if self._next[stream] < len(calls):
                call = self.plan.calls[calls[self._next[stream]]]
                if all(number in self._finished for number in call.waits_for):
                    yield call

    def _due_at(self, call: PlannedCall) -> float:
        anchor = self._started if call.anchor is None else self._finished[call.anchor]
        due = anchor + call.delay_seconds / self._time_scale - self._jumped
        return min(due, self._idle_since + self._idle_cap) if not self._in_flight else due

    def due(self, now: float) -> list[PlannedCall]:
        """The calls that may be sent now."""
        return [call for call in self._heads() if self._due_at(call) <= now]

    def possible(self) -> list[PlannedCall]:
        """The calls that wait for nothing but time (warm-up sends them at once)."""
        return list(self._heads())

    def next_due(self) -> float | None:
        """When the next call falls due; None while all wait for calls in flight."""
        return min((self._due_at(call) for call in self._heads()), default=None)

    def has_started(self, call: PlannedCall) -> bool:
        """Sent, skipped or never to be sent: in any case nothing that is to come."""
        return call.index < self._next[call.stream]

    def expected_at(self, call: PlannedCall, now: float, recorded_seconds: float) -> float:
        """When a call that has not started will, as far as that is known: its due time, or as long after `now` as its recorded start
        lies after `recorded_seconds`. Changes nothing."""
        if call.index == self._next[call.stream] and all(number in self._finished for number in call.waits_for):
            return self._due_at(call)
        return now + max(0.0, call.request.start_seconds - recorded_seconds) / self._time_scale

    def start(self, call: PlannedCall) -> None:
        """`call` is on the wire."""
        self._in_flight.add(call.number)
        self._next[call.stream] = call.index + 1

    def finish(self, call: PlannedCall, now: float, *, answer: Answer | None = None, ends_stream: bool = False) -> None:
        """`call` has ended, well or not. `ends_stream`: its context is full, so the rest of its stream cannot be played."""
        self._in_flight.discard(call.number)
        self._finished[call.number] = now
        if answer is not None:
            self.answers[call.number] = answer
        if ends_stream:
            for number in self.plan.streams[call.stream][self._next[call.stream] :]:
                self._finished[number] = now
            self._next[call.stream] = len(self.plan.streams[call.stream])
        if not self._in_flight:
            self._idle_since = now

    def skip_to(self, trace_seconds: float, now: float) -> list[PlannedCall]:
        """Take everything that started before `trace_seconds` (after the first call) as done; return each live stream's last such call.

        A stream is live when calls of it are left. These are AgentX's primers: sent with max_tokens=1, they fill the cache.
        """
        until = self.plan.start_seconds + trace_seconds
        primers: list[PlannedCall] = []
        for stream, numbers in enumerate(self.plan.streams):
            before = [number for number in numbers if self.plan.calls[number].request.start_seconds < until]
            self._next[stream] = len(before)
            self._finished.update(dict.fromkeys(before, now))
            if before and len(before) < len(numbers):
                primers.append(self.plan.calls[before[-1]])
        return primers

    def resume(self, now: float) -> None:
        """Start the clock anew: what has finished counts as finished now, so that every next call has its full idle time before it."""
        self._finished = dict.fromkeys(self._finished, now)
        self._started = self._idle_since = now
        self._jumped = 0.0

    def jump(self, seconds: float) -> None:
        """Bring all that waits for time nearer by `seconds` (the cap on the idle time of the whole system)."""
        self._jumped += seconds
