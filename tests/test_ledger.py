"""The ledger: what was appended is found again and never changes; nothing outlives its last hold."""

from __future__ import annotations

import json
import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from agentserve.canonical.canonicaliser import Form
from agentserve.ledger import MAX_CHAINS, Ledger
from agentserve.nodes import Node, common_ancestor
from agentserve.prompt import FlatPrompt, ids_json
from model.conversation import AssistantItem, Head, Item, Json, SystemItem, ToolCall, ToolResultItem, UserItem, canonical_json
from prefix_cache.blocks import HashChain

HEAD = Head("You are a coding agent.")
FORM = Form(b"key", b"key", {}, {})


def path_ids(node: Node) -> list[int]:
    return [i for part in node.path() for i in part.ids]


def held_head(ledger: Ledger, head: Head = HEAD) -> Node:
    node = ledger.add_head(head, [1, 2, 3])
    ledger.hold(node)
    return node


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=4)
    | st.sampled_from(["null", "\ud800", 2**70])
)
values = st.recursive(
    atoms, lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3), max_leaves=6
)


@settings(max_examples=500, deadline=None)
@given(values, values)
def test_values_have_the_same_canonical_text_exactly_if_they_are_the_same_to_the_type_and_the_digit(one: Json, other: Json) -> None:
    def plain(value: Json) -> str:
        return json.dumps(value, sort_keys=True)

    assert (canonical_json(one) == canonical_json(other)) == (plain(one) == plain(other))
    again = json.JSONDecoder().decode(plain(one))
    assert canonical_json(again) == canonical_json(one)
    assert plain(json.JSONDecoder().decode(canonical_json(one))) == plain(one)


@pytest.mark.parametrize(
    "numbers", [(1, True), (1, 1.0), (0.0, -0.0), (2**64, 2.0**64), (float("nan"), None), (float("inf"), None), (2**70, 2**70 + 1)]
)
def test_numbers_that_python_or_json_may_confuse_stay_apart(numbers: tuple[Json, Json]) -> None:
    one, other = (canonical_json({"b": [number], "a": 1}) for number in numbers)
    assert one != other
    assert one.startswith('{"a":1,')


def test_equal_items_lead_to_the_same_node_and_others_branch() -> None:
    ledger = Ledger()
    head = held_head(ledger)
    one = ledger.append(head, [UserItem("a")], [4, 5])
    ledger.hold(one)
    again = ledger.append(head, [UserItem("a")], [4, 5])
    other = ledger.append(head, [UserItem("a ")], [4, 6])
    ledger.hold(other)
    assert again is one
    assert other is not one
    assert common_ancestor(one, other) is head
    ledger.check_integrity()


@pytest.mark.case("TOK-04", "TOK-08")
@pytest.mark.parametrize(
    "echo",
    [
        AssistantItem("Done.", "Think first.", (ToolCall("call_1", "read", {"b": [1, {"x": None}], "a": "é"}),)),
        AssistantItem("  Done.\n", None, (ToolCall("other-id", "read", {"a": "é", "b": [1, {"x": None}]}),)),
        AssistantItem("Done.", "", (ToolCall("", "read", {"a": "é", "b": [1, {"x": None}]}),)),
        AssistantItem("Done.", "Think first.\n", (ToolCall("call_1", "read", {"a": "é", "b": [1, {"x": None}]}),)),
    ],
)
def test_an_answer_that_comes_back_in_another_form_is_the_stored_answer(echo: AssistantItem) -> None:
    ledger = Ledger()
    head = held_head(ledger)
    given = AssistantItem("Done.", "Think first.", (ToolCall("call_1", "read", {"a": "é", "b": [1, {"x": None}]}),))
    node = ledger.append(head, [given], [7, 8], generated=True)
    ledger.hold(node)
    assert ledger.follow(head, [echo]) is node


@pytest.mark.case("TOK-04")
@pytest.mark.parametrize(
    "edited",
    [
        AssistantItem("Done!", "Think first.", (ToolCall("c", "read", {"n": 1}),)),
        AssistantItem("Done.", "Think again.", (ToolCall("c", "read", {"n": 1}),)),
        AssistantItem("Done.", "Think first.", (ToolCall("c", "read", {"n": True}),)),
        AssistantItem("Done.", "Think first.", (ToolCall("c", "read", {"n": 1.0}),)),
        AssistantItem("Done.", "Think first.", (ToolCall("c", "write", {"n": 1}),)),
        AssistantItem("Done.", "Think first.", ()),
        AssistantItem("Done.", "Think first.", (ToolCall("c", "read", '{"n":1}'),)),
    ],
)
def test_an_answer_that_the_client_changed_is_not_the_stored_answer(edited: AssistantItem) -> None:
    ledger = Ledger()
    head = held_head(ledger)
    node = ledger.append(head, [AssistantItem("Done.", "Think first.", (ToolCall("c", "read", {"n": 1}),))], [7], generated=True)
    ledger.hold(node)
    assert ledger.follow(head, [edited]) is None


@pytest.mark.case("TOK-11")
def test_user_and_tool_text_is_compared_byte_for_byte() -> None:
    ledger = Ledger()
    head = held_head(ledger)
    for step in ([UserItem("x")], [ToolResultItem("c", "x")]):
        ledger.hold(ledger.append(head, step, [9]))
    assert ledger.follow(head, [UserItem("x ")]) is None
    assert ledger.follow(head, [ToolResultItem("c", " x")]) is None
    assert ledger.follow(head, [ToolResultItem("another id", "x")]) is not None


def test_the_longest_known_run_of_messages_is_found_and_old_forms_are_forgotten() -> None:
    ledger = Ledger()
    head = held_head(ledger)
    node = ledger.append(head, [UserItem("a")], [4])
    ledger.hold(node)
    ledger.remember(b"head", head, FORM)
    for form in range(MAX_CHAINS + 1):
        ledger.remember(b"form %d" % form, node, FORM)
    assert ledger.find([b"head", b"form 8", b"unknown"]) == (node, FORM, 2)
    assert ledger.find([b"head", b"form 0"]) == (head, FORM, 1)
    assert ledger.find([b"unknown"]) is None
    ledger.release(node)
    assert ledger.find([b"head", b"form 8"]) == (head, FORM, 1)
    ledger.check_integrity()


def test_what_follows_a_message_is_found_through_its_notes_the_latest_first() -> None:
    ledger = Ledger()
    said = ledger.append(held_head(ledger), [UserItem("a")], [4])
    notes = [ledger.append_note(said, time, {"clock": time}, [number]) for number, time in enumerate(("10:41", "10:42"))]
    answers = [ledger.append(note, [AssistantItem(text)], [7]) for note, text in zip(notes, ("left", "right"), strict=True)]
    twins = [ledger.append(note, [AssistantItem("same")], [8], generated=True) for note in notes]
    for node in (*answers, *twins):
        ledger.hold(node)
    assert [ledger.follow(said, [AssistantItem(text)]) for text in ("left", "right", "same")] == [*answers, twins[1]]
    assert ledger.tail(said) is notes[1]
    assert ledger.tail(notes[0]) is notes[0]
    assert [ledger.follow_note(said, {"clock": time}) for time in ("10:41", "10:42", "10:43")] == [*notes, None]
    assert ledger.append_note(said, "10:41", {"clock": "10:41"}, [9]) is notes[0]
    ledger.check_integrity()


def test_a_note_is_no_message_of_the_client() -> None:
    ledger = Ledger()
    said = ledger.append(held_head(ledger), [UserItem("a")], [4])
    note = ledger.append_note(said, "10:41", {"clock": "10:41"}, [5])
    ledger.hold(note)
    assert ledger.follow(said, [SystemItem("10:41")]) is None
    sent = ledger.append(said, [SystemItem("10:41")], [5])
    ledger.hold(sent)
    assert sent is not note
    assert not sent.notes


class LedgerMachine(RuleBasedStateMachine):
    """Branches are appended, held and released in any order; the ids of a held branch stay what they were."""

    held = Bundle("held")

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.expected: dict[Node, list[int]] = {}
        self.rng = random.Random(1)

    def _keep(self, node: Node) -> Node:
        self.ledger.hold(node)
        self.expected[node] = path_ids(node)
        return node

    @rule(target=held, text=st.sampled_from(["a", "b"]))
    def new_head(self, text: str) -> Node:
        return self._keep(self.ledger.add_head(Head(text), [1, ord(text)]))

    @rule(
        target=held,
        parent=held,
        item=st.sampled_from([UserItem("u"), AssistantItem("a"), AssistantItem("a", "r"), ToolResultItem("c", "t")]),
    )
    def append(self, parent: Node, item: Item) -> Node:
        generated = isinstance(item, AssistantItem) and self.rng.random() < 0.5
        ids = [self.rng.randrange(100) for _ in range(3)]
        return self._keep(self.ledger.append(parent, [item], ids, generated=generated))

    @rule(target=held, parent=held, value=st.sampled_from(["1", "2"]))
    def note(self, parent: Node, value: str) -> Node:
        node = self.ledger.append_note(parent, value, {"clock": value}, [self.rng.randrange(100) for _ in range(2)])
        assert node.notes == {**parent.notes, "clock": value}
        return self._keep(node)

    @rule(node=held)
    def remember(self, node: Node) -> None:
        self.ledger.remember(bytes([self.rng.randrange(20)]), node, FORM)

    @rule(node=consumes(held))
    def release(self, node: Node) -> None:
        self.ledger.release(node)
        if not node.holds:
            self.expected.pop(node, None)

    @invariant()
    def held_branches_are_as_they_were(self) -> None:
        for node, ids in getattr(self, "expected", {}).items():
            assert path_ids(node) == ids

    @invariant()
    def counts_and_links_agree(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check_integrity()

    def teardown(self) -> None:
        for node in list(getattr(self, "expected", {})):
            while node.holds:
                self.ledger.release(node)
        if hasattr(self, "ledger"):
            assert self.ledger.num_nodes == 0
            assert self.ledger.num_tokens == 0


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_flat_prompt_of_any_branch_equals_its_path() -> None:
    rng = random.Random(7)
    ledger = Ledger()
    nodes = [held_head(ledger), held_head(ledger, Head("another"))]
    for number in range(60):
        parent = rng.choice(nodes)
        ids = [rng.randrange(200_000) for _ in range(rng.randrange(0, 40))]
        node = ledger.append(parent, [UserItem(str(number))], ids)
        ledger.hold(node)
        nodes.append(node)
    prompt = FlatPrompt(block_size=16, salt=b"tenant")
    for _ in range(300):
        node = rng.choice(nodes)
        prompt.move_to(node)
        expected = path_ids(node)
        if rng.random() < 0.5:
            prompt.extend([5, 6, 7])
            expected = [*expected, 5, 6, 7]
        fresh = HashChain(16, b"tenant")
        fresh.extend(array("I", expected))
        assert list(prompt.ids) == expected
        assert b"".join(prompt.json) == ids_json(expected)
        assert len(prompt.json) <= 16
        assert list(prompt.chain.hashes) == list(fresh.hashes)
        assert prompt.chain.num_tokens == len(expected)
