"""The store of responses: bounded, namespaced, and never without what a kept response builds on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.dialects.responses_store import ResponseStore, StoredResponse
from agentserve.errors import InvalidRequest, NotFound
from agentserve.sessions import Namespace

SIZE = 10


def response(number: int, previous: StoredResponse | None = None) -> StoredResponse:
    item = f"{number:08d}".encode()
    return StoredResponse(f"resp_{number}", "session", b"{}", (item,), previous)


def test_a_history_is_that_of_all_predecessors_in_order() -> None:
    first = response(1)
    assert response(3, response(2, first)).history() == [b"00000001", b"00000002", b"00000003"]


def test_responses_are_seen_in_their_own_namespace_only() -> None:
    store, mine, yours = ResponseStore(1000), Namespace("a", 16), Namespace("b", 16)
    store.add(mine, response(1))
    assert store.get(mine, "resp_1").id == "resp_1"
    with pytest.raises(NotFound):
        store.get(yours, "resp_1")
    with pytest.raises(InvalidRequest) as refused:
        store.previous(yours, "resp_1")
    assert refused.value.code == "previous_response_not_found"


def test_the_least_recently_used_goes_first() -> None:
    store, namespace = ResponseStore(2 * SIZE), Namespace(None, 16)
    store.add(namespace, response(1))
    store.add(namespace, response(2))
    store.get(namespace, "resp_1")
    store.add(namespace, response(3))
    assert store.get(namespace, "resp_1")
    with pytest.raises(NotFound):
        store.get(namespace, "resp_2")
    assert store.num_bytes == 2 * SIZE


def test_a_deleted_response_is_gone_but_those_that_build_on_it_keep_its_items() -> None:
    store, namespace = ResponseStore(1000), Namespace(None, 16)
    store.add(namespace, response(1))
    store.add(namespace, response(2, store.get(namespace, "resp_1")))
    store.delete(namespace, "resp_1")
    with pytest.raises(NotFound):
        store.get(namespace, "resp_1")
    assert len(store.get(namespace, "resp_2").history()) == 2
    assert store.num_bytes == 2 * SIZE
    store.delete(namespace, "resp_2")
    assert store.num_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=40), st.integers(1, 8))
def test_bytes_are_those_of_what_is_held_whatever_is_added_and_deleted(steps: list[tuple[int, bool]], room: int) -> None:
    """A step goes on from the response so many places back, which may be gone from the store by then, or deletes that one."""
    store, namespace = ResponseStore(room * SIZE), Namespace(None, 16)
    made: list[StoredResponse] = []
    for number, (back, delete) in enumerate(steps):
        other = made[-back] if 0 < back <= len(made) else None
        if delete and other is not None and other.listed:
            store.delete(namespace, other.id)
            continue
        made.append(response(number, other))
        store.add(namespace, made[-1])
    held = {id(step) for one in made if one.listed for step in chain(one)}
    assert store.num_bytes == len(held) * SIZE
    assert len(store) == sum(one.listed for one in made)
    assert store.num_bytes <= room * SIZE or not len(store)


def chain(one: StoredResponse | None) -> list[StoredResponse]:
    steps: list[StoredResponse] = []
    while one is not None:
        steps.append(one)
        one = one.previous
    return steps
