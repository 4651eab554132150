"""Several engines of one model: which of them takes a turn, and what happens when one is dead.

A turn goes where it costs least, counted in tokens that the engine has to compute: those of its prompt that are not resident there, and
those that are still to be computed before it. So a session stays where its history is, a new one goes where its head is, and neither
queues behind an engine that is busy while another is not. A new session also weighs how much context lives where, since it will stay.

An engine is dead when real calls say so: its failures open a breaker, and one turn after a pause finds out whether it is well again. Its
health route is not asked, as it is slow exactly when the engine is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from agentserve.cache import CacheBooks, Estimate
from agentserve.engines import Engine
from agentserve.engines.hints import EngineHints, NoHints
from agentserve.prompt import FlatPrompt
from agentserve.sessions import Session
from agentserve.twins import TwinRoom
from agentserve.waiting import WaitingRoom

RUNNING_TURN_TOKENS = 256
"""What a running turn costs the others on its engine, in tokens of prefill: its decoding steps take a share of each batch."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 8.0
_LAG_SECONDS = 0.1
"""So long a turn waits at most for the events of answers before it: without them its prediction would miss what those have evicted."""
_LAG_POLL_SECONDS = 0.002


@dataclass(slots=True, eq=False)
class Replica:
    """One engine, and what this server keeps for it. `clock` in seconds."""

    engine: Engine
    books: CacheBooks
    room: WaitingRoom
    twins: TwinRoom
    clock: Callable[[], float]
    hints: EngineHints = field(default_factory=NoHints)
    """Its plugin, where it has one."""
    num_running: int = 0
    uncached_tokens: int = 0
    """Of the prompts of these, as predicted."""
    num_failures: int = 0
    """Since its last answer."""
    closed_until: float = 0.0

    @property
    def load(self) -> int:
        """What stands before another turn, in tokens of prefill."""
        return self.uncached_tokens + RUNNING_TURN_TOKENS * self.num_running

    @property
    def is_open(self) -> bool:
        """Whether turns may go there: it has not failed, or its pause is over."""
        return self.num_failures == 0 or self.clock() >= self.closed_until

    def failed(self) -> None:
        """A call gave nothing: no turn goes there for a while, twice as long each time."""
        pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self.num_failures, 8))
        self.num_failures += 1
        self.closed_until = self.clock() + pause

    def worked(self) -> None:
        """It has answered."""
        self.num_failures = 0

    async def caught_up(self) -> None:
        """Return when the mirror has heard of all that complete answers did, or soon after."""
        capacity, deadline = self.engine.info.kv_capacity_tokens, self.clock() + _LAG_SECONDS
        while capacity is not None and self.books.is_behind(capacity) and self.clock() < deadline:  # noqa: ASYNC110 - the mirror tells nobody
            await asyncio.sleep(_LAG_POLL_SECONDS)

    def running(self, num_uncached_tokens: int) -> Running:
        """For a `with`, whose body is a turn on this engine."""
        return Running(self, num_uncached_tokens)


class Running:
    """A turn's part in the load of an engine, for the length of a `with` block."""

    def __init__(self, replica: Replica, num_uncached_tokens: int) -> None:
        self._replica = replica
        self._num_uncached_tokens = num_uncached_tokens

    def __enter__(self) -> Running:
        self._count(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def move_to(self, replica: Replica, num_uncached_tokens: int) -> None:
        """Another engine computes it from here on."""
        self._count(-1)
        self._replica, self._num_uncached_tokens = replica, num_uncached_tokens
        self._count(1)

    def _count(self, sign: int) -> None:
        self._replica.num_running += sign
        self._replica.uncached_tokens += sign * self._num_uncached_tokens


class Replicas:
    """The engines of one server, at least one. `sessions` are those that are alive."""

    def __init__(self, replicas: Sequence[Replica], sessions: Callable[[], Iterable[Session]]) -> None:
        self._replicas = tuple(replicas)
        self._sessions = sessions
        self.num_moved_turns = 0
        """Turns that another engine had to take, as theirs gave nothing."""

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def num_tickets(self) -> int:
        """Tickets that are out."""
        return sum(replica.room.num_tickets for replica in self)

    @property
    def num_waiting(self) -> int:
        """Turns that wait for one."""
        return sum(replica.room.num_waiting for replica in self)

    @property
    def first(self) -> Replica:
        """The engine that speaks for all where they are alike."""
        return self._replicas[0]

    def place(self, session: Session, prompt: FlatPrompt) -> Replica:
        """The engine for a turn of `session` with this prompt."""
        chosen = self.first if len(self) == 1 else self._cheapest(session, prompt, ())
        assert chosen is not None
        return self._take(session, chosen)

    def instead(self, session: Session, prompt: FlatPrompt, tried: Collection[Replica]) -> Replica | None:
        """Another engine for a turn that those `tried` gave nothing for; None if there is none that may be well."""
        chosen = self._cheapest(session, prompt, tried)
        if chosen is None or not chosen.is_open:
            return None
        self.num_moved_turns += 1
        return self._take(session, chosen)

    def home(self, session: Session) -> Replica:
        """The engine that a session was last on; else the least loaded."""
        if session.replica is not None and self._replicas[session.replica].is_open:
            return self._replicas[session.replica]
        return self._take(session, min(self._replicas, key=lambda replica: (not replica.is_open, replica.load)))

    def estimate(self, replica: Replica, prompt: FlatPrompt, twin_end: int) -> Estimate:
        """What is known of the prompt now for `replica`, and how much of it the best of the others holds, by their events."""
        others = (other.books.num_resident_tokens(prompt) or 0 for other in self._replicas if other is not replica)
        return replica.books.estimate(prompt, twin_end, other_replica=max(others, default=0))

    def _take(self, session: Session, replica: Replica) -> Replica:
        session.replica = self._replicas.index(replica)
        if replica.num_failures:  # a turn that finds out: no other follows it until it has
            replica.closed_until = replica.clock() + FIRST_PAUSE_SECONDS
        return replica

    def _cheapest(self, session: Session, prompt: FlatPrompt, tried: Collection[Replica]) -> Replica | None:
        left = [replica for replica in self._replicas if replica not in tried]
        candidates = [replica for replica in left if replica.is_open] or left
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        context = self._context() if session.tip is None else [0] * len(self)
        least = min(context)
        return min(candidates, key=lambda replica: self._cost(session, prompt, replica, context, least))

    def _cost(self, session: Session, prompt: FlatPrompt, replica: Replica, context: Sequence[int], least: int) -> int:
        number = self._replicas.index(replica)
        resident = replica.books.num_resident_tokens(prompt)
        if resident is None:  # without events: what a session has computed is where it was
            resident = min(session.tip.end, len(prompt.ids)) if session.replica == number and session.tip is not None else 0
        return len(prompt.ids) - resident + replica.load + context[number] - least

    def _context(self) -> list[int]:
        """Tokens of the sessions that live on each engine."""
        tokens = [0] * len(self)
        for session in self._sessions():
            if session.replica is not None and session.tip is not None:
                tokens[session.replica] += session.tip.end
        return tokens
