"""Keeps stored Responses in Redis, so that any server goes on from them. The store in memory is looked at first.

What is here is asked for in Redis only to hear whether another server has deleted it. What is not here comes back with all that it builds
on: a question for itself, and one for those of its predecessors that are not here either, however many they are. A chain with a gap is no
answer: the turn is refused as for an id that nobody knows, never run without its context.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

import structlog

from agentserve.dialects.responses_store import ResponseStore, StoredResponse
from agentserve.sessions import Namespace
from agentserve.state.breaker import Failure
from agentserve.state.responses_codec import Left, ResponseRecord, is_response_id
from agentserve.state.responses_commands import WHOLE, Entry, Found, delete, drop, headers, keep, look, read_body, records, write
from agentserve.state.responses_packing import Packing, Unreadable
from agentserve.state.stored import SAVE_TIMEOUTS, StoredSessions
from agentserve.state.writer import removal_of

PROLONG_SHARE = 8
"""What a chain is built of lives on with it: it is prolonged when this part of its time has gone, and lives so much longer."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Told of each question for a response that is not here, whether it was found; of each save, and each record that is damaged."""

    loaded: Callable[[bool], None]
    saved: Callable[[], None]
    failed: Callable[[Failure], None]


class StoredResponses:
    """One per server: what its `memory` has, and behind it the store, over the line and the writer of its `sessions`."""

    def __init__(
        self,
        memory: ResponseStore,
        sessions: StoredSessions,
        tell: Listeners,
        clock: Callable[[], float],
        *,
        ttl_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._memory = memory
        self._link = sessions.link
        self._writer = sessions.writer
        self._packing = Packing(sessions.deployment)
        self._tell = tell
        self._clock = clock
        self._prolong_seconds = ttl_seconds / PROLONG_SHARE
        self._ttl_milliseconds = max(1, int((ttl_seconds + self._prolong_seconds) * 1000))
        self._timeout_seconds = timeout_seconds
        self._save_seconds = SAVE_TIMEOUTS * timeout_seconds
        self._prolonged: WeakKeyDictionary[StoredResponse, float] = WeakKeyDictionary()
        self._too_large: WeakSet[StoredResponse] = WeakSet()

    def keep(self, namespace: Namespace, response_id: str) -> asyncio.Future[bool]:
        """Write a response that has just come into memory, in the background. If it leaves that before, it is not written."""
        return self._writer.add(self._packing.key(namespace, response_id).record, partial(self._save, namespace, response_id))

    async def settled(self, kept: asyncio.Future[bool]) -> None:
        """Wait until a `keep` is written, not while the store is down; what the turn's session has waited for the same change counts."""
        if not self._link.is_open:
            await asyncio.wait((kept,), timeout=max(0.0, self._timeout_seconds - self._writer.running_seconds))

    async def load(self, namespace: Namespace, response_ids: Iterable[str]) -> None:
        """Bring into memory what is stored of these responses, and forget there what another server has deleted. Never fails."""
        asked = [one for one in dict.fromkeys(response_ids) if is_response_id(one)]
        if not asked or self._link.is_open:
            return
        deadline = self._clock() + self._timeout_seconds
        known = {one: None for one in asked if self._memory.find(namespace, one) is not None}
        others = [one for one in asked if one not in known and not self._is_removed(namespace, one)]
        question = partial(look, known=self._packing.records(namespace, known), others=self._packing.keys(namespace, others))
        found = await self._link.run(question, self._timeout_seconds) if known or others else Found((), (), ())
        if found is None:
            return
        for response_id, header in zip(known, found.headers, strict=True):
            self._forget_deleted(namespace, response_id, header)
        for response_id, record, body in zip(others, found.records, found.bodies, strict=True):
            try:
                is_whole = record is not None and body is not None and await self._take(namespace, response_id, record, body, deadline)
            except Unreadable as error:
                self._damaged(error)
                is_whole = False
            self._tell.loaded(is_whole)

    async def body(self, namespace: Namespace, response_id: str) -> bytes | None:
        """A response as it was answered; None if it is not known, or deleted."""
        keys = self._packing.key(namespace, response_id)
        if is_response_id(response_id) and not self._is_removed(namespace, response_id):
            found = await self._link.run(partial(read_body, keys=keys), self._timeout_seconds)
            header, data = found or (b"", None)
            self._forget_deleted(namespace, response_id, header)
            here = self._memory.find(namespace, response_id)
            if (here is None or here.body is None) and header[1:] == Left.ALL.value and data is not None:
                try:
                    return (await self._packing.unpack_body(namespace, response_id, data)).body
                except Unreadable as error:
                    self._damaged(error)
        here = self._memory.find(namespace, response_id)
        return here.body if here is not None else None

    async def delete(self, namespace: Namespace, response_id: str) -> bool:
        """Delete a response, here and in the store; whether there was one. If the store is down, that is done when it is back."""
        known = self._memory.forget(namespace, response_id)
        if not is_response_id(response_id):
            return known
        keys = self._packing.key(namespace, response_id)
        was_there: list[bool] = []

        async def remove() -> bool | None:
            change = partial(delete, keys=keys, ttl_milliseconds=self._ttl_milliseconds, known=known)
            removed = await self._link.run(change, self._save_seconds)
            if removed is not None:
                was_there.append(removed)
            return removed

        self._writer.drop(keys.record)
        await self.settled(self._writer.add(removal_of(keys.record), remove))
        return was_there[0] if was_there else known

    async def _take(self, namespace: Namespace, response_id: str, record: bytes, body: bytes, deadline: float) -> bool:
        """Make a response out of its record, its body, and its predecessors; False if one of them is nowhere. Raises Unreadable."""
        own = await self._packing.unpack(namespace, (response_id,), (record,))
        if own is None or own[0].left is not Left.ALL:
            return False
        named = await self._packing.unpack_body(namespace, response_id, body)
        last, missing = self._last_here(namespace, named.before)
        before = await self._read(namespace, missing, deadline)
        if before is None:
            return False
        self._graft(namespace, last, [*before, *own], named.body)
        return True

    def _last_here(self, namespace: Namespace, before: Sequence[str]) -> tuple[StoredResponse | None, Sequence[str]]:
        """The last of them that memory has, with all that it builds on, and those behind it."""
        for at in range(len(before), 0, -1):
            if (found := self._memory.find(namespace, before[at - 1])) is not None:
                return found, before[at:]
        return None, before

    async def _read(self, namespace: Namespace, response_ids: Sequence[str], deadline: float) -> list[ResponseRecord] | None:
        """The records of these; None if one is missing. Raises Unreadable."""
        if not response_ids:
            return []
        found = await self._link.run(partial(records, keys=self._packing.records(namespace, response_ids)), deadline - self._clock())
        return await self._packing.unpack(namespace, response_ids, found) if found is not None else None

    def _graft(self, namespace: Namespace, previous: StoredResponse | None, chain: Sequence[ResponseRecord], body: bytes | None) -> None:
        """Add responses to memory, each of which builds on the one before it, the last one with its body.

        What has come there meanwhile stays as it is.
        """
        for record in chain:
            response = self._memory.find(namespace, record.id)
            if response is None:
                response = StoredResponse(record.id, record.session, body if record is chain[-1] else None, record.items, previous)
                if previous is not None and previous in self._prolonged:
                    self._prolonged[response] = self._prolonged[previous]
                if record.left is Left.ALL:
                    self._memory.add(namespace, response)
                else:
                    response.deleted = True
            previous = response

    async def _save(self, namespace: Namespace, response_id: str) -> bool | None:
        """One round trip; more where the store has lost what the response builds on."""
        response = self._memory.find(namespace, response_id)
        if response is None:
            return True
        before = response.predecessors()
        entry = await self._entry(namespace, response, before, Left.ALL, followed=response.num_followers > 0)
        if entry is None:
            return True
        since = self._prolonged.get(before[-1]) if before else self._clock()
        prolong = since is None or self._clock() - since > self._prolong_seconds
        keys = self._packing.keys(namespace, [one.id for one in before])
        save = partial(keep, entry=entry, before=keys, ttl_milliseconds=self._ttl_milliseconds, prolong=prolong)
        is_whole = await self._link.run(save, self._save_seconds)
        if is_whole is None or (not is_whole and not await self._complete(namespace, before)):
            return None
        self._prolonged[response] = self._clock() if prolong or since is None else since
        self._tell.saved()
        return True

    async def _complete(self, namespace: Namespace, before: Sequence[StoredResponse]) -> bool | None:
        """Write what the store has lost of a chain."""
        found = await self._link.run(
            partial(headers, records=self._packing.records(namespace, [one.id for one in before])), self._save_seconds
        )
        if found is None:
            return None
        entries = []
        for at, (one, header) in enumerate(zip(before, found, strict=True)):
            if header[1:] not in WHOLE:
                left = Left.ITEMS if one.deleted or header[1:] == Left.NOTHING.value else Left.ALL
                entry = await self._entry(namespace, one, before[:at], left, followed=True)
                entries += [entry] if entry is not None else []
        return await self._link.run(partial(write, entries=entries, ttl_milliseconds=self._ttl_milliseconds), self._save_seconds)

    async def _entry(
        self, namespace: Namespace, response: StoredResponse, before: Sequence[StoredResponse], left: Left, *, followed: bool
    ) -> Entry | None:
        """What is stored of a response; None if that, or something that it builds on, is too large."""
        if before and before[-1] in self._too_large:
            self._too_large.add(response)
        if response in self._too_large:
            return None
        entry = await self._packing.pack(namespace, response, before, left, followed=followed)
        if entry is None:
            self._too_large.add(response)
            _log.warning("a response is too large for the state store", num_bytes=response.num_bytes)
        return entry

    def _forget_deleted(self, namespace: Namespace, response_id: str, header: bytes) -> None:
        if header[1:] in (Left.ITEMS.value, Left.NOTHING.value):
            self._memory.forget(namespace, response_id)

    def _damaged(self, error: Unreadable) -> None:
        self._tell.failed(Failure.DAMAGED)
        _log.error("stored response is removed", reason=str(error))
        self._writer.add(removal_of(error.keys[0]), lambda: self._link.run(partial(drop, keys=error.keys), self._save_seconds))

    def _is_removed(self, namespace: Namespace, response_id: str) -> bool:
        """Whether its deletion waits for the store."""
        return self._writer.has(removal_of(self._packing.key(namespace, response_id).record))
