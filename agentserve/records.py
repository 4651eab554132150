"""What is remembered of each turn: figures and kinds, never text. A ring per session, and a bound over all sessions."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from agentserve.divergence import Divergence
from agentserve.heads import HeadBreak
from agentserve.sessions import Session, TurnKind
from prefix_cache.hits import TurnHits

MAX_SESSION_RECORDS = 1024
"""Turns of one session that are remembered."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn. Times in seconds, `ended_at` since 1970; None is unknown."""

    number: int
    """Of the session's turns, from 1."""
    kind: TurnKind
    ended_at: float
    queue_seconds: float
    first_token_seconds: float | None
    """From the ticket to the first generated token."""
    seconds: float
    """From the request to the end."""
    finish_reason: str
    num_encoded_tokens: int
    num_generated_tokens: int
    hits: TurnHits
    divergence: Divergence | None
    head_break: HeadBreak | None = None


class TurnLog:
    """Remembers the latest `max_records` turns of all sessions; what a forgotten session leaves goes with it."""

    def __init__(self, max_records: int, max_session_records: int = MAX_SESSION_RECORDS) -> None:
        self._max_records = max_records
        self._max_session_records = max_session_records
        self._num_added = 0
        self._rings: WeakKeyDictionary[Session, deque[tuple[int, TurnRecord]]] = WeakKeyDictionary()
        # In the order of turns; those of forgotten sessions count until they would have been the oldest.
        self._owners: OrderedDict[int, ref[Session]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, session: Session, record: TurnRecord) -> None:
        """Remember a turn that has ended."""
        ring = self._rings.setdefault(session, deque())
        ring.append((self._num_added, record))
        self._owners[self._num_added] = ref(session)
        self._num_added += 1
        if len(ring) > self._max_session_records:
            del self._owners[ring.popleft()[0]]
        while len(self._owners) > self._max_records:
            _, owner = self._owners.popitem(last=False)
            oldest = owner()
            if oldest is not None:
                self._rings[oldest].popleft()

    def of(self, session: Session) -> list[TurnRecord]:
        """The turns of a session that are remembered, the newest last."""
        return [record for _, record in self._rings.get(session, ())]
