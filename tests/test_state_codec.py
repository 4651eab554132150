"""Records of the state store: what was written comes back as it was, and nothing else is taken for it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.canonical.canonicaliser import NO_FORM
from agentserve.identity import Identity
from agentserve.nodes import Node
from agentserve.sessions import Namespace, Session
from agentserve.state.branches import Written, branches, encode, graft, leads, unwritten
from agentserve.state.codec import Damaged, Mark, decode, decode_mark, encode_mark, pack_ids, unpack_ids
from model.conversation import AssistantItem, Head, Item, Tool, ToolCall, ToolResultItem, UserItem

MARK = Mark(b"model", "key", "s", "parent", True, b"nonce")
TOOLS = (Tool("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}, "a": {"maximum": 1.5}}}), Tool("stop"))
STEPS: tuple[tuple[Item, ...], ...] = (
    (UserItem("Fix the cart."),),
    (AssistantItem("Reading.", "I need it.", (ToolCall("call-1", "read", {"path": "ä"}), ToolCall("call-2", "read", "{broken"))),),
    (ToolResultItem("call-1", "text"), ToolResultItem("call-2", "more")),
    (AssistantItem("Done."),),
)


def session_with(namespace: Namespace, *, name: str = "s", head: str = "You code.") -> Session:
    """A session of two turns, with a note behind the first message."""
    session = namespace.resolve(Identity(name), None, 0.0, lambda: name)
    node = namespace.ledger.add_head(Head(head, TOOLS), [1, 2, 200_000])
    for number, step in enumerate(STEPS):
        generated = isinstance(step[0], AssistantItem)
        node = namespace.ledger.append(node, step, [10 + number, 131_072 + number], generated=generated)
        if number == 0:
            namespace.ledger.remember(b"digest", node, NO_FORM)
            node = namespace.ledger.append_note(node, "the time", {"clock": "noon"}, [7, 7])
        if generated:
            namespace.advance(session, node)
    return session


def facts(node: Node) -> list[tuple[object, ...]]:
    """What the ledger knows of each node of a path, the text of its head apart."""
    return [
        (one.meaning, one.reasoning, one.shape, one.generated, one.ids, one.end, one.depth, one.notes, one.head.tools)
        for one in node.path()
    ]


def moved(records: list[bytes], session: str = "s") -> tuple[Namespace, Session]:
    """A namespace of another server that has read `records`."""
    namespace = Namespace(None, 16)
    taken = namespace.resolve(Identity(session), None, 0.0, lambda: session)
    assert graft(namespace, taken, decode(records, MARK), {}).all
    return namespace, taken


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_come_back_as_they_were(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(array("I", ids))).tolist() == ids


def test_a_branch_comes_back_as_it_was_and_without_its_texts() -> None:
    session = session_with(Namespace(None, 16))
    records = encode(branches(session), {}).records
    namespace, taken = moved([encode_mark(MARK), *records])
    assert session.tip is not None
    assert taken.tip is not None
    assert facts(taken.tip) == facts(session.tip)
    namespace.ledger.check_integrity()
    for text in (b"You code", b"Fix the cart", b"Reading.", b"I need it", b"Done.", b"the time"):
        assert not any(text in record for record in records)


def test_what_came_back_is_matched_and_is_found_by_its_owner() -> None:
    session = session_with(Namespace(None, 16))
    namespace, taken = moved(encode(branches(session), {}).records)
    assert taken.tip is not None
    node: Node | None = taken.tip.path()[0]
    for step in STEPS:
        assert node is not None
        node = namespace.ledger.follow(node, step)
    assert node is taken.tip
    assert namespace.resolve(Identity(), node, 1.0, lambda: "new") is taken


def test_only_what_is_new_is_encoded() -> None:
    namespace = Namespace(None, 16)
    session = session_with(namespace)
    assert session.tip is not None
    written = encode(unwritten(session, {}), {})
    assert len(written.records) == 6
    assert unwritten(session, written.keys) == []
    more = namespace.ledger.append(session.tip, (UserItem("on"),), [5])
    tip = namespace.ledger.append(more, (AssistantItem("ok"),), [6], generated=True)
    namespace.advance(session, tip)
    assert unwritten(session, written.keys) == [more, tip]
    added = encode([more, tip], written.keys)
    whole = encode(branches(session), {})
    assert [*written.records, *added.records] == whole.records


def test_a_part_is_grafted_where_the_rest_is_known_and_said_to_be_incomplete_where_not() -> None:
    session = session_with(Namespace(None, 16))
    records = encode(branches(session), {}).records
    namespace = Namespace(None, 16)
    taken = namespace.resolve(Identity("s"), None, 0.0, lambda: "s")
    keys: dict[Node, bytes] = {}
    late = decode(records[4:], MARK)
    assert graft(namespace, taken, late, keys) == replace(graft(namespace, taken, [], keys), all=False)
    assert graft(namespace, taken, decode(records[:4], MARK), keys).any
    assert graft(namespace, taken, late, keys).all
    assert len(taken.tips) == 1
    assert not graft(namespace, taken, decode(records, MARK), keys).any  # nothing is added twice
    namespace.ledger.check_integrity()


def test_a_branch_that_the_session_has_given_up_is_no_place_to_graft_on() -> None:
    session = session_with(Namespace(None, 16))
    records = encode(branches(session), {}).records
    namespace = Namespace(None, 16)
    taken = namespace.resolve(Identity("s"), None, 0.0, lambda: "s")
    keys: dict[Node, bytes] = {}
    graft(namespace, taken, decode(records[:4], MARK), keys)
    assert taken.tip is not None
    namespace.ledger.release(taken.tips.popitem()[0])
    assert not graft(namespace, taken, decode(records[4:], MARK), keys).all
    namespace.ledger.check_integrity()


def test_the_latest_request_leads_to_its_session() -> None:
    session = session_with(Namespace(None, 16))
    assert session.tip is not None
    assert list(leads(session.tip)) == [b"digest"]


def test_a_list_is_looked_through_only_when_it_has_grown() -> None:
    session = session_with(Namespace(None, 16))
    written = Written(length=1024)
    assert not written.is_mostly_dead(session)
    written.length = 1025
    assert written.is_mostly_dead(session)


@pytest.mark.parametrize(
    "records",
    [
        [b""],
        [b"\xff"],
        [msgspec.msgpack.encode(["node", b"", b"", None, False, None, {}, b"", b""])],
        [msgspec.msgpack.encode(["node", b"", b"", None, False, ["poet", []], {}, b"", pack_ids(array("I"))])],
        [encode_mark(msgspec.structs.replace(MARK, session="t"))],
        [encode_mark(msgspec.structs.replace(MARK, namespace="other key"))],
        [encode_mark(msgspec.structs.replace(MARK, deployment=b"other model"))],
    ],
    ids=["empty", "no msgpack", "ids cut off", "unknown shape", "another session", "another API key", "another model"],
)
def test_what_is_no_record_of_this_session_is_refused(records: list[bytes]) -> None:
    with pytest.raises(Damaged):
        decode(records, MARK)


def test_a_list_that_begins_with_no_mark_is_refused() -> None:
    assert decode_mark(encode_mark(MARK)) == MARK
    with pytest.raises(Damaged):
        decode_mark(encode(branches(session_with(Namespace(None, 16))), {}).records[0])
