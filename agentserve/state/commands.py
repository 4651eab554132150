"""What is asked of Redis: one list per session that is appended to, and keys that lead from a history's digest to its session.

Every write is one transaction, so a list never stands without its time to live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.asyncio import Redis

Command: TypeAlias = "tuple[str | bytes | int, ...]"


@dataclass(frozen=True, slots=True)
class Append:
    """Records for the list at `key`. Those of `new` follow what stands there; where it is not the list that begins with `first` (it was
    evicted, or another server has begun it anew), `whole` is appended instead, which begins with a mark. `digests` lead to `session`."""

    key: bytes
    first: bytes
    new: Sequence[bytes]
    whole: Sequence[bytes]
    digests: Mapping[bytes, bytes]
    ttl_milliseconds: int
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """How the list stands: its first record, its length, and whether `whole` was appended."""

    first: bytes
    length: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A list's records from number `start` on, and the first of the list."""

    first: bytes
    start: int
    records: Sequence[bytes]


async def append(client: Redis, asked: Append) -> Appended:
    """One round trip; two where the list is not as it was left."""
    if asked.first and not asked.replace:
        first, length = await _write(client, asked, ("RPUSHX", asked.key, *asked.new))
        if first == asked.first:
            return Appended(first, length, whole=False)
    clear: list[Command] = [("UNLINK", asked.key)] if asked.replace else []
    first, length = await _write(client, asked, *clear, ("RPUSH", asked.key, *asked.whole))
    return Appended(first, length, whole=True)


async def _write(client: Redis, asked: Append, *pushes: Command) -> tuple[bytes, int]:
    ttl = asked.ttl_milliseconds
    leads: list[Command] = [("SET", digest, session, "PX", ttl) for digest, session in asked.digests.items()]
    replies = await _send(client, *pushes, ("PEXPIRE", asked.key, ttl), *leads, ("LINDEX", asked.key, 0))
    return replies[-1] or b"", replies[len(pushes) - 1]


async def read(client: Redis, key: bytes, first: bytes, start: int) -> Part:
    """The list at `key` from `start` on if it begins with `first`, else the whole of it. One round trip if it does."""
    if first:
        begins, records = await _send(client, ("LINDEX", key, 0), ("LRANGE", key, start, -1))
        if begins == first:
            return Part(first, start, records)
    (records,) = await _send(client, ("LRANGE", key, 0, -1))
    return Part(records[0] if records else b"", 0, records)


async def lead(client: Redis, digests: Sequence[bytes]) -> bytes | None:
    """The session that the first known of `digests` leads to."""
    (found,) = await _send(client, ("MGET", *digests))
    return next((session for session in found if session is not None), None)


async def remove(client: Redis, key: bytes) -> bool:
    """Whether there was a list at `key`."""
    (count,) = await _send(client, ("UNLINK", key))
    return bool(count)


async def _send(client: Redis, *commands: Command) -> list[Any]:
    """The replies of one transaction."""
    async with client.pipeline(transaction=len(commands) > 1) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = await pipe.execute()
        return replies
