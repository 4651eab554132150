"""Packs Responses for the state store and unpacks what was found there, long ones off the event loop; knows where each one stands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from agentserve.dialects.responses_store import StoredResponse
from agentserve.sessions import Namespace
from agentserve.state.codec import SCHEMA, Damaged
from agentserve.state.responses_codec import (
    MAX_BYTES,
    Left,
    Owner,
    ResponseBody,
    ResponseRecord,
    decode_body,
    decode_record,
    encode_body,
    encode_record,
    left_of,
)
from agentserve.state.responses_commands import Entry, Keys

T = TypeVar("T")

LONG_BYTES = 65_536
"""From here on the work is done off the event loop (some 20 ms per megabyte of JSON)."""


class Unreadable(Damaged):
    """What stands at the first of `keys` cannot be read, so all of them are of no use."""

    def __init__(self, error: Damaged, *keys: bytes) -> None:
        super().__init__(str(error))
        self.keys = keys


class Packing:
    """Of one `deployment`."""

    def __init__(self, deployment: bytes) -> None:
        self._deployment = deployment

    def keys(self, namespace: Namespace, response_ids: Iterable[str]) -> list[Keys]:
        """Where these responses stand."""
        space = b"agentserve:%d:%s:%s:response" % (SCHEMA, self._deployment.hex().encode(), namespace.name.encode())
        numbers = [b":" + response_id.encode("utf-8", "surrogatepass") for response_id in response_ids]
        return [Keys(space + number, space + b"-body" + number) for number in numbers]

    def key(self, namespace: Namespace, response_id: str) -> Keys:
        """Where this one stands."""
        return self.keys(namespace, (response_id,))[0]

    def records(self, namespace: Namespace, response_ids: Iterable[str]) -> list[bytes]:
        """Where their records stand."""
        return [keys.record for keys in self.keys(namespace, response_ids)]

    async def pack(
        self, namespace: Namespace, response: StoredResponse, before: Sequence[StoredResponse], left: Left, *, followed: bool
    ) -> Entry | None:
        """What is stored of a response that builds on those `before`; None if it is too large."""
        owner, names = self._owner(namespace, response.id), [one.id for one in before]

        def work() -> tuple[bytes, bytes | None]:
            record = encode_record(owner, response.session_id, response.items, left, followed=followed)
            return record, encode_body(owner, response.body, names) if left is Left.ALL else None

        record, body = await _compute(work, response.num_bytes)
        is_too_large = max(len(record), len(body or b"")) > MAX_BYTES
        return None if is_too_large else Entry(self.key(namespace, response.id), record, body)

    async def unpack(self, namespace: Namespace, response_ids: Sequence[str], found: Sequence[bytes | None]) -> list[ResponseRecord] | None:
        """What was found of these, with their items; None if one is missing. Raises Unreadable."""
        data = [one for one in found if one is not None]
        if len(data) < len(found):
            return None
        return await _compute(partial(self._unpack, namespace, response_ids, data), sum(map(len, data)))

    def _unpack(self, namespace: Namespace, response_ids: Sequence[str], data: Sequence[bytes]) -> list[ResponseRecord] | None:
        read = []
        for response_id, one in zip(response_ids, data, strict=True):
            try:
                if left_of(one) in (Left.UNKNOWN, Left.NOTHING):
                    return None
                read.append(decode_record(one, self._owner(namespace, response_id)))
            except Damaged as error:
                keys = self.key(namespace, response_id)
                raise Unreadable(error, keys.record, keys.body) from error
        return read

    async def unpack_body(self, namespace: Namespace, response_id: str, data: bytes) -> ResponseBody:
        """Raises Unreadable."""
        try:
            return await _compute(partial(decode_body, data, self._owner(namespace, response_id)), len(data))
        except Damaged as error:
            raise Unreadable(error, self.key(namespace, response_id).body) from error

    def _owner(self, namespace: Namespace, response_id: str) -> Owner:
        return Owner(self._deployment, namespace.name, response_id)


async def _compute(work: Callable[[], T], num_bytes: int) -> T:
    return await asyncio.to_thread(work) if num_bytes > LONG_BYTES else work()
