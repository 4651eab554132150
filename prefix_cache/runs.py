"""Resident blocks as runs: stretches of one chain that entered one behind the other, 24 bytes a block and two table entries a run.

A block hash is chained, so within a run each block is the only parent of the next. What follows from that is what makes runs cheap:

* a prompt enters a run at its first block or not at all, and leaves it for good: finding it takes one look-up and a bisection;
* engines evict the end of a chain before its beginning: a removal nearly always takes the last block of a run.

Any other removal cuts the run in two, and any other look-up by the engine's name searches all names (memmem, some 50 µs for 50,000 blocks).

Who uses a block uses all before it, so a run's blocks were last used the later the nearer they are to its head: few stretches say when.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from prefix_cache.blocks import BlockHash

NAME_BYTES = 8
HASH_BYTES = 16


class Run:
    """Consecutive blocks: engine names in 8 bytes each, our hashes in 16. `hashes` is empty while the chain up to them is not known."""

    __slots__ = ("hashes", "names", "uses")

    def __init__(self, names: bytes | bytearray, hashes: bytes | bytearray) -> None:
        self.names = bytearray(names)
        self.hashes = bytearray(hashes)
        self.uses: list[tuple[int, int]] = []
        """Leading blocks, and the number of their last use: all blocks first, then fewer that were used later."""

    def __len__(self) -> int:
        return len(self.names) // NAME_BYTES

    def hash_at(self, index: int) -> BlockHash:
        """Our hash of one block; b"" where it is not known."""
        return bytes(self.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])

    def name_at(self, index: int) -> int:
        return int.from_bytes(self.names[index * NAME_BYTES : (index + 1) * NAME_BYTES], "little")

    def index(self, packed: bytes) -> int:
        """Where the block of this name stands; −1 if it does not."""
        at = self.names.find(packed)
        while at % NAME_BYTES and at >= 0:  # −1 is no multiple either
            at = self.names.find(packed, at + 1)
        return at // NAME_BYTES if at >= 0 else -1

    def num_equal(self, hashes: Sequence[BlockHash], start: int) -> int:
        """How many of `hashes[start:]` stand at the head of this run; the first does."""
        own = self.hashes
        size, most = len(own) // HASH_BYTES, len(hashes) - start
        if size <= most and own.endswith(hashes[start + size - 1]):
            return size
        equal, differs = 1, min(size, most) + 1
        probe = differs - 1
        while equal + 1 < differs:
            if own[(probe - 1) * HASH_BYTES : probe * HASH_BYTES] == hashes[start + probe - 1]:
                equal = probe
            else:
                differs = probe
            probe = (equal + differs) // 2
        return equal


class Runs:
    """All runs of one cache. Names are ints below 2^64; each name stands once."""

    __slots__ = ("_num_uses", "_runs", "_tails", "_used", "heads", "num_blocks", "num_unresolved")

    def __init__(self) -> None:
        self._runs: dict[Run, None] = {}
        """The oldest first."""
        self.heads: dict[BlockHash, Run] = {}
        """Runs by their first block. Read only."""
        self._tails: dict[int, Run] = {}
        self._used: dict[int, Run] = {}
        """By the number of a use that is the last one of some blocks; the longest ago first."""
        self._num_uses = 0
        self.num_blocks = 0
        self.num_unresolved = 0

    def clear(self) -> None:
        self._runs.clear()
        self.heads.clear()
        self._tails.clear()
        self._used.clear()
        self.num_blocks = self.num_unresolved = 0

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @property
    def hashes(self) -> Iterator[BlockHash]:
        """Our hash of each block where it is known."""
        return (run.hash_at(index) for run in self._runs if run.hashes for index in range(len(run)))

    def has_heads(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether any of these blocks begins a run."""
        return not self.heads.keys().isdisjoint(hashes)

    def among(self, names: Sequence[int], *, unresolved: bool = False) -> set[int]:
        """Those of `names` that are here. Searches all runs (or those that are unresolved)."""
        wanted = set(names)
        return {name for run in self._runs if not (unresolved and run.hashes) for name in wanted.intersection(array("Q", run.names))}

    def find(self, name: int) -> tuple[Run, int] | None:
        """Run and index of the block of this name."""
        run = self._tails.get(name)
        if run is not None:
            return run, len(run) - 1
        packed = name.to_bytes(NAME_BYTES, "little")
        return next(((run, index) for run in self._runs if (index := run.index(packed)) >= 0), None)

    def holds(self, block_hash: BlockHash) -> bool:
        """Whether a block of this hash is anywhere. Searches all runs: for rare questions."""
        if block_hash in self.heads:
            return True
        for run in self._runs:
            at = run.hashes.find(block_hash)
            while at % HASH_BYTES and at >= 0:
                at = run.hashes.find(block_hash, at + 1)
            if at >= 0:
                return True
        return False

    def append(self, names: Sequence[int], hashes: Sequence[BlockHash], parent: tuple[Run, int] | None = None) -> None:
        """Add blocks that are not here, behind `parent` if that is the end of a run. `hashes` is empty or as long as `names`."""
        packed, joined = array("Q", names).tobytes(), b"".join(hashes)
        self.num_blocks += len(names)
        self.num_unresolved += 0 if joined else len(names)
        if parent is not None and parent[1] == len(parent[0]) - 1 and bool(parent[0].hashes) == bool(joined):
            run = parent[0]
            del self._tails[_last_name(run)]
            run.names += packed
            run.hashes += joined
            self._tails[names[-1]] = run
            self.use(run, len(run))
        else:
            self._enter(Run(packed, joined))

    def use(self, run: Run, num_blocks: int) -> None:
        """The first `num_blocks` of a run are used now."""
        uses = run.uses
        while uses and uses[-1][0] <= num_blocks:
            del self._used[uses.pop()[1]]
        self._num_uses += 1
        uses.append((num_blocks, self._num_uses))
        self._used[self._num_uses] = run

    def without_oldest(self, num_blocks: int) -> dict[Run, int]:
        """Blocks that are left of each run that loses some, when those used the longest ago go, a chain's last ones first."""
        left: dict[Run, int] = {}
        for number, run in self._used.items():
            if num_blocks <= 0:
                break
            stop = left.get(run, len(run))
            start = next((later for later, use in run.uses if use > number), 0)
            left[run] = max(start, stop - num_blocks)
            num_blocks -= stop - left[run]
        return left

    def take(self, names: Sequence[int]) -> Iterator[tuple[Sequence[int], list[BlockHash]]]:
        """Remove the blocks of these names, if they are here. In portions: their names, the last block first, and their hashes, the first
        block first, or none where those are not known."""
        done = 0
        while done < len(names):
            run = self._tails.get(names[done])
            if run is None:
                found = self.find(names[done])
                if found is not None:
                    yield names[done : done + 1], self._cut_out(*found)
                done += 1
                continue
            num_gone = self._num_last(run, names, done)
            done += num_gone
            yield names[done - num_gone : done], self._cut(run, num_gone)

    def rename(self, run: Run, index: int, name: int) -> None:
        """The engine calls a block by another name."""
        is_last = index == len(run) - 1
        if is_last:
            del self._tails[_last_name(run)]
        run.names[index * NAME_BYTES : (index + 1) * NAME_BYTES] = name.to_bytes(NAME_BYTES, "little")
        if is_last:
            self._tails[name] = run

    def drop_oldest(self, num_blocks: int) -> Iterable[list[BlockHash]]:
        """Remove so many blocks from the ends of the oldest runs."""
        while num_blocks > 0:
            run = next(iter(self._runs))
            num_gone = min(num_blocks, len(run))
            num_blocks -= num_gone
            yield self._cut(run, num_gone)

    def check_integrity(self) -> None:
        """Assert that tables and counts agree with the runs. For tests."""
        assert self.num_blocks == sum(map(len, self._runs))
        assert self.num_unresolved == sum(len(run) for run in self._runs if not run.hashes)
        assert all(not run.hashes or len(run.hashes) == HASH_BYTES * len(run) for run in self._runs)
        assert self._tails == {_last_name(run): run for run in self._runs}
        assert self.heads == {run.hash_at(0): run for run in self._runs if run.hashes}
        assert self._used == {number: run for run in self._runs for _, number in run.uses}
        assert all(run.uses[0][0] == len(run) and run.uses == sorted(run.uses, key=lambda use: (-use[0], use[1])) for run in self._runs)

    def _enter(self, run: Run) -> None:
        self._runs[run] = None
        self._tails[_last_name(run)] = run
        if run.hashes:
            self.heads[run.hash_at(0)] = run
        self.use(run, len(run))

    def _shorten_uses(self, run: Run, num_blocks: int) -> None:
        """Only the first `num_blocks` of a run are left."""
        uses = run.uses
        while uses and (not num_blocks or (len(uses) > 1 and uses[1][0] >= num_blocks)):
            del self._used[uses.pop(0)[1]]
        if uses:
            uses[0] = num_blocks, uses[0][1]

    @staticmethod
    def _num_last(run: Run, names: Sequence[int], done: int) -> int:
        """How many of `names[done:]` are the last blocks of `run`, its very last first; the first one is."""
        if done + 1 == len(names) or len(run) == 1:
            return 1
        part = names[done : done + len(run)]
        packed = array("Q", part[::-1]).tobytes()
        if run.names.endswith(packed):  # nearly always
            return len(part)
        held = array("Q", bytes(run.names[-len(packed) :]))[::-1]
        return next(index for index, (name, own) in enumerate(zip(part, held, strict=True)) if name != own)

    def _cut(self, run: Run, num_gone: int) -> list[BlockHash]:
        """Take the last blocks of a run."""
        del self._tails[_last_name(run)]
        self._shorten_uses(run, len(run) - num_gone)
        gone = run.hashes[-num_gone * HASH_BYTES :] if run.hashes else b""
        self.num_blocks -= num_gone
        self.num_unresolved -= 0 if gone else num_gone
        if num_gone == len(run):
            del self._runs[run]
            if gone:
                del self.heads[run.hash_at(0)]
        else:
            del run.names[-num_gone * NAME_BYTES :]
            if gone:
                del run.hashes[-num_gone * HASH_BYTES :]
            self._tails[_last_name(run)] = run
        packed = bytes(gone)
        return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]

    def _cut_out(self, run: Run, index: int) -> list[BlockHash]:
        """Take a block that is not the last of its run: what was behind it becomes a run of its own, which counts as used now."""
        behind = Run(run.names[(index + 1) * NAME_BYTES :], run.hashes[(index + 1) * HASH_BYTES :])
        del self._tails[_last_name(run)]
        del run.names[(index + 1) * NAME_BYTES :]
        del run.hashes[(index + 1) * HASH_BYTES :]
        self._tails[_last_name(run)] = run
        self._shorten_uses(run, len(run))
        self._enter(behind)
        return self._cut(run, 1)


def _last_name(run: Run) -> int:
    return int.from_bytes(run.names[-NAME_BYTES:], "little")
