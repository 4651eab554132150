"""Keeps each session's branches in Redis as turns commit, and brings back what another server has added to one.

A list in the store is never trusted beyond its session: its mark must be the one that was asked for, and what it holds is matched by
meaning like everything else. What is stale, damaged or gone costs a turn that is encoded from text, never an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes
from weakref import WeakKeyDictionary

import structlog
import xxhash

from agentserve.identity import Identity
from agentserve.nodes import Node
from agentserve.prompt import FlatPrompt
from agentserve.sessions import Namespace, Session
from agentserve.state.branches import Encoded, Written, branches, encode, graft, leads, unwritten
from agentserve.state.breaker import Failure
from agentserve.state.codec import SCHEMA, Damaged, Mark, StoredNode, decode, decode_mark, encode_mark
from agentserve.state.commands import Append, Part, first_lead, read, remove
from agentserve.state.link import RedisLink
from agentserve.state.writer import Writer, removal_of

SAVE_TIMEOUTS = 4
"""A save may take so many times what a turn waits for the store: a whole session may be a megabyte."""
LONG_TOKENS = 16_384
"""From here on records are packed and unpacked off the event loop (some 50 µs per 1,000 tokens)."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Told of `computed` ids that an engine has computed, whether a load found something new, each save, and each failure."""

    computed: Callable[[FlatPrompt, int], None]
    loaded: Callable[[bool], None]
    saved: Callable[[], None]
    failed: Callable[[Failure], None]


class StoredSessions:
    """One per server, over its own `link`. `deployment` tells apart what must not be mixed: models, tokenizers, chat formats."""

    def __init__(
        self,
        link: RedisLink,
        deployment: bytes,
        tell: Listeners,
        clock: Callable[[], float],
        *,
        ttl_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.link = link
        self.writer = Writer(link)
        self.deployment = deployment
        self._tell = tell
        self._clock = clock
        self._ttl_milliseconds = max(1, int(ttl_seconds * 1000))
        self._timeout_seconds = timeout_seconds
        self._save_seconds = SAVE_TIMEOUTS * timeout_seconds
        self._written: WeakKeyDictionary[Session, Written] = WeakKeyDictionary()

    async def start(self) -> None:
        """Never fails: a store that is down is logged, and used when it comes up."""
        await self.link.start()
        self.writer.start()

    async def close(self) -> None:
        """Write what waits, if that goes quickly, and close all connections."""
        try:
            await self.writer.close()
        finally:
            await self.link.close()

    def keep(self, namespace: Namespace, session: Session) -> asyncio.Future[bool]:
        """Write what is new of `session` in the background. See `settled`."""
        return self.writer.add(self._key(namespace, session.id), partial(self._save, namespace, session))

    async def settled(self, kept: asyncio.Future[bool]) -> None:
        """Wait until a `keep` is written, so that a client's next turn may go to any server: not long, and not while the store is down."""
        if not self.link.is_open:
            await asyncio.wait((kept,), timeout=self._timeout_seconds)

    async def delete(self, namespace: Namespace, session_id: str) -> bool:
        """Remove what is stored of a session; whether there was anything. If the store is down, that is done when it is back."""
        key = self._key(namespace, session_id)
        self.writer.drop(key)
        removed = self._remove(key)
        await self.settled(removed)
        return removed.done() and removed.result()

    async def load(self, namespace: Namespace, identity: Identity, digests: Sequence[bytes]) -> Node | None:
        """Add what is stored of a session to the ledger: the one that is named, else the one that the first known digest leads to.

        Returns the head of its latest branch; None if nothing is known of it.
        """
        if self.link.is_open:
            return None
        deadline = self._clock() + self._timeout_seconds
        session_id = identity.session
        if session_id is None:
            keys = [self._lead(namespace, digest) for digest in digests]
            session_id = await self.link.run(partial(first_lead, keys=keys), self._timeout_seconds) if keys else None
        if session_id is None:
            self._tell.loaded(False)
            return None
        self._tell.loaded(await self._load(namespace, session_id, deadline))
        session = namespace.sessions.get(session_id)
        return session.tip.path()[0] if session is not None and session.tip is not None else None

    async def _load(self, namespace: Namespace, session_id: str, deadline: float) -> bool:
        """Read what was not read before; all of it where that does not fit to what is here."""
        session = namespace.sessions.get(session_id)
        written = self._written.get(session, Written()) if session is not None else Written()
        first, start = written.first, written.num_read
        key = self._key(namespace, session_id)
        if self.writer.has(removal_of(key)):
            return False
        part = await self.link.run(partial(read, key=key, first=first, start=start), deadline - self._clock())
        if part is None or not part.records:
            return False
        try:
            mark, stored = await self._decode(part, namespace, session_id)
        except Damaged as error:
            self._tell.failed(Failure.DAMAGED)
            _log.error("stored session is removed", reason=str(error))
            self._remove(key)
            return False
        session = namespace.resolve(Identity(session_id, mark.parent), None, self._clock(), lambda: session_id)
        session.named = session.named and mark.named
        written = self._written.setdefault(session, Written())
        grafted = graft(namespace, session, stored, written.keys)
        if grafted.all or not part.start:
            written.first = part.first
            written.num_read = max(written.num_read if part.start else 0, part.start + len(part.records))
        else:
            self._written[session] = Written(keys=written.keys)
            return await self._load(namespace, session_id, deadline) or grafted.any
        if grafted.any and session.tip is not None:
            session.prompt.move_to(session.tip)
            self._tell.computed(session.prompt, session.tip.end - 1)
        return grafted.any

    def _remove(self, key: bytes) -> asyncio.Future[bool]:
        """Behind a save that may be on its way, and not in place of one that follows."""
        return self.writer.add(removal_of(key), lambda: self.link.run(partial(remove, key=key), self._save_seconds))

    async def _decode(self, part: Part, namespace: Namespace, session_id: str) -> tuple[Mark, list[StoredNode]]:
        mark = decode_mark(part.first)
        asked = Mark(self.deployment, namespace.name, session_id, None, True, b"")
        if not mark.is_same_session(asked):
            raise Damaged(f"asked for session {session_id!r}, got {mark.session!r}")
        if sum(map(len, part.records)) > LONG_TOKENS:  # about a byte a token
            return mark, await asyncio.to_thread(decode, part.records, asked)
        return mark, decode(part.records, asked)

    async def _save(self, namespace: Namespace, session: Session) -> bool | None:
        """One round trip; two where the store has lost the session, or another server has begun it anew."""
        written = self._written.setdefault(session, Written())
        new = unwritten(session, written.keys)
        if namespace.sessions.get(session.id) is not session or not new:
            return True
        must_cut = written.is_mostly_dead(session)
        if written.first and not must_cut:
            encoded = await self._encode(new, written)
            before = written.num_read
            stands = await self.link.run(self._append(namespace, session, encoded.records).extend, self._save_seconds)
            if stands is None:
                return None
            if stands.first == written.first:
                written.keys.update(encoded.keys)
                written.length = stands.length
                if stands.length == before + len(new):  # nobody else has written meanwhile
                    written.num_read = max(written.num_read, stands.length)
                self._tell.saved()
                return True
        return await self._save_whole(namespace, session, replace=must_cut)

    async def _save_whole(self, namespace: Namespace, session: Session, *, replace: bool) -> bool | None:
        encoded = await self._encode(list(branches(session)), Written())
        mark = Mark(self.deployment, namespace.name, session.id, session.parent, session.named, token_bytes(8))
        whole = self._append(namespace, session, [encode_mark(mark), *encoded.records])
        stands = await self.link.run(whole.replace if replace else whole.begin, self._save_seconds)
        if stands is None:
            return None
        is_all = stands.length == len(whole.records)
        self._written[session] = Written(stands.first, stands.length, stands.length if is_all else 0, encoded.keys)
        self._tell.saved()
        return True

    async def _encode(self, nodes: Sequence[Node], written: Written) -> Encoded:
        if sum(len(node.ids) for node in nodes) > LONG_TOKENS:
            return await asyncio.to_thread(encode, nodes, written.keys)
        return encode(nodes, written.keys)

    def _append(self, namespace: Namespace, session: Session, records: Sequence[bytes]) -> Append:
        digests = leads(session.tip) if session.tip is not None and not session.named else ()
        keys = [self._lead(namespace, digest) for digest in digests]
        return Append(self._key(namespace, session.id), records, self._ttl_milliseconds, session.id.encode(), keys)

    def _key(self, namespace: Namespace, session_id: str) -> bytes:
        return b"agentserve:%d:%s:%s:session:%s" % (SCHEMA, self.deployment.hex().encode(), namespace.name.encode(), session_id.encode())

    def _lead(self, namespace: Namespace, digest: bytes) -> bytes:
        short = xxhash.xxh3_128_hexdigest(digest)
        return b"agentserve:%d:%s:%s:history:%s" % (SCHEMA, self.deployment.hex().encode(), namespace.name.encode(), short.encode())
