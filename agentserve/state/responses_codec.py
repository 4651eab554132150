"""How a stored Response stands in the state store: a record, which whatever builds on it needs, and a body, for who asks for it by id.

A record begins with two bytes that are read and set alone: whether another response builds on it, and what of it is left. Where
it was deleted, that stays known for as long as it would have lived, since other servers may have it in memory.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec

from agentserve.dialects.responses_answer import NUMBER_DIGITS
from agentserve.state.codec import Damaged

ALONE, FOLLOWED = b"\0", b"\1"
HEADER_BYTES = 2
MAX_BYTES = 8 << 20
"""Of a record or a body as it is stored; what is larger stays with the server that made it."""

_COMPRESSION = 1
_NUMBER_BYTES = NUMBER_DIGITS // 2
_PREFIX = "resp_"
_ids = re.compile(rf"{_PREFIX}[0-9a-f]{{{NUMBER_DIGITS}}}")


class Left(Enum):
    """What of a response is left."""

    ALL = b"+"
    ITEMS = b"-"
    """It was deleted, but others build on it."""
    NOTHING = b"x"
    """It was deleted."""
    UNKNOWN = b""
    """There is no record."""


class Owner(msgspec.Struct, array_like=True, frozen=True):
    """Whose response it is, and which."""

    deployment: bytes
    namespace: str
    id: str


class _Record(msgspec.Struct, array_like=True, frozen=True, tag="response"):
    owner: Owner
    session: str
    items: bytes


class _Body(msgspec.Struct, array_like=True, frozen=True, tag="body"):
    owner: Owner
    before: bytes
    body: bytes | None


_records = msgspec.msgpack.Decoder(_Record)
_bodies = msgspec.msgpack.Decoder(_Body)
_items = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response as a link of a chain; `items`: its own, as JSON text."""

    id: str
    session: str
    items: tuple[bytes, ...]
    left: Left


@dataclass(frozen=True, slots=True)
class ResponseBody:
    """A response as it was answered, None if its writer did not have that; `before`: the ids of all that it builds on, the oldest first."""

    body: bytes | None
    before: Sequence[str]


def is_response_id(text: str) -> bool:
    """Whether a server could have made this id."""
    return _ids.fullmatch(text) is not None


def left_of(record: bytes | None) -> Left:
    """What a record, or its first bytes, says is left. Raises Damaged."""
    if record is None or len(record) < HEADER_BYTES:  # the mark of a follower alone is no record
        return Left.UNKNOWN
    try:
        return Left(record[1:HEADER_BYTES])
    except ValueError as error:
        raise Damaged(f"no record of a response begins with {record[:HEADER_BYTES]!r}") from error


def encode_record(owner: Owner, session: str, items: Sequence[bytes], left: Left, *, followed: bool) -> bytes:
    """The record of a response."""
    packed = zlib.compress(msgspec.msgpack.encode(items), _COMPRESSION)
    return (FOLLOWED if followed else ALONE) + bytes(left.value) + msgspec.msgpack.encode(_Record(owner, session, packed))


def bury(record: bytes | None) -> bytes:
    """What stays of a deleted response's record: its items, where others build on it, else that it was deleted."""
    if record is not None and (left := record[1:HEADER_BYTES]):
        if left == Left.ITEMS.value:
            return record
        if left == Left.ALL.value and record[:1] == FOLLOWED:
            return FOLLOWED + Left.ITEMS.value + record[HEADER_BYTES:]
    return ALONE + Left.NOTHING.value


def decode_record(data: bytes, owner: Owner) -> ResponseRecord:
    """Raises Damaged, also where the record is another's."""
    left = left_of(data)
    try:
        record = _records.decode(data[HEADER_BYTES:])
        items = _items.decode(zlib.decompress(record.items))
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError) as error:
        raise Damaged(f"the record of response {owner.id!r} cannot be read: {error}") from error
    _check(record.owner, owner)
    return ResponseRecord(owner.id, record.session, items, left)


def encode_body(owner: Owner, body: bytes | None, before: Sequence[str]) -> bytes:
    """What stands apart from the record, as no chain needs it: the body repeats tools and instructions."""
    numbers = bytes.fromhex("".join(one.removeprefix(_PREFIX) for one in before))
    return msgspec.msgpack.encode(_Body(owner, numbers, None if body is None else zlib.compress(body, _COMPRESSION)))


def decode_body(data: bytes, owner: Owner) -> ResponseBody:
    """Raises Damaged, also where the body is another's."""
    try:
        found = _bodies.decode(data)
        body = None if found.body is None else zlib.decompress(found.body)
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError) as error:
        raise Damaged(f"the body of response {owner.id!r} cannot be read: {error}") from error
    _check(found.owner, owner)
    if len(found.before) % _NUMBER_BYTES:
        raise Damaged(f"the predecessors of response {owner.id!r} are cut off")
    digits = found.before.hex()
    return ResponseBody(body, [_PREFIX + digits[start : start + NUMBER_DIGITS] for start in range(0, len(digits), NUMBER_DIGITS)])


def _check(found: Owner, asked: Owner) -> None:
    if found != asked:
        raise Damaged(f"asked for response {asked.id!r}, got {found.id!r}")
