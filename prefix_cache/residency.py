"""The blocks of one KV group that are resident in one tier, under two names: the engine's hash and our own `BlockHash`.

Ours is computed from the event's parent and token ids, so a prompt's blocks can be looked up without knowing how the engine hashes.
Blocks stand in `runs`; what is beside them here is small or rare.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from prefix_cache.blocks import BlockHash
from prefix_cache.event_names import block_hashes, block_name, block_names, first_parent
from prefix_cache.events import BlockStored, EngineHash
from prefix_cache.orphans import Orphans
from prefix_cache.removals import Removals, trim
from prefix_cache.runs import Run, Runs


class Residency:
    """A state machine without a clock; every structure is bounded. `max_blocks` bounds what the engine announces, for when it errs."""

    __slots__ = (
        "_copies",
        "_learned",
        "_limit",
        "_orphans",
        "_removed",
        "_runs",
        "num_departures",
        "num_dropped_blocks",
    )

    def __init__(self, max_blocks: int, num_departures: int = 0) -> None:
        self._limit = max_blocks
        self._runs = Runs()
        self._copies: dict[int, int] = {}
        """Copies beyond the first, by name."""
        self._learned: dict[BlockHash, None] = {}
        """Known from usage, not from events: we cannot tell when these leave."""
        self._orphans = Orphans()
        self._removed = Removals(max_blocks)
        """By the `num_departures` of then."""
        self.num_dropped_blocks = 0
        self.num_departures = num_departures
        """Times that blocks may have left; as long as it stands still, what matched once still does."""

    @property
    def num_blocks(self) -> int:
        """Different resident blocks that the engine announced, with those that cannot be matched."""
        return self._runs.num_blocks

    @property
    def num_unresolved_blocks(self) -> int:
        """Resident blocks whose prefix is not known; they never match."""
        return self._runs.num_unresolved

    def store(self, event: BlockStored) -> None:
        """Take in the blocks of one event."""
        names = block_names(event.block_hashes)
        if not names:
            return
        at = self._runs.find(block_name(event.parent_block_hash)) if event.parent_block_hash is not None else None
        parent = self._parent_hash(event, at)
        if parent is None:
            self._enter_unresolved(names)
            self._orphans.add(event)
            return
        hashes = block_hashes(event, parent)
        if len(hashes) != len(names):
            self._enter_unresolved(names)
            return
        self._enter(names, hashes, at)
        if self._orphans:
            self._resolve_children(list(zip(names, hashes, strict=True)))

    def remove(self, hashes: Sequence[EngineHash], departed: dict[int, BlockHash] | None = None) -> None:
        """One copy of each leaves; blocks that were never announced are ignored. `departed` is given the hashes of those by their names."""
        self.num_departures += 1
        names = block_names(hashes)
        if self._copies:
            names = [name for name in names if not self._remove_copy(name)]
        for gone_names, gone in self._runs.take(names):
            self._removed.note(gone, self.num_departures)
            if departed is not None:
                departed.update(zip(gone_names, reversed(gone), strict=False))  # without hashes where they are not known
        self._removed.trim()

    def clear(self, *, announced: bool) -> None:
        """Forget all blocks. `announced`: the engine said that they are gone, so they count as removed; else nothing is known of them."""
        self.num_departures += 1
        if announced:
            self._removed.note_all(self._runs.hashes, self.num_departures)
            self._removed.note_all(self._learned, self.num_departures)
            self._removed.trim()
        else:
            self._removed.clear()
        self._runs.clear()
        self._copies.clear()
        self._learned.clear()
        self._orphans.clear()

    def match(self, hashes: Sequence[BlockHash], start: int = 0) -> int:
        """How many of `hashes` are resident from the first on, in blocks; those before `start` are taken as resident."""
        index, stop = start, len(hashes)
        heads, learned = self._runs.heads, self._learned
        if 0 < start < stop and hashes[start] not in heads and hashes[start] not in learned:
            index = 0  # it may stand inside a run that begins before it
        while index < stop:
            run = heads.get(hashes[index])
            if run is not None:
                index += run.num_equal(hashes, index)
            elif index < start or hashes[index] in learned:
                index += 1
            else:
                break
        return max(start, index)

    def touch(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """The first `num_blocks` of `hashes`, as far as they were announced, are used now; the engine frees them from the last one on."""
        for run, used in reversed(list(self._announced(hashes, num_blocks))):
            self._runs.use(run, used)

    def num_announced(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """How many of the first `num_blocks` of `hashes`, from the first on, the engine has announced."""
        return sum(held for _, held in self._announced(hashes, num_blocks))

    def num_left(self, hashes: Sequence[BlockHash], num_matched: int, num_taken: int) -> int:
        """How many of the first `num_matched` of `hashes`, which are here, stay when the `num_taken` blocks used the longest ago go."""
        index, left = 0, self._runs.without_oldest(num_taken)
        while index < num_matched:
            run = self._runs.heads.get(hashes[index])
            if run is None:  # known from usage
                index += 1
                continue
            equal = run.num_equal(hashes, index)
            if left.get(run, equal) < equal:
                return min(num_matched, index + left[run])
            index += equal
        return num_matched

    @property
    def num_copies(self) -> int:
        """Blocks that stand here beyond the first of their name."""
        return sum(self._copies.values())

    def _announced(self, hashes: Sequence[BlockHash], num_blocks: int) -> Iterator[tuple[Run, int]]:
        """Runs that hold the first blocks of `hashes`, with the number of those in each."""
        index = 0
        while index < num_blocks and (run := self._runs.heads.get(hashes[index])) is not None:
            held = min(run.num_equal(hashes, index), num_blocks - index)
            yield run, held
            index += held

    def resident_hashes(self) -> set[BlockHash]:
        """Blocks that the engine announced and those known from usage."""
        return {*self._runs.hashes, *self._learned}

    def hash_of(self, name: int) -> BlockHash | None:
        """Our hash of the block that the engine calls so; None: it is not here, or not known. Searches all runs: for rare questions."""
        found = self._runs.find(name)
        return (found[0].hash_at(found[1]) or None) if found is not None else None

    def is_only_learned(self, block_hash: BlockHash) -> bool:
        """Whether it is known from usage and no event has told of it yet."""
        return block_hash in self._learned

    def was_removed(self, block_hash: BlockHash) -> bool:
        """Whether it was resident, is not now, and the engine announced that."""
        return self._removed.is_away(block_hash)

    def removed_since(self, block_hash: BlockHash, num_departures: int) -> bool:
        """Whether its removal was announced after there had been `num_departures`, also if it has been stored again."""
        return self._removed.since(block_hash, num_departures)

    def num_returned_since(self, hashes: Sequence[BlockHash], num_departures: int) -> int:
        """How many of `hashes` left after there had been `num_departures`, and are back."""
        return sum(self.removed_since(block_hash, num_departures) and self._runs.holds(block_hash) for block_hash in hashes)

    def contradicts(self, block_hash: BlockHash) -> bool:
        """Whether a miss of this block proves us wrong: announced as resident, and never as removed."""
        return block_hash not in self._removed and self._runs.holds(block_hash)

    def learn(self, hashes: Sequence[BlockHash], start: int, stop: int, last_hit: BlockHash | None) -> None:
        """A finished request computed or reused `hashes[start:stop]` of its prompt; `last_hit` was the last block that it reused."""
        index = 0
        while index < stop:
            run = self._runs.heads.get(hashes[index])
            if run is not None:
                index += run.num_equal(hashes, index)
                continue
            if index >= start and hashes[index] not in self._removed:
                self._learned[hashes[index]] = None
            index += 1
        trim(self._learned, self._limit)
        if last_hit is not None:
            self._orphans.confirm(last_hit)
        for parent in self._orphans.parents:
            first = self._orphans.first_of(parent)  # one that was entered before may have resolved this one
            anchor = self._orphans.anchor_of(first, self._learned) if first is not None else None
            if anchor is not None:
                self._enter_parent(parent, anchor)

    def _remove_copy(self, name: int) -> bool:
        num_copies = self._copies.pop(name, 0)
        if num_copies > 1:
            self._copies[name] = num_copies - 1
        return num_copies > 0

    def _parent_hash(self, event: BlockStored, at: tuple[Run, int] | None) -> BlockHash | None:
        if event.parent_block_hash is None:
            return first_parent(event)
        if at is not None and at[0].hashes:
            return at[0].hash_at(at[1])
        anchor = self._orphans.anchor_of(event, self._learned)
        if anchor is not None:
            self._enter_parent(block_name(event.parent_block_hash), anchor)
        return anchor

    def _enter_parent(self, name: int, block_hash: BlockHash) -> None:
        for _ in self._runs.take([name]):
            pass
        self._enter([name], [block_hash], None)
        self._resolve_children([(name, block_hash)])

    def _enter(self, names: Sequence[int], hashes: Sequence[BlockHash], at: tuple[Run, int] | None) -> None:
        """Blocks of one chain enter, the first behind `at`. Those that stand here already are copies."""
        index, known = 0, self._standing(hashes, 0, at)
        while index < len(names):
            if known is not None:
                index += self._copy(names, hashes, index, *known)
            else:
                stop = self._next_standing(hashes, index + 1)
                self._enter_new(names[index:stop], hashes[index:stop], at)
                index = stop
            known, at = self._standing(hashes, index, None), None
        over = self._runs.num_blocks - self._limit
        if over > 0:
            self.num_dropped_blocks += over
            self.num_departures += 1
            for _ in self._runs.drop_oldest(over):
                pass

    def _standing(self, hashes: Sequence[BlockHash], index: int, at: tuple[Run, int] | None) -> tuple[Run, int] | None:
        """Run and index of a block behind `at`, or at the head of a run."""
        if index == len(hashes):
            return None
        if at is not None and at[0].hash_at(at[1] + 1) == hashes[index]:
            return at[0], at[1] + 1
        run = self._runs.heads.get(hashes[index])
        return (run, 0) if run is not None else None

    def _next_standing(self, hashes: Sequence[BlockHash], index: int) -> int:
        """Where the next run begins whose blocks stand here already."""
        if not self._runs.has_heads(hashes[index:]):
            return len(hashes)
        return next(place for place in range(index, len(hashes)) if hashes[place] in self._runs.heads)

    def _copy(self, names: Sequence[int], hashes: Sequence[BlockHash], index: int, run: Run, place: int) -> int:
        """Count copies from `index` on, which stand in `run` from `place` on; how many blocks those are."""
        num_blocks = 0
        while index + num_blocks < len(names) and run.hash_at(place + num_blocks) == hashes[index + num_blocks]:
            name = names[index + num_blocks]
            if run.name_at(place + num_blocks) == name:
                self._copies[name] = self._copies.get(name, 0) + 1
            else:  # the engine calls the block by another name now
                self._runs.rename(run, place + num_blocks, name)
            num_blocks += 1
        return num_blocks

    def _enter_new(self, names: Sequence[int], hashes: Sequence[BlockHash], at: tuple[Run, int] | None) -> None:
        if self._runs.num_unresolved:
            self._count_unresolved(names)
        self._runs.append(names, hashes, at)
        if self._learned and not self._learned.keys().isdisjoint(hashes):
            for block_hash in hashes:
                self._learned.pop(block_hash, None)
        self._removed.note_back(hashes)

    def _count_unresolved(self, names: Sequence[int]) -> None:
        """Blocks that stand here without our hash come again with it: what stood is a copy of what comes."""
        waiting = self._runs.among(names, unresolved=True)
        for _ in self._runs.take(list(waiting)):
            pass
        for name in waiting:
            self._copies[name] = self._copies.get(name, 0) + 1

    def _enter_unresolved(self, names: Sequence[int]) -> None:
        held = self._runs.among(names)
        for name in held:
            self._copies[name] = self._copies.get(name, 0) + 1
        new = [name for name in names if name not in held]
        if new:
            self._runs.append(new, ())

    def _resolve_children(self, parents: list[tuple[int, BlockHash]]) -> None:
        """Resolve the orphans below `parents`, and theirs."""
        while parents:
            parent_name, parent = parents.pop()
            for event in self._orphans.take(parent_name):
                children = list(zip(block_names(event.block_hashes), block_hashes(event, parent), strict=False))
                self._resolve(children)
                parents += children

    def _resolve(self, blocks: Sequence[tuple[int, BlockHash]]) -> None:
        """The blocks of a chain whose hashes are known now; those that have left meanwhile stay away."""
        waiting = self._runs.among([name for name, _ in blocks], unresolved=True)
        for _ in self._runs.take(list(waiting)):
            pass
        for is_waiting, group in itertools.groupby(blocks, lambda block: block[0] in waiting):
            if is_waiting:
                names, hashes = zip(*group, strict=True)
                self._enter(names, hashes, None)
