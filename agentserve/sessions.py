"""Sessions: who works on which branches, and what each has cost. One `Namespace` per API key; nothing crosses it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from agentserve.identity import Identity
from agentserve.ledger import Ledger
from agentserve.nodes import Node, common_ancestor
from agentserve.prompt import FlatPrompt
from model.conversation import AssistantItem
from prefix_cache.hits import HitTotals

MAX_TIPS = 64
"""Branches of one session that are remembered; the least recently used is given up first."""


class TurnKind(StrEnum):
    """How a turn's prompt relates to what its session had before."""

    FIRST = "first"
    """The session has no turn yet."""
    EXACT = "exact"
    """It starts with an earlier prompt and everything generated for it."""
    EDITED = "edited"
    """The client changed its history: the prompt leaves it at an earlier item."""
    RETRY = "retry"
    """The client took back its last turns and asks again."""
    INEXACT = "inexact"
    """It goes on from a history with an answer that this server has no ids of; those are encoded from text."""
    PASSED = "passed"
    """It holds media and went to the engine's own chat route: nothing is known of its tokens but what the engine says."""


@dataclass(frozen=True, slots=True)
class Relation:
    """A turn's kind, and where its history ends: `history_tokens` were computed of it, of which the prompt keeps `shared_tokens`."""

    kind: TurnKind
    history_tokens: int = 0
    shared_tokens: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class Session:
    """One agent's work. `tips` are the ends of its branches, the latest last; each is held in the ledger. Times in seconds."""

    id: str
    parent: str | None
    prompt: FlatPrompt
    created: float
    used: float
    tips: OrderedDict[Node, None] = field(default_factory=OrderedDict)
    named: bool = True
    """Every turn has named it; else some are found by their history."""
    running: int = 0
    num_turns: int = 0
    num_by_kind: dict[TurnKind, int] = field(default_factory=dict)
    totals: HitTotals = field(default_factory=HitTotals)
    replica: int | None = None
    """The engine that it was last on, counted from 0."""
    answers: OrderedDict[str, Node] = field(default_factory=OrderedDict)
    """The ends of its latest turns by the answer's id, for a client that asks what has changed since."""

    appended: tuple[bytes, Node] | None = None
    """The key of the latest request that held only what is new, and the answer that it followed."""

    def name_answer(self, answer_id: str, node: Node) -> None:
        """Let `answer_id` lead to `node`, the end of its turn."""
        self.answers[answer_id] = node
        if len(self.answers) > MAX_TIPS:
            self.answers.popitem(last=False)

    @property
    def tip(self) -> Node | None:
        """The end of the latest branch."""
        return next(reversed(self.tips), None)

    def count_turn(self, kind: TurnKind) -> None:
        """Note a turn that has ended."""
        self.num_turns += 1
        self.num_by_kind[kind] = self.num_by_kind.get(kind, 0) + 1

    def leads_to(self, node: Node) -> bool:
        """Whether `node` lies before or behind the end of one of its branches (or there is none yet), and not beside all of them."""
        return not self.tips or any(common_ancestor(tip, node) in (tip, node) for tip in reversed(self.tips))

    def relation(self, node: Node, *, more: bool, foreign: bool) -> Relation:
        """How a prompt that matched up to `node` relates to this session.

        `more`: new items follow `node`; `foreign`: an assistant item is among them.
        """
        best, shared = self.nearest_tip(node)
        if best is None:
            return Relation(TurnKind.INEXACT if foreign else TurnKind.FIRST)
        history = best.end - 1  # the last sampled token has no KV yet
        if shared is best:
            return Relation(TurnKind.INEXACT if foreign else TurnKind.EXACT, history, history)
        kept = min(shared.end if shared is not None else 0, history)
        retry = shared is node and not more
        return Relation(TurnKind.RETRY if retry else TurnKind.EDITED, history, kept)

    def has_all_answers(self, node: Node) -> bool:
        """Whether every answer up to `node` stands in one of its branches."""
        step: Node | None = node
        shared = self.nearest_tip(node)[1]
        while step is not shared and step is not None:
            if isinstance(step.shape, AssistantItem):
                return False
            step = step.parent
        return True

    def nearest_tip(self, node: Node) -> tuple[Node | None, Node | None]:
        """The end of the branch that shares most with `node`, and where the two part; None, None without a branch."""
        best: Node | None = None
        best_shared: Node | None = None
        for tip in reversed(self.tips):
            shared = common_ancestor(tip, node)
            if best is None or (shared.depth if shared else -1) > (best_shared.depth if best_shared else -1):
                best, best_shared = tip, shared
            if shared is tip:
                break
        return best, best_shared


class Namespace:
    """The sessions and the ledger of one API key, whose digest is `name`. `salt` goes to the engine as cache_salt; None shares prefixes."""

    def __init__(self, salt: str | None, block_size: int, name: str = "") -> None:
        self.name = name
        self.salt = salt
        self.ledger = Ledger()
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self.totals = HitTotals()
        self._block_size = block_size

    def resolve(self, identity: Identity, node: Node | None, now: float, new_id: Callable[[], str]) -> Session:
        """The session that a request belongs to: by its id, else the last one that went through `node`, else a new one."""
        wanted = identity.session or self._owner(node) or new_id()
        session = self.sessions.get(wanted)
        if session is None:
            session = Session(wanted, identity.parent, self._new_prompt(), now, now)
            self.sessions[wanted] = session
        session.used = now
        session.named = session.named and identity.session is not None
        self.sessions.move_to_end(wanted)
        return session

    def own(self, node: Node, session: Session) -> None:
        """Let a later request that comes as far as `node`, or to what has just been appended before it, find `session` without an id."""
        step: Node | None = node
        while step is not None and step.parent is not None and step.owner is None:
            step.owner = session.id
            step = step.parent

    def answered(self, answer_id: str, first: Session) -> Node | None:
        """The end of the turn whose answer has this id, looked for in `first` before the other sessions; None if it is not known."""
        sessions = (first, *self.sessions.values())
        return next((session.answers[answer_id] for session in sessions if answer_id in session.answers), None)

    def advance(self, session: Session, node: Node) -> bool:
        """Make `node` the session's latest tip; a tip that it continues is replaced. False if the session has been ended meanwhile."""
        before = node.parent
        while before is not None and before not in session.tips:
            before = before.parent
        if before is not None:
            del session.tips[before]
        self.ledger.hold(node)
        if self.sessions.get(session.id) is not session:  # ended while this turn ran
            self.ledger.release(node)
            return False
        session.tips[node] = None
        node.owner = session.id
        if before is not None:
            self.ledger.release(before)
        if len(session.tips) > MAX_TIPS:
            self.ledger.release(session.tips.popitem(last=False)[0])
        return True

    def forget(self, session: Session) -> None:
        """Drop a session and what only it held."""
        self.sessions.pop(session.id, None)
        session.prompt = self._new_prompt()
        session.answers.clear()
        while session.tips:
            self.ledger.release(session.tips.popitem()[0])

    def _new_prompt(self) -> FlatPrompt:
        return FlatPrompt(self._block_size, self.salt.encode() if self.salt else b"")

    def _owner(self, node: Node | None) -> str | None:
        # Without an answer in it, a history may be anybody's: many agents begin with the same words.
        while node is not None and node.num_answers:
            if node.owner is not None and node.owner in self.sessions:
                return node.owner
            node = node.parent
        return None


class Namespaces:
    """All namespaces of a server, and the limits over them. `share`: keys may share cached prefixes at the engine."""

    def __init__(self, *, block_size: int, max_tokens: int, idle_seconds: float, share: bool) -> None:
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._idle_seconds = idle_seconds
        self._share = share
        self._by_name: dict[str, Namespace] = {}

    def of(self, api_key: str | None) -> Namespace:
        """The namespace of a key; None where no keys are configured."""
        name = hashlib.sha256(api_key.encode()).hexdigest() if api_key is not None else ""
        namespace = self._by_name.get(name)
        if namespace is None:
            salt = name if api_key is not None and not self._share else None
            namespace = self._by_name[name] = Namespace(salt, self._block_size, name)
        return namespace

    def __iter__(self) -> Iterator[Namespace]:
        return iter(self._by_name.values())

    def sessions(self) -> Iterator[Session]:
        """Every session that is known."""
        for namespace in self:
            yield from namespace.sessions.values()

    @property
    def num_sessions(self) -> int:
        return sum(len(namespace.sessions) for namespace in self)

    @property
    def num_tokens(self) -> int:
        return sum(namespace.ledger.num_tokens for namespace in self)

    def trim(self, now: float) -> int:
        """Forget sessions idle for too long, then the longest idle ones while over the token limit. Returns how many."""
        count = 0
        for namespace in self:
            for session in list(namespace.sessions.values()):
                if now - session.used <= self._idle_seconds:
                    break
                count += self._forget(namespace, session)
        while self.num_tokens > self._max_tokens:
            oldest = min(filter(None, map(_longest_idle, self)), default=None, key=lambda row: row[1].used)
            if oldest is None:
                break
            oldest[0].forget(oldest[1])
            count += 1
        return count

    def _forget(self, namespace: Namespace, session: Session) -> bool:
        if session.running:
            return False
        namespace.forget(session)
        return True


def _longest_idle(namespace: Namespace) -> tuple[Namespace, Session] | None:
    for session in namespace.sessions.values():  # in order of use
        if not session.running:
            return namespace, session
    return None
