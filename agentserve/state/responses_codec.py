"""How a stored Response stands in the state store: a record, which a chain needs of it, and its body, which only its reader needs.

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
    before: bytes
    items: bytes


class _Body(msgspec.Struct, array_like=True, frozen=True, tag="body"):
    owner: Owner
    body: bytes


_records = msgspec.msgpack.Decoder(_Record)
_bodies = msgspec.msgpack.Decoder(_Body)
_items = msgspec.msgpack.Decoder(tuple[bytes, ...])


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """A response as it was read. `numbers`: of all that it builds on, the oldest first; `items`: its own, as JSON text."""

    id: str
    session: str
    numbers: bytes
    items: tuple[bytes, ...]
    left: Left

    def before(self) -> Sequence[str]:
        """The ids of all that it builds on, the oldest first."""
        digits = self.numbers.hex()
        return [_PREFIX + digits[start : start + NUMBER_DIGITS] for start in range(0, len(digits), NUMBER_DIGITS)]


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


def encode_record(owner: Owner, session: str, before: Sequence[str], items: Sequence[bytes], left: Left, *, followed: bool) -> bytes:
    """The record of a response that builds on those `before`, the oldest first."""
    if left is Left.NOTHING:
        return ALONE + bytes(left.value)
    numbers = bytes.fromhex("".join(one.removeprefix(_PREFIX) for one in before))
    packed = zlib.compress(msgspec.msgpack.encode(items), _COMPRESSION)
    record = msgspec.msgpack.encode(_Record(owner, session, numbers, packed))
    return (FOLLOWED if followed else ALONE) + bytes(left.value) + record


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
    if len(record.before) % _NUMBER_BYTES:
        raise Damaged(f"the predecessors of response {owner.id!r} are cut off")
    return ResponseRecord(owner.id, record.session, record.before, items, left)


def encode_body(owner: Owner, body: bytes) -> bytes:
    """The finished response, apart from its record: it repeats tools and instructions, and no chain needs it."""
    return msgspec.msgpack.encode(_Body(owner, zlib.compress(body, _COMPRESSION)))


def decode_body(data: bytes, owner: Owner) -> bytes:
    """Raises Damaged, also where the body is another's."""
    try:
        record = _bodies.decode(data)
        body = zlib.decompress(record.body)
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError) as error:
        raise Damaged(f"the body of response {owner.id!r} cannot be read: {error}") from error
    _check(record.owner, owner)
    return body


def _check(found: Owner, asked: Owner) -> None:
    if found != asked:
        raise Damaged(f"asked for response {asked.id!r}, got {found.id!r}")
