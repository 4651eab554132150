"""The life of a session, from what is said and what can be inferred: running, waiting for a tool or a person, ended.

Clients hardly ever say that a session is over, and what is over is the best thing to evict. A state machine without a clock of its own: it
is told what happens and answers `Fate` for each part of a session. What it calls dead it takes back when the session returns.
"""

from __future__ import annotations

import heapq
import math
from copy import copy
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Annotated

from admission.eviction.policy import Fate, Knob
from admission.last_turn import Course, TurnEnd
from admission.pace import Pace
from admission.return_class import UNKNOWN, awaits_agent, return_class, with_level, with_tool
from admission.returns import ReturnModel
from admission.succession import Clients, Succession


class Phase(StrEnum):
    RUNNING = "running"
    TOOL_PENDING = "tool_pending"
    """The last turn called tools."""
    WAITING = "waiting"
    """For a person, or for whatever follows a turn that called no tool."""
    ENDED = "ended"


class _Due(IntEnum):
    FOLLOWED = 0
    """Too little hope is left now that its client has begun another session."""
    HOPELESS = 1
    FORGOTTEN = 2


@dataclass(frozen=True, slots=True)
class LifecycleParameters:
    least_chance: Annotated[float, Knob(0.01, 0.9, "of a return, below which an idle session counts as ended")] = 0.2
    forget_seconds: Annotated[float, Knob(60, 604_800, "idle time after which a session is taken never to return", log=True)] = 14_400.0
    superseding_turns: Annotated[float, Knob(1, 20, "turns on other branches after which a branch counts as left")] = 2.0
    silent_turns: Annotated[float, Knob(1, 20, "turns without an echo of the output, after which none is expected")] = 2.0


@dataclass(slots=True)
class _Session:
    tenant: str | None
    parent_id: str | None
    phase: Phase = Phase.RUNNING
    num_running: int = 0
    fate: Fate = Fate.LIVE
    return_class: str = UNKNOWN
    idle_since: float = 0.0
    ends_turn: bool = False
    children: set[str] = field(default_factory=set)
    pace: Pace = field(default_factory=Pace)
    course: Course = field(default_factory=Course)
    num_turns: int = 0
    branch_turns: dict[str, int] = field(default_factory=dict)
    """Branch → the session's turn that used it last."""
    shared_tokens: dict[str, int] = field(default_factory=dict)
    """Branch → tokens of it that the newest prompt still has."""
    side_branches: set[str] = field(default_factory=set)
    num_silent: int = 0
    case: tuple[int, float] | None = None
    """Its client began another session during its present idle time: the cell, and the chance of a return without that."""
    counts_as_never: bool = False
    """Its present idle time has been counted as one without a return."""
    epoch: int = 0
    """Counts idle times, so that a deadline of an earlier one is told from the present one's."""

    @property
    def client(self) -> str | None:
        """Whose new sessions say something of it: of a sub-agent nobody's."""
        return self.tenant if self.parent_id is None else None


class Lifecycle:
    """Sessions that have run and may come back. Calls that change what is known of sessions return the ids of those whose fate changed."""

    def __init__(
        self,
        returns: ReturnModel,
        parameters: LifecycleParameters | None = None,
        *,
        context_tokens: int | None = None,
        time_scale: float = 1.0,
    ) -> None:
        """`context_tokens`: the model's limit. `time_scale`: how much faster than recorded the sessions run, as for `returns`."""
        self._returns = returns
        self._parameters = parameters or LifecycleParameters()
        self._context_tokens = context_tokens
        self._time_scale = time_scale
        self._sessions: dict[str, _Session] = {}
        self._deadlines: list[tuple[float, str, int, _Due]] = []
        """When, whose, of which idle time, and what then."""
        self._succession = Succession()
        self._clients = Clients()

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session_id: str) -> bool:
        """Whether it has run and is not forgotten."""
        return session_id in self._sessions

    @property
    def due_seconds(self) -> float | None:
        """When `due` wants to be called next; None while nothing waits for time to pass. May be early, never late."""
        return self._deadlines[0][0] if self._deadlines else None

    def phase(self, session_id: str) -> Phase:
        session = self._sessions.get(session_id)
        return Phase.ENDED if session is None else session.phase

    def return_class(self, session_id: str) -> str:
        """The class of its idle time, for `ReturnModel` and `Extent`."""
        session = self._sessions.get(session_id)
        return UNKNOWN if session is None else session.return_class

    def is_over(self, session_id: str) -> bool:
        """Whether the session has ended, as was said or is believed; one that is not known has."""
        session = self._sessions.get(session_id)
        return session is None or session.fate is not Fate.LIVE

    def seconds_to_return(self, session_id: str, now: float, horizon_seconds: float) -> float:
        """Mean seconds until an idle session is back, counted as at most the horizon; 0 while it runs, infinity when it has ended."""
        session = self._sessions.get(session_id)
        if session is None or session.fate is not Fate.LIVE:
            return math.inf
        if session.num_running:
            return 0.0
        return self._returns.time_to_return(session.return_class, now - session.idle_since, horizon_seconds)

    def fate(self, session_id: str, branch_id: str = "", *, start_tokens: int = 0, is_generated: bool = False) -> Fate:
        """Of the part of a branch that starts at `start_tokens`. A session that is not known has ended."""
        session = self._sessions.get(session_id)
        if session is None:
            return Fate.ENDED
        if session.fate is not Fate.LIVE:
            return session.fate
        if branch_id in session.side_branches:
            return Fate.ONE_SHOT
        if session.num_turns - session.branch_turns.get(branch_id, session.num_turns) >= self._parameters.superseding_turns:
            return Fate.SUPERSEDED
        if start_tokens >= session.shared_tokens.get(branch_id, math.inf):
            return Fate.CUT
        if is_generated and session.num_silent >= self._parameters.silent_turns:
            return Fate.GENERATED
        return Fate.LIVE

    def turn_started(
        self, session_id: str, now: float, *, branch_id: str = "", shared_tokens: int | None = None, parent_id: str | None = None,
        tenant: str | None = None,
    ) -> list[str]:  # fmt: skip
        """A turn of the session begins; `shared_tokens`: how much of the branch's tokens its prompt has, where it has not all of them.

        Its sub-agents that have finished are joined: their parent goes on, and with their results in its prompt it needs them no more.
        If the session is new, others of its tenant may have ended (`admission.succession`).
        """
        session = self._sessions.get(session_id)
        changed = []
        if session is None:
            session = self._sessions[session_id] = _Session(tenant, None if parent_id == session_id else parent_id)
            if session.parent_id in self._sessions:
                self._sessions[session.parent_id].children.add(session_id)
            changed = self._follow(session, now)
        else:
            changed = [session_id] if session.fate is not Fate.LIVE else []
            if session.num_running == 0:
                self._came_back(session, now)
            session.fate = Fate.LIVE
        if session.client is not None:
            self._clients.leaves(session.client, session_id)
        session.num_running += 1
        session.num_turns += 1
        session.phase = Phase.RUNNING
        session.side_branches.discard(branch_id)
        session.branch_turns[branch_id] = session.num_turns
        if shared_tokens is None:
            session.shared_tokens.pop(branch_id, None)
        else:
            session.shared_tokens[branch_id] = shared_tokens
        return changed + self._join(session, now)

    def _came_back(self, session: _Session, now: float) -> None:
        idle_seconds = now - session.idle_since
        session.epoch += 1
        if session.counts_as_never:
            session.counts_as_never = False
            self._returns.did_come_back(session.return_class, now)
            self._settle(session, came_back=False, weight=-1.0)
        self._settle(session, came_back=True)
        session.case = None
        session.pace.came_back(idle_seconds * self._time_scale)
        session.course.came_back(idle_seconds * self._time_scale)
        self._returns.came_back(session.return_class, idle_seconds, now)

    def _follow(self, session: _Session, now: float) -> list[str]:
        """The session is new. Returns those of its client that count as ended for that; others do later, when less hope is left."""
        ended: list[str] = []
        idle = [] if session.client is None else list(self._clients.idle(session.client))
        for session_id in idle:
            former = self._sessions[session_id]
            # What begins while a sub-agent is waited for may be the sub-agent, of a client that does not say so.
            if former.case is not None or former.fate is not Fate.LIVE or awaits_agent(former.return_class):
                continue
            idle_seconds = now - former.idle_since
            cell = Succession.cell(idle_seconds * self._time_scale, len(idle) - 1)
            former.case = (cell, self._returns.alive(former.return_class, idle_seconds))
            chance = self._succession.chance(cell, self._parameters.least_chance)
            hopeless = former.idle_since + self._returns.idle_until_hopeless(former.return_class, chance)
            if hopeless <= now:
                former.fate, former.phase = Fate.PRESUMED, Phase.ENDED
                ended.append(session_id)
            elif hopeless < math.inf:
                heapq.heappush(self._deadlines, (hopeless, session_id, former.epoch, _Due.FOLLOWED))
        return ended

    def _settle(self, session: _Session, *, came_back: bool, weight: float = 1.0) -> None:
        if session.case is not None:
            self._succession.learn(*session.case, came_back=came_back, weight=weight)

    def _join(self, parent: _Session, now: float) -> list[str]:
        joined = [child for child in sorted(parent.children) if self._is_finished(child)]
        for child in joined:
            session = self._sessions[child]
            session.fate, session.phase = Fate.ENDED, Phase.ENDED
        return joined

    def _is_finished(self, session_id: str) -> bool:
        session = self._sessions[session_id]
        return session.num_running == 0 and session.ends_turn and session.fate is Fate.LIVE

    def turn_ended(self, session_id: str, now: float, end: TurnEnd) -> None:
        """A turn of the session is over; while others of it run, it stays running."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        session.num_running -= 1
        assert session.num_running >= 0
        session.pace.turn_ended(from_user=end.from_user)
        session.course.turn_ended(end)
        if session.num_running:
            return
        if session.fate is Fate.ENDED:
            self._drop(session_id)
            return
        session.idle_since = now
        session.epoch += 1
        session.ends_turn = end.ends_turn
        session.phase = Phase.TOOL_PENDING if end.tools else Phase.WAITING
        if session.client is not None:
            self._clients.rests(session.client, session_id)
        session.return_class = self._classify(session, session.pace, session.course, end, now)
        hopeless = self._returns.idle_until_hopeless(session.return_class, self._parameters.least_chance)
        forget = self._parameters.forget_seconds
        if hopeless < forget:
            heapq.heappush(self._deadlines, (now + hopeless, session_id, session.epoch, _Due.HOPELESS))
        heapq.heappush(self._deadlines, (now + forget, session_id, session.epoch, _Due.FORGOTTEN))

    def class_after(self, session_id: str, now: float, end: TurnEnd) -> str:
        """The class of the idle time that follows a turn of it, if that ends so. Changes nothing of the session."""
        session = self._sessions[session_id]
        pace, course = copy(session.pace), copy(session.course)
        pace.turn_ended(from_user=end.from_user)
        course.turn_ended(end)
        return self._classify(session, pace, course, end, now)

    def _classify(self, session: _Session, pace: Pace, course: Course, end: TurnEnd, now: float) -> str:
        name = return_class(is_subagent=session.parent_id is not None, calls_tools=bool(end.tools), ends_turn=end.ends_turn)
        tokens = end.num_prompt_tokens + end.num_output_tokens
        share = tokens / self._context_tokens if self._context_tokens else None
        name = with_tool(pace.refine(name, end.num_output_tokens, share), end.tools)
        level = course.level(share) if session.parent_id is None else None
        return with_level(self._returns.class_for(session.tenant, name, now), level)

    def side_request(self, session_id: str, branch_id: str) -> list[str]:
        """Instead of a turn's start and end: a request (`is_side_request`) that says nothing of when the session is back."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        session.side_branches.add(branch_id)
        return [session_id]

    def output_seen_again(self, session_id: str, echoed: bool) -> list[str]:
        """A prompt did or did not bring back the tokens that were generated before it."""
        session = self._sessions.get(session_id)
        if session is None:
            return []
        was = session.num_silent >= self._parameters.silent_turns
        session.num_silent = 0 if echoed else session.num_silent + 1
        return [session_id] if was != (session.num_silent >= self._parameters.silent_turns) else []

    def end_said(self, session_id: str, now: float) -> list[str]:
        """The client deleted it or said that it is over; its sub-agents are over with it. One that runs is dropped when its turns end,
        unless another turn of it starts before."""
        session = self._sessions.get(session_id)
        if session is None or (session.num_running and session.fate is Fate.ENDED):
            return []
        if session.num_running == 0 and session.fate is Fate.LIVE and not session.counts_as_never:
            self._returns.left(session.return_class, now - session.idle_since, now)
        if session.num_running == 0 and not session.counts_as_never:
            self._settle(session, came_back=False)
        children = sorted(session.children)
        session.fate = Fate.ENDED
        if session.num_running == 0:
            self._drop(session_id)
        return [session_id, *(ended for child in children for ended in self.end_said(child, now))]

    def due(self, now: float) -> list[str]:
        """Time has passed: those that are idle for too long for their class are taken to have ended, and later forgotten."""
        changed = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, session_id, epoch, due = heapq.heappop(self._deadlines)
            session = self._sessions.get(session_id)
            if session is None or session.epoch != epoch or session.num_running:
                continue
            if session.fate is Fate.LIVE:
                session.fate, session.phase = Fate.PRESUMED, Phase.ENDED
                changed.append(session_id)
            # At once, not when it is forgotten: until then only those that came back would be counted, and all would seem to.
            if due is not _Due.FOLLOWED and not session.counts_as_never:
                session.counts_as_never = True
                self._returns.never_came_back(session.return_class, now)
                self._settle(session, came_back=False)
            if due is _Due.FORGOTTEN:
                self._drop(session_id)
        return changed

    def _drop(self, session_id: str) -> None:
        session = self._sessions.pop(session_id)
        if session.client is not None:
            self._clients.leaves(session.client, session_id)
        parent = self._sessions.get(session.parent_id or "")
        if parent is not None:
            parent.children.discard(session_id)
        for child in session.children:
            if child in self._sessions:
                self._sessions[child].parent_id = ""

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        for session_id, session in self._sessions.items():
            assert (session.phase is Phase.RUNNING) == (session.num_running > 0)
            assert all(self._sessions[child].parent_id == session_id for child in session.children)
        for client in {session.client for session in self._sessions.values()} - {None}:
            idle = [self._sessions[session_id] for session_id in self._clients.idle(client or "")]
            assert all(session.num_running == 0 and session.client == client for session in idle)
        waiting = {(session_id, epoch) for _, session_id, epoch, due in self._deadlines if due is _Due.FORGOTTEN}
        for session_id, session in self._sessions.items():
            assert session.num_running or (session_id, session.epoch) in waiting, "who is idle is forgotten some day"
