"""Runs of resident blocks against a plain table of names and hashes."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prefix_cache.runs import Run, Runs


def hash_of(chain: tuple[int, ...]) -> bytes:
    return bytes(chain).ljust(16, b"\xff")


def name_of(chain: tuple[int, ...]) -> int:
    """Names whose bytes overlap one another, so that a search which ignores their borders finds the wrong one."""
    return int.from_bytes(bytes(chain).ljust(8, b"\x00"), "little")


class RunsMachine(RuleBasedStateMachine):
    """Chains over two different blocks: they fork, are cut in the middle, lose their ends and grow again."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = Runs()
        self.held: set[tuple[int, ...]] = set()

    @rule(chain=st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple))
    def store(self, chain: tuple[int, ...]) -> None:
        """As an engine does: what is missing behind the blocks that stand here."""
        known = 0
        while known < len(chain) and chain[: known + 1] in self.held:
            known += 1
        stop = known
        while stop < len(chain) and chain[: stop + 1] not in self.held:
            stop += 1
        new = [chain[: end + 1] for end in range(known, stop)]
        if new:
            parent = self.runs.find(name_of(chain[:known])) if known else None
            self.runs.append([name_of(block) for block in new], [hash_of(block) for block in new], parent)
            self.held.update(new)

    @rule(chains=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple), max_size=6))
    def remove(self, chains: list[tuple[int, ...]]) -> None:
        portions = self.runs.take([name_of(chain) for chain in chains])
        gone = [pair for names, hashes in portions for pair in zip(names, reversed(hashes), strict=True)]
        assert sorted(gone) == sorted((name_of(chain), hash_of(chain)) for chain in self.held.intersection(chains))
        self.held.difference_update(chains)

    @rule(chain=st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple), length=st.integers(1, 8))
    def remove_the_end(self, chain: tuple[int, ...], length: int) -> None:
        self.remove([chain[:end] for end in range(len(chain), max(0, len(chain) - length), -1)])

    @rule(chain=st.lists(st.integers(1, 2), min_size=1, max_size=8).map(tuple), num_taken=st.integers(1, 9))
    def use(self, chain: tuple[int, ...], num_taken: int) -> None:
        """A prompt is used: what it stands on is the last to go, and what goes is what `without_oldest` counts."""
        stretches = []
        at = 0
        while at < len(chain) and (run := self.runs.heads.get(hash_of(chain[: at + 1]))) is not None:
            held = run.num_equal([hash_of(chain[: end + 1]) for end in range(len(chain))], at)
            stretches.append((run, held))
            at += held
        for run, held in reversed(stretches):
            self.runs.use(run, held)
        left = self.runs.without_oldest(num_taken)
        assert sum(len(run) - stays for run, stays in left.items()) == min(num_taken, self.runs.num_blocks)
        num_unused = self.runs.num_blocks - sum(held for _, held in stretches)
        if num_taken <= num_unused:
            assert all(left.get(run, held) >= held for run, held in stretches)

    @invariant()
    def holds_what_it_should(self) -> None:
        self.runs.check_integrity()
        assert sorted(self.runs.hashes) == sorted(map(hash_of, self.held))
        for chain in self.held:
            found = self.runs.find(name_of(chain))
            assert found is not None
            run, index = found
            assert (run.hash_at(index), run.name_at(index)) == (hash_of(chain), name_of(chain))
            assert self.runs.holds(hash_of(chain))


TestRuns = RunsMachine.TestCase
TestRuns.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_prompt_leaves_a_run_where_they_differ() -> None:
    hashes = [bytes([number]) * 16 for number in range(100)]
    run = Run(bytes(8 * 100), b"".join(hashes))
    for equal in range(1, 101):
        prompt = [b"x" * 16, *hashes[:equal], *[b"y" * 16] * 50]
        assert run.num_equal(prompt, 1) == equal
        assert run.num_equal(prompt[: equal + 1], 1) == equal


def test_the_oldest_runs_lose_their_ends_first() -> None:
    runs = Runs()
    runs.append([1, 2, 3], [b"a" * 16, b"b" * 16, b"c" * 16])
    runs.append([4, 5], [b"d" * 16, b"e" * 16])
    assert list(runs.drop_oldest(2)) == [[b"b" * 16, b"c" * 16]]
    assert list(runs.drop_oldest(2)) == [[b"a" * 16], [b"e" * 16]]
    assert runs.num_blocks == 1
    runs.check_integrity()
