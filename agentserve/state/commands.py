"""What is asked of Redis: one list per session that is appended to, and keys that lead from a history's digest to its session.

Every write is one transaction and one round trip, so a list never stands without its time to live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio import Redis

Command: TypeAlias = "tuple[str | bytes | int, ...]"


@dataclass(frozen=True, slots=True)
class Stands:
    """How a list stands after a write: its first record, and its length."""

    first: bytes
    length: int


@dataclass(frozen=True, slots=True)
class Part:
    """A list's records from number `start` on, and the first of the list. No records, no list."""

    first: bytes
    start: int
    records: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Append:
    """Append `records` to the list at `key`, which lives on for `ttl_milliseconds`; `leads` are keys that lead to `session` as long."""

    key: bytes
    records: Sequence[bytes]
    ttl_milliseconds: int
    session: bytes
    leads: Sequence[bytes] = ()

    async def extend(self, client: Redis) -> Stands:
        """Only if there is a list."""
        return await self._write(client, ("RPUSHX", self.key, *self.records))

    async def begin(self, client: Redis) -> Stands:
        """Also if there is none."""
        return await self._write(client, ("RPUSH", self.key, *self.records))

    async def replace(self, client: Redis) -> Stands:
        """In place of the list that is there."""
        return await self._write(client, ("UNLINK", self.key), ("RPUSH", self.key, *self.records))

    async def _write(self, client: Redis, *pushes: Command) -> Stands:
        ttl = self.ttl_milliseconds
        leads: list[Command] = [("SET", lead, self.session, "PX", ttl) for lead in self.leads]
        replies = await send(client, *pushes, ("PEXPIRE", self.key, ttl), ("LINDEX", self.key, 0), *leads)
        return Stands(replies[len(pushes) + 1] or b"", replies[len(pushes) - 1])


async def read(client: Redis, key: bytes, first: bytes, start: int) -> Part:
    """The list at `key` from `start` on if it begins with `first`, else the whole of it. One round trip if it does."""
    if first:
        begins, records = await send(client, ("LINDEX", key, 0), ("LRANGE", key, start, -1))
        if begins == first:
            return Part(first, start, records)
    (records,) = await send(client, ("LRANGE", key, 0, -1))
    return Part(records[0] if records else b"", 0, records)


async def first_lead(client: Redis, keys: Sequence[bytes]) -> str | None:
    """The session that the first known of `keys` leads to."""
    (found,) = await send(client, ("MGET", *keys))
    return next((session.decode() for session in found if session is not None), None)


async def remove(client: Redis, key: bytes) -> bool:
    """Whether there was a list at `key`."""
    (count,) = await send(client, ("UNLINK", key))
    return bool(count)


async def send(client: Redis, *commands: Command) -> list[Any]:
    """The replies to `commands`, which are one round trip and, if more than one, one transaction."""
    async with client.pipeline(transaction=len(commands) > 1) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await pipe.execute()
        return replies
