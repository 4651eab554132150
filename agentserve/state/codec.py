"""How a session stands in the state store: one list of records, first its mark, then a record per node, parents first.

A record holds what the ledger needs to match a history and to build a prompt: digests and ids, but no text beyond the names of calls, the
tools of a head and what notes have told. A node's key is the digest of its record, which holds its parent's key, so equal branches have
equal keys on every server.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from agentserve.nodes import NO_NOTES, NOTE, Node
from model.conversation import AssistantItem, Head, Item, SystemItem, Tool, ToolCall, ToolResultItem, UserItem

SCHEMA = 1
"""Part of every key: records of another schema are not seen, and expire."""

_COMPRESSION = 1
"""zlib's fastest: 43 µs per 1,000 ids, 0.8 to 1.2 bytes each; level 6 saves 7 % more in four times the time."""


class Damaged(ValueError):
    """A record cannot be read, or belongs to another session, API key or model."""


class Mark(msgspec.Struct, array_like=True, frozen=True, tag="mark"):
    """Whose list this is. `nonce` tells a list from one that was lost and begun anew; `named`: the client names the session."""

    deployment: bytes
    namespace: str
    session: str
    parent: str | None
    named: bool
    nonce: bytes

    def is_same_session(self, other: Mark) -> bool:
        """Whether both are of one session of one API key and deployment."""
        return (self.deployment, self.namespace, self.session) == (other.deployment, other.namespace, other.session)


class _Record(msgspec.Struct, array_like=True, frozen=True, tag="node"):
    parent: bytes
    meaning: bytes
    reasoning: bytes | None
    generated: bool
    shape: tuple[str, list[tuple[str, str]]] | None
    notes: dict[str, str]
    tools: bytes
    ids: bytes


class _Tool(msgspec.Struct):
    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None


_records = msgspec.msgpack.Decoder(Mark | _Record)
_marks = msgspec.msgpack.Decoder(Mark)
_tools = msgspec.json.Decoder(list[_Tool])


@dataclass(frozen=True, slots=True)
class StoredNode:
    """A node as it was read: its own key and its parent's (empty for a head)."""

    key: bytes
    parent: bytes
    meaning: bytes
    reasoning: bytes | None
    generated: bool
    step: tuple[Item] | Head
    notes: Mapping[str, str]
    ids: array[int]

    def node(self, parent: Node | None) -> Node:
        """The same as a node behind `parent` that is not in a ledger yet."""
        node = Node(parent, self.step, self.ids, generated=self.generated)
        node.meaning, node.reasoning, node.said = self.meaning, self.reasoning, None  # only the shape of what was said is stored
        if self.meaning == NOTE:
            node.notes = self.notes
        return node


def key_of(record: bytes) -> bytes:
    """16 bytes."""
    return xxhash.xxh3_128_digest(record)


def encode_mark(mark: Mark) -> bytes:
    """The list's first record."""
    return msgspec.msgpack.encode(mark)


def encode_node(node: Node, parent: bytes) -> bytes:
    """The record of `node`, whose parent has the key `parent`."""
    is_head = node.parent is None
    return msgspec.msgpack.encode(
        _Record(
            parent,
            node.meaning,
            node.reasoning,
            node.generated,
            None if node.shape is None else _shape_form(node.shape),
            dict(node.notes if node.meaning == NOTE else NO_NOTES),
            zlib.compress(msgspec.json.encode(node.head.tools), _COMPRESSION) if is_head else b"",
            pack_ids(node.ids),
        )
    )


def decode_mark(record: bytes) -> Mark:
    """Raises Damaged."""
    try:
        return _marks.decode(record)
    except msgspec.MsgspecError as error:
        raise Damaged(f"a list begins with no mark: {error}") from error


def decode(records: Iterable[bytes], asked: Mark) -> list[StoredNode]:
    """The nodes of a list, or of a part of it. Raises Damaged, also where a mark among them is not of the session that was asked for."""
    nodes = []
    try:
        for data in records:
            record = _records.decode(data)
            if isinstance(record, _Record):
                nodes.append(_stored(key_of(data), record))
            elif not record.is_same_session(asked):
                raise Damaged(f"asked for session {asked.session!r}, got {record.session!r}")
    except (msgspec.MsgspecError, zlib.error, UnicodeDecodeError) as error:
        raise Damaged(f"a record of session {asked.session!r} cannot be read: {error}") from error
    return nodes


def _stored(key: bytes, record: _Record) -> StoredNode:
    step: tuple[Item] | Head
    if record.shape is None:
        tools = _tools.decode(zlib.decompress(record.tools))
        step = Head("", tuple(Tool(tool.name, tool.description, tool.parameters) for tool in tools))
    else:
        step = (_shape(*record.shape),)
    ids = unpack_ids(record.ids)
    return StoredNode(key, record.parent, record.meaning, record.reasoning, record.generated, step, record.notes, ids)


def pack_ids(ids: array[int]) -> bytes:
    """Ids with their low bytes first, then their next and so on, compressed: the high ones are nearly all alike."""
    data = ids.tobytes()
    return zlib.compress(b"".join(data[plane :: ids.itemsize] for plane in range(ids.itemsize)), _COMPRESSION)


def unpack_ids(packed: bytes) -> array[int]:
    """What `pack_ids` packed. Raises zlib.error, Damaged."""
    planes = zlib.decompress(packed)
    ids: array[int] = array("I")
    count, rest = divmod(len(planes), ids.itemsize)
    if rest:
        raise Damaged("ids are cut off")
    data = bytearray(len(planes))
    for plane in range(ids.itemsize):
        data[plane :: ids.itemsize] = planes[plane * count : (plane + 1) * count]
    ids.frombytes(data)
    return ids


def _shape_form(shape: Item) -> tuple[str, list[tuple[str, str]]]:
    match shape:
        case AssistantItem(_, _, calls):
            return "assistant", [(call.id, call.name) for call in calls]
        case ToolResultItem(call_id, _):
            return "tool", [(call_id, "")]
        case UserItem():
            return "user", []
        case SystemItem():
            return "system", []


def _shape(kind: str, names: list[tuple[str, str]]) -> Item:
    match kind, names:
        case "assistant", _:
            return AssistantItem(calls=tuple(ToolCall(id, name, {}) for id, name in names))
        case "tool", [(call_id, _)]:
            return ToolResultItem(call_id, "")
        case "user", []:
            return UserItem("")
        case "system", []:
            return SystemItem("")
    raise Damaged(f"no item has the shape {kind!r}")
