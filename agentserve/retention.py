"""The life of sessions as turns show it, told to the admission policy, which holds places for them, and to the engine, which evicts them.

Each turn is reported here when it is asked for, when it has its first token and when it is over. What follows (whose blocks are dead, who
is back soon, whose place is free) is decided by `admission.lifecycle` and `admission.returns`, without I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from admission.eviction.policy import Fate
from admission.last_turn import TurnEnd
from admission.lifecycle import Lifecycle
from admission.requests import AdmissionRequest
from admission.reserve import OutputReserve
from admission.side_request import is_side_request
from admission.tickets import Ticket
from agentserve.cache import Estimate
from agentserve.conversation import TurnOptions
from agentserve.engines import GenerateRequest
from agentserve.engines.hints import SessionHint, TurnHints
from agentserve.nodes import Node
from agentserve.places import Place
from agentserve.replicas import Replica, Replicas
from agentserve.sessions import Namespace, Relation, Session, TurnKind
from model.conversation import AssistantItem, SystemItem, UserItem
from prefix_cache.hits import TurnHits

HowEnded: TypeAlias = Literal["said", "joined", "inferred"]

_AWAITED_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of one session now."""

    phase: str
    """`admission.lifecycle.Phase`."""
    return_class: str
    expected_seconds: float | None
    """Mean time until it is back, at most an hour; None while it runs and when it has ended."""
    is_member: bool
    """It has a place: its next turn starts without waiting for room."""
    num_waiting: int
    """Turns of it that wait for a ticket."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A turn that wants to start on `replica`. `is_last`: its client says that no turn of the session follows."""

    replica: Replica
    session: Session
    namespace: Namespace
    place: Place
    relation: Relation
    estimate: Estimate
    request: GenerateRequest
    options: TurnOptions
    is_last: bool = False


class Life:
    """One turn of a session. `committed` and `first_token` may be called or not."""

    def __init__(self, replica: Replica, session: Session, request: AdmissionRequest, *, from_user: bool) -> None:
        self.replica = replica
        """Whose ticket it holds."""
        self.engine = replica
        """Whose engine computes it, and is told of it."""
        self.session_id = session.id
        self.request = request
        self.end = TurnEnd(ends_turn=False, from_user=from_user)
        self.ticket: Ticket | None = None
        self.hits: TurnHits | None = None
        self.is_over = False

    def first_token(self) -> None:
        """The engine has computed the prompt."""
        if self.ticket is not None and not self.is_over:
            self.replica.room.prefilled(self.ticket)

    def committed(self, item: AssistantItem, reason: str, num_output_tokens: int, hits: TurnHits) -> None:
        """What came of it; of several answers to one prompt the last counts."""
        self.hits = hits
        self.end = replace(
            self.end,
            ends_turn=reason == "stop",
            tools=tuple(call.name for call in item.calls) if reason == "tool_calls" else (),
            num_prompt_tokens=hits.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )


class Retention:
    """One per server. `ended` hears of each session that has ended, and how that is known."""

    def __init__(self, replicas: Replicas, lifecycle: Lifecycle, clock: Callable[[], float], ended: Callable[[HowEnded], None]) -> None:
        self._replicas = replicas
        self.lifecycle = lifecycle
        self._clock = clock
        self._ended = ended
        self._reserve = OutputReserve()
        self._alarm: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def admitted(self, ask: Ask) -> AsyncIterator[Life]:
        """Step 4 of a turn: a ticket for the length of the `with` block, after a wait if there is no room."""
        session, place = ask.session, ask.place
        is_aside = _is_aside(session, place, ask.options)
        admission = self._admission(ask, is_aside=is_aside)
        life = Life(ask.replica, session, admission, from_user=_from_user(place.node))
        if is_aside:
            self.lifecycle.side_request(admission.session_id, _branch_id(session, place) or "")
        else:
            self._asked(ask, admission.session_id)
        try:
            async with ask.replica.room.ticket(admission, lambda: self._waits(ask)) as ticket:
                life.ticket = ticket
                try:
                    yield life
                finally:  # before the ticket goes back: whether its place is kept depends on it
                    self._over(life)
        finally:
            self._over(life)  # where there was no ticket
            if ask.is_last and life.hits is not None:
                self.end_said(ask.namespace, session.id)

    def turn_hints(self, replica: Replica, session: Session, place: Place, options: TurnOptions) -> Mapping[str, str]:
        """What the turn's request carries for the engine's plugin."""
        fate = Fate.ONE_SHOT if _is_aside(session, place, options) else Fate.LIVE
        return replica.hints.xargs(TurnHints(branch_id=_branch_id(session, place), fate=fate))

    def end_said(self, namespace: Namespace, session_id: str) -> None:
        """The client has deleted the session, or said that its last turn was the last."""
        self._changed(self.lifecycle.end_said(_life_id(namespace, session_id), self._clock()), "said")

    def standing(self, namespace: Namespace, session: Session) -> Standing:
        """What is known of a session now."""
        life_id, now = _life_id(namespace, session.id), self._clock()
        expected = self.lifecycle.seconds_to_return(life_id, now, 3600.0)
        is_idle = not session.running and not self.lifecycle.is_over(life_id)
        return Standing(
            self.lifecycle.phase(life_id).value,
            self.lifecycle.return_class(life_id),
            expected if is_idle else None,
            any(replica.room.is_member(life_id) for replica in self._replicas),
            sum(replica.room.num_waiting_of(life_id) for replica in self._replicas),
        )

    def _admission(self, ask: Ask, *, is_aside: bool) -> AdmissionRequest:
        resident = ask.estimate.predicted or 0
        reserve = self._reserve.tokens(ask.request.max_tokens) * ask.options.num_choices
        return AdmissionRequest(
            ask.request.request_id,
            _life_id(ask.namespace, ask.session.id),
            ask.estimate.num_prompt_tokens - resident + reserve,
            resident,
            shared_tokens=min(resident, _shared_tokens(ask.place.node, ask.session.id)),
            reserve_tokens=reserve,
            tenant=ask.namespace.name or None,
            is_aside=is_aside,
        )

    def _asked(self, ask: Ask, life_id: str) -> None:
        session, namespace, relation = ask.session, ask.namespace, ask.relation
        is_new, is_known = life_id not in self.lifecycle, not self.lifecycle.is_over(life_id)
        changed = self.lifecycle.turn_started(
            life_id,
            self._clock(),
            branch_id=_branch_id(session, ask.place) or "",
            shared_tokens=relation.shared_tokens if relation.kind in (TurnKind.EDITED, TurnKind.RETRY) else None,
            parent_id=None if session.parent is None else _life_id(namespace, session.parent),
            tenant=namespace.name or None,
        )
        if relation.kind is TurnKind.EXACT and is_known:
            changed += self.lifecycle.output_seen_again(life_id, echoed=True)
        self._changed(changed, "inferred" if is_new else "joined")

    def _waits(self, ask: Ask) -> None:
        """Its blocks are about to be used: they go last for a while."""
        ask.replica.hints.tell(SessionHint(session_id=ask.session.id, awaited_seconds=_AWAITED_SECONDS))

    def _over(self, life: Life) -> None:
        if life.is_over:
            return
        life.is_over = True
        if not life.request.is_aside:
            life_id = life.request.session_id
            self.lifecycle.turn_ended(life_id, self._clock(), life.end)
            life.engine.hints.tell(SessionHint(session_id=life.session_id, return_class=self.lifecycle.return_class(life_id)))
        if life.hits is not None:
            self._reserve.seen(life.end.num_output_tokens)
        if life.ticket is not None and life.hits is not None and life.hits.actual is not None:
            avoidable = max(0, (life.hits.ceiling_blocks or 0) - life.hits.actual)
            life.replica.room.answered(life.ticket, life.hits.num_prompt_tokens, avoidable)
        self._set_alarm()

    def _changed(self, life_ids: Sequence[str], how: HowEnded) -> None:
        """The fates of these sessions are not what they were."""
        for life_id in life_ids:
            is_over = self.lifecycle.is_over(life_id)
            hint = SessionHint(session_id=_engine_id(life_id), fate=self.lifecycle.fate(life_id) if is_over else Fate.LIVE)
            for replica in self._replicas:  # it may have blocks wherever it has been
                replica.hints.tell(hint)
                if is_over:
                    replica.room.session_ended(life_id)
            if is_over:
                self._ended(how)
        self._set_alarm()

    def _set_alarm(self) -> None:
        due = self.lifecycle.due_seconds
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if due is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._changed(self.lifecycle.due(self._clock()), "inferred")


def _life_id(namespace: Namespace, session_id: str) -> str:
    """The session's name where keys meet: two of them may have sessions of the same id."""
    return f"{namespace.name[:16]}\n{session_id}" if namespace.name else session_id


def _engine_id(life_id: str) -> str:
    """The session's name at the engine."""
    return life_id.rpartition("\n")[2]


def _branch_id(session: Session, place: Place) -> str | None:
    """Which of the session's conversations this is: those of one head are taken for one, as long as they do not run at the same time."""
    return None if session.running > 1 else f"{id(place.node.head):x}"


def _is_aside(session: Session, place: Place, options: TurnOptions) -> bool:
    return is_side_request(
        num_messages=place.node.depth,
        num_tools=len(place.node.head.tools),
        max_output_tokens=options.max_tokens,
        session_has_tools=any(tip.head.tools for tip in session.tips),
        is_named=session.named,
    )


def _from_user(node: Node) -> bool:
    """Whether the newest message is a person's; notes of the server's own stand behind it."""
    while isinstance(node.shape, SystemItem) and node.parent is not None:
        node = node.parent
    return isinstance(node.shape, UserItem)


def _shared_tokens(node: Node, session_id: str) -> int:
    """Tokens of the prompt's front that belong to other sessions too: each is charged to who had it first, a shared head to nobody."""
    step: Node | None = node
    while step is not None:
        is_head = step.parent is None
        if (is_head and len(step.children) > 1) or (not is_head and step.owner is not None and step.owner != session_id):
            return step.end
        step = step.parent
    return 0
