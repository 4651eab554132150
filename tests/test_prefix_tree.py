"""The prefix tree against a list of everything that was inserted."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from prefix_cache.tree import Position, PrefixTree

# Few different tokens and short sequences, so that prefixes are shared and spans are split.
sequences = st.lists(st.integers(0, 2), max_size=12)
namespaces = st.sampled_from([b"", b"tenant"])


def ids(values: list[int]) -> array[int]:
    return array("I", values)


def num_shared(left: list[int], right: list[int]) -> int:
    num_tokens = 0
    while num_tokens < min(len(left), len(right)) and left[num_tokens] == right[num_tokens]:
        num_tokens += 1
    return num_tokens


def longest_known(values: list[int], known: list[list[int]]) -> int:
    return max((num_shared(values, other) for other in known), default=0)


class UnboundedTree(RuleBasedStateMachine):
    """Nothing is forgotten: matches are exact, from the root and from any position ever given out."""

    max_tokens = 10**9
    span_tokens = 4096
    positions: Bundle[tuple[list[int], Position]] = Bundle("positions")

    def __init__(self) -> None:
        super().__init__()
        self.tree = PrefixTree(self.max_tokens, span_tokens=self.span_tokens)
        self.known: dict[bytes, list[list[int]]] = {b"": [], b"tenant": []}

    def check_match(self, values: list[int], found: Position, namespace: bytes) -> None:
        assert found.num_tokens == longest_known(values, self.known[namespace])

    @rule(target=positions, values=sequences, namespace=namespaces)
    def insert(self, values: list[int], namespace: bytes) -> tuple[list[int], Position]:
        end = self.tree.insert(ids(values), self.tree.root(namespace))
        self.known[namespace].append(values)
        return values[: end.num_tokens], end

    @rule(target=positions, values=sequences, namespace=namespaces)
    def match(self, values: list[int], namespace: bytes) -> tuple[list[int], Position]:
        found = self.tree.match(ids(values), self.tree.root(namespace))
        self.check_match(values, found, namespace)
        return values[: found.num_tokens], found

    @rule(target=positions, start=positions, more=sequences)
    def insert_on(self, start: tuple[list[int], Position], more: list[int]) -> tuple[list[int], Position]:
        values = start[0] + more
        end = self.tree.insert(ids(values), start[1])
        self.known[start[1].namespace].append(values)
        return values[: end.num_tokens], end

    @rule(start=positions, more=sequences)
    def match_on(self, start: tuple[list[int], Position], more: list[int]) -> None:
        values = start[0] + more
        self.check_match(values, self.tree.match(ids(values), start[1]), start[1].namespace)

    @invariant()
    def is_consistent(self) -> None:
        self.tree.check_integrity()

    @invariant()
    def holds_each_prefix_once(self) -> None:
        unique = {(name, *other[:n]) for name, known in self.known.items() for other in known for n in range(1, len(other) + 1)}
        assert self.tree.num_tokens + self.tree.num_forgotten_tokens >= len(unique)
        if not self.tree.num_forgotten_tokens:
            assert self.tree.num_tokens == len(unique)


class BoundedTree(UnboundedTree):
    """Things are forgotten: never more than the bound, and what is found was inserted once."""

    max_tokens = 15

    def check_match(self, values: list[int], found: Position, namespace: bytes) -> None:
        assert found.num_tokens <= longest_known(values, self.known[namespace])


class ShortSpans(UnboundedTree):
    """Sequences run over several nodes."""

    span_tokens = 2


class BoundedShortSpans(BoundedTree):
    span_tokens = 2


STEPS = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestUnboundedTree = UnboundedTree.TestCase
TestUnboundedTree.settings = STEPS
TestBoundedTree = BoundedTree.TestCase
TestBoundedTree.settings = STEPS
TestShortSpans = ShortSpans.TestCase
TestShortSpans.settings = STEPS
TestBoundedShortSpans = BoundedShortSpans.TestCase
TestBoundedShortSpans.settings = STEPS


def test_long_sequences_are_found_whole_and_cut_where_they_differ() -> None:
    tree = PrefixTree(10**7, span_tokens=500)
    rng = random.Random(5)
    known: list[list[int]] = []
    for _ in range(40):
        base = rng.choice(known) if known else []
        values = base[: rng.randrange(len(base) + 1)] + [rng.randrange(200_000) for _ in range(rng.randrange(1500))]
        assert tree.match(ids(values)).num_tokens == longest_known(values, known)
        tree.insert(ids(values))
        known.append(values)
        tree.check_integrity()


def test_positions_survive_later_splits() -> None:
    tree = PrefixTree(1000)
    middle = tree.insert(ids([1, 2, 3]))
    end = tree.insert(ids([1, 2, 3, 4, 5, 6]), middle)
    tree.insert(ids([1, 2, 9]))
    tree.insert(ids([1, 2, 3, 4, 9]))
    assert tree.match(ids([1, 2, 3, 4, 9, 9]), middle).num_tokens == 5
    assert tree.match(ids([1, 2, 3, 4, 5, 6, 7]), end).num_tokens == 6


def test_a_shortened_position_is_the_place_on_the_way_there() -> None:
    tree = PrefixTree(1000)
    end = tree.insert(ids([1, 2, 3, 4, 5, 6]))
    tree.insert(ids([1, 2, 3, 9]))
    for num_tokens in range(7):
        cut = Position(end.node, num_tokens)
        assert tree.match(ids([*range(1, num_tokens + 1), 8]), cut).num_tokens == num_tokens


def test_the_least_recently_used_leaf_is_forgotten_first() -> None:
    tree = PrefixTree(9)
    tree.insert(ids([1, 1, 1, 5, 5]))
    tree.insert(ids([1, 1, 1, 6, 6]))
    tree.match(ids([1, 1, 1, 5, 5]))
    tree.insert(ids([7, 7, 7]))
    assert tree.match(ids([1, 1, 1, 6, 6])).num_tokens == 3
    assert tree.match(ids([1, 1, 1, 5, 5])).num_tokens == 5
    assert (tree.num_tokens, tree.num_forgotten_tokens) == (8, 2)


def test_a_forgotten_position_means_its_surviving_ancestor() -> None:
    tree = PrefixTree(6)
    shared = tree.insert(ids([1, 1]))
    tree.insert(ids([1, 1, 2, 2]), shared)
    forgotten = tree.insert(ids([1, 1, 3, 3]), shared)
    tree.match(ids([1, 1, 2, 2]))
    tree.insert(ids([1, 1, 4, 4]), shared)
    assert tree.surviving(forgotten).num_tokens == 2
    assert tree.match(ids([1, 1, 3, 3, 5]), forgotten).num_tokens == 2
    again = tree.insert(ids([1, 1, 3, 3, 5]), forgotten)
    assert tree.match(ids([1, 1, 3, 3, 5])).num_tokens == again.num_tokens == 5


@pytest.mark.case("KVM-15")
def test_other_tokens_where_a_forgotten_branch_was_are_not_taken_for_it() -> None:
    tree = PrefixTree(5)
    trunk = tree.insert(ids([1, 1]))
    tree.insert(ids([1, 1, 8]), trunk)
    lost = tree.insert(ids([1, 1, 2, 2]), trunk)
    tree.match(ids([1, 1, 8]))
    tree.insert(ids([9]))
    tree.insert(ids([1, 1, 3, 3]), trunk)
    assert tree.surviving(lost).num_tokens <= 2


def test_a_sequence_larger_than_the_tree_keeps_what_fits() -> None:
    tree = PrefixTree(200, span_tokens=50)
    end = tree.insert(ids(list(range(500))))
    assert end.num_tokens == tree.num_tokens == 200
    tree.check_integrity()


def test_many_short_sequences_are_bounded_too() -> None:
    tree = PrefixTree(64)
    for value in range(3000):
        tree.insert(ids([value]), tree.root(value.to_bytes(4, "big")))
    assert tree.num_tokens <= 64
    tree.check_integrity()


def test_namespaces_share_nothing() -> None:
    tree = PrefixTree(100)
    tree.insert(ids([1, 2, 3]), tree.root(b"a"))
    assert tree.match(ids([1, 2, 3]), tree.root(b"b")).num_tokens == 0
    assert tree.match(ids([1, 2, 3]), tree.root(b"a")).num_tokens == 3
