"""What is asked of Redis about stored Responses: a key for each one's record, and one for its body.

Every write is one transaction, so no key stands without its time to live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from agentserve.state.commands import Command, send
from agentserve.state.responses_codec import FOLLOWED, HEADER_BYTES, Left, bury

WHOLE = (Left.ALL.value, Left.ITEMS.value)
"""Second bytes of records that have their items."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Where one response stands."""

    record: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """One response as it is to be stored; without a `body` if nobody may ask for it."""

    keys: Keys
    record: bytes
    body: bytes | None

    def commands(self, ttl_milliseconds: int, *, replace: bool) -> list[Command]:
        """The writes; what stands there stays unless it is to be replaced."""
        only: tuple[str, ...] = () if replace else ("NX",)
        writes: list[Command] = [("SET", self.keys.record, self.record, "PX", ttl_milliseconds, *only)]
        if self.body is not None:
            writes.append(("SET", self.keys.body, self.body, "PX", ttl_milliseconds, *only))
        return writes


async def keep(client: Redis, entry: Entry, before: Sequence[Keys], ttl_milliseconds: int, *, prolong: bool) -> bool:
    """Store a response that builds on those `before`, the last one directly; with `prolong` those live on for as long.

    Whether all of them are there. One round trip.
    """
    commands = entry.commands(ttl_milliseconds, replace=False)
    if not before:
        await send(client, *commands)
        return True
    last = before[-1].record
    at = len(commands)
    commands += [("TOUCH", *(keys.record for keys in before)), ("GETRANGE", last, 0, HEADER_BYTES - 1), ("SETRANGE", last, 0, FOLLOWED)]
    for keys in before if prolong else before[-1:]:
        commands += [("PEXPIRE", keys.record, ttl_milliseconds), ("PEXPIRE", keys.body, ttl_milliseconds)]
    replies = await send(client, *commands)
    return bool(replies[at] == len(before)) and replies[at + 1][1:] in WHOLE


async def headers(client: Redis, records: Sequence[bytes]) -> Sequence[bytes]:
    """The first bytes of each record; none where there is none."""
    found: list[bytes] = await send(client, *(("GETRANGE", key, 0, HEADER_BYTES - 1) for key in records))
    return found


async def write(client: Redis, entries: Sequence[Entry], ttl_milliseconds: int) -> bool:
    """Store responses in place of what is there."""
    await send(client, *(command for entry in entries for command in entry.commands(ttl_milliseconds, replace=True)))
    return True


@dataclass(frozen=True, slots=True)
class Found:
    """The first bytes of the records of known responses, and the records and bodies of others."""

    headers: Sequence[bytes]
    records: Sequence[bytes | None]
    bodies: Sequence[bytes | None]


async def look(client: Redis, known: Sequence[bytes], others: Sequence[Keys]) -> Found:
    """One round trip."""
    commands: list[Command] = [("GETRANGE", key, 0, HEADER_BYTES - 1) for key in known]
    if others:
        commands.append(("MGET", *(keys.record for keys in others), *(keys.body for keys in others)))
    replies = await send(client, *commands)
    found = replies[-1] if others else []
    return Found(replies[: len(known)], found[: len(others)], found[len(others) :])


async def records(client: Redis, keys: Sequence[bytes]) -> Sequence[bytes | None]:
    """The records at `keys`, in one command."""
    (found,) = await send(client, ("MGET", *keys))
    return list(found)


async def read_body(client: Redis, keys: Keys) -> tuple[bytes, bytes | None]:
    """The first bytes of its record, and its body."""
    header, (body,) = await send(client, ("GETRANGE", keys.record, 0, HEADER_BYTES - 1), ("MGET", keys.body))
    return header, body


async def delete(client: Redis, keys: Keys, ttl_milliseconds: int, *, known: bool) -> bool:
    """Delete a response; whether there was one. A `known` one that the store has lost leaves a sign for other servers' memories."""
    (before,) = await send(client, ("GET", keys.record))
    if before is None and not known:
        await send(client, ("UNLINK", keys.body))
        return False
    removal: tuple[Command, ...] = (("SET", keys.record, bury(before), "PX", ttl_milliseconds), ("UNLINK", keys.body))
    stood, *_ = await send(client, ("GET", keys.record), *removal)
    if stood != before:  # a turn has gone on from it at this moment
        await send(client, ("SET", keys.record, bury(stood), "PX", ttl_milliseconds))
    return known if before is None else bool(before[1:HEADER_BYTES] == Left.ALL.value)


async def drop(client: Redis, keys: Sequence[bytes]) -> bool:
    """Remove what cannot be read."""
    await send(client, ("UNLINK", *keys))
    return True
