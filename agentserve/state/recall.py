"""One turn's question to the state store: what has this session said on other servers?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from agentserve.conversation import Conversation
from agentserve.identity import Identity
from agentserve.nodes import Node
from agentserve.sessions import Namespace
from agentserve.state.stored import StoredSessions
from model.conversation import AssistantItem, Item

MAX_DIGESTS = 64
"""Messages that other servers may have added to a history before it is not found any more without its session's id."""


class Recall:
    """Asked once at most, and only where a history holds an answer that this session has not given here."""

    def __init__(self, stored: StoredSessions, namespace: Namespace, identity: Identity) -> None:
        self._stored = stored
        self._namespace = namespace
        self._identity = identity
        self._asked = False

    @property
    def session_id(self) -> str | None:
        """The session, if the client names it."""
        return self._identity.session

    def is_needed(self, node: Node | None, steps: Sequence[tuple[int | None, Sequence[Item]]]) -> bool:
        """Whether an answer is missing here: among `steps`, which are not known behind `node`, or, by this session, before it."""
        if any(isinstance(step[0], AssistantItem) for _, step in steps):
            return True
        if node is None or self.session_id is None:
            return False
        session = self._namespace.sessions.get(self.session_id)
        if session is not None:
            return node not in session.tips and not session.has_all_answers(node)
        return any(isinstance(step.shape, AssistantItem) for step in node.path())

    async def ask(self, conversation: Conversation, key: bytes) -> Node | None:
        """Bring what is stored into the ledger; the head of the session's latest branch, None if nothing is known of it.

        Without a session's id the history leads to it, with its head as the client sent it or with the `key` of that.
        """
        if self._asked:
            return None
        self._asked = True
        digests: list[bytes] = []
        if self.session_id is None:
            tail = conversation.whole().tail()
            digests += islice(reversed(conversation.chain), MAX_DIGESTS)
            digests += (key + digest for digest in islice(reversed(tail), MAX_DIGESTS))
        return await self._stored.load(self._namespace, self._identity, digests)
