"""What an exclusive tier keeps: blocks that have left the GPU, each in a slot of host memory, until they are wanted there again.

Blocks of one chain that left one after the other and belong to the same branches are a run, an `Extent` of the same policies that order
the GPU. A run on which deeper ones hang is no victim, and a victim loses its tail first. Nothing here scans: what is asked of a block is
asked by its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from admission.eviction.policy import EvictionPolicy, Extent
from agentserve.engines.plugin.nodes import Branch, Key, Run, like, rank

_NO_SLOT: Final = -1
"""Of a block that is not sure yet to find room."""


class ExclusiveTier:
    """`num_slots` blocks. `clock`: seconds, only rising."""

    def __init__(self, num_slots: int, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.num_slots = num_slots
        self.num_dropped_blocks = 0
        """That nobody alive owned any more, or that the GPU had computed again."""
        self.num_displaced_blocks = 0
        """That were alive and had to make room, or found none."""
        self._policy = policy
        self._clock = clock
        self._free = list(range(num_slots - 1, -1, -1))
        self._retired: list[int] = []
        """Slots that are being read: free from the next step on."""
        self._kept: dict[Key, Run] = {}
        self._runs: dict[int, Run] = {}
        """By extent id."""
        self._hanging: dict[Key | None, dict[Run, None]] = {}
        """Runs by the block that comes before their first one."""
        self._promised: list[Run] = []
        self._next_id = 0
        self._changed: dict[Key, bool] = {}
        """Whether a block is here, of those that came or went since `take_changes`: at most what is here now and what was then."""

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def store(self, key: Key, parent: Key | None, position: int, facts: Extent, owners: Iterable[Branch]) -> int | None:
        """A block leaves the GPU, where it stood at `position` of its chain behind `parent`. The slot that it is to be copied to; None:
        it is here already, or everything here is worth more. Blocks of a chain come deepest first. Changes state."""
        if key in self._kept:
            return None
        run = self._take_in(key, parent, position, facts, set(owners))
        if not self._free:
            self._displace()
        if key not in self._kept:
            return None  # it was itself the least
        if not self._free:
            self._pop_front(run, 1)
            self.num_displaced_blocks += 1
            return None
        slot = run.slots[0] = self._free.pop()
        return slot

    def match(self, keys: Sequence[Key], first: int, limit: int) -> int:
        """How many blocks of a chain are here, from position `first` on and before `limit`."""
        end = first
        while end < limit and keys[end] in self._kept:
            end += 1
        return end - first

    def promise(self, keys: Iterable[Key]) -> None:
        """These are not given up before they are loaded, or something else is promised. Changes state."""
        now = self._clock()
        before, self._promised = self._promised, list(dict.fromkeys(self._kept[key] for key in keys))
        for run in (*before, *self._promised):
            run.is_promised = run in self._promised
            self._rank(run, now)

    def load(self, keys: Sequence[Key], first: int, num_blocks: int) -> list[int]:
        """The slots of `num_blocks` blocks from position `first` of a chain on, in its order. They go to the GPU and leave the tier; their
        slots are not given away before `settle`. Changes state."""
        slots: list[int] = []
        position = first
        while position < first + num_blocks:
            run = self._kept[keys[position]]
            ahead = position - run.start  # the GPU has these, or they could not be followed
            count = min(run.end, first + num_blocks) - position
            self._pop_front(run, ahead)
            slots += self._pop_front(run, count, is_read=True)
            position += count
        return slots

    def settle(self) -> None:
        """The step in which slots were read is on its way to the workers. Changes state."""
        self._free += self._retired
        self._retired.clear()

    def computed(self, keys: Sequence[Key]) -> None:
        """The GPU has the blocks of this chain, from its root on: none of them is kept twice. Changes state."""
        for position, key in enumerate(keys):
            run = self._kept.get(key)
            if run is not None:
                count = min(position + 1 - run.start, len(run.keys))
                self.num_dropped_blocks += count
                self._pop_front(run, count)

    def disown(self, branch: Branch, run: Run) -> None:
        """It is dead to `branch`; dropped at once if nobody else owns it. Changes state."""
        run.owners.discard(branch)
        branch.kept.pop(run, None)
        if not run.owners:
            self.num_dropped_blocks += len(run.keys)
            self._pop_front(run, len(run.keys))

    def cut(self, branch: Branch, depth: int) -> None:
        """What `branch` has at block `depth` and behind is dead to it. Changes state."""
        for run in list(branch.kept):
            if run.start >= depth:
                self.disown(branch, run)
            elif run.owners == {branch}:
                while run.end > depth and not self._hanging.get(run.keys[-1]):
                    self.num_dropped_blocks += 1
                    self._pop_back(run)

    def reconsider(self, run: Run) -> None:
        """Facts of its extent have changed. Changes the policy's state."""
        if run.is_ranked:
            self._policy.reconsider(run.extent, self._clock())

    def switch(self, policy: EvictionPolicy) -> None:
        """From now on `policy` ranks. Changes state."""
        self._policy = policy
        now = self._clock()
        for run in self._runs.values():
            run.is_known = run.is_ranked
            if run.is_ranked:
                policy.insert(run.extent, now)

    def clear(self) -> None:
        """Nothing that is kept may be used any more. Changes state."""
        for run in list(self._runs.values()):
            self._pop_front(run, len(run.keys))
        self._promised.clear()

    def take_changes(self) -> tuple[list[Key], list[Key]]:
        """Blocks that came and blocks that went since the last call; what did both is in neither. Changes state."""
        changed, self._changed = self._changed, {}
        return [key for key, is_here in changed.items() if is_here], [key for key, is_here in changed.items() if not is_here]

    def abandon(self) -> list[Key]:
        """Nothing here is used or changed any more, whatever state it is in: the blocks that `take_changes` has told of as here."""
        for key in self._kept:
            self._change(key, is_here=False)
        return self.take_changes()[1]

    def check_integrity(self) -> None:
        """Assert what must hold between calls. O(blocks)."""
        self._policy.check_integrity()
        assert all(is_here == (key in self._kept) for key, is_here in self._changed.items())
        slots = [slot for run in self._runs.values() for slot in run.slots]
        assert sorted([*slots, *self._free, *self._retired]) == list(range(self.num_slots))
        assert len(self._kept) == len(slots)
        for run in self._runs.values():
            assert run.keys
            assert all(self._kept[key] is run for key in run.keys)
            assert run in self._hanging[run.parent]
            assert run.is_ranked == (not self._hanging.get(run.keys[-1]) and not run.is_promised)
            assert (run.extent.num_blocks, run.extent.end_block) == (len(run.keys), run.end)
            assert all(run in branch.kept for branch in run.owners)
        assert sum(map(len, self._hanging.values())) == len(self._runs)

    def _take_in(self, key: Key, parent: Key | None, position: int, facts: Extent, owners: set[Branch]) -> Run:
        """In front of the one run that hangs on it, where nothing tells the two apart; else as a run of its own. Without a slot yet."""
        now = self._clock()
        below = self._hanging.get(key, {})
        run = next(iter(below)) if len(below) == 1 else None
        if run is not None and run.owners == owners and run.extent.session_id == facts.session_id:
            self._hang(run, parent)
            run.keys.appendleft(key)
            run.slots.appendleft(_NO_SLOT)
            run.start = position
            _renew(run.extent, facts)
        else:
            self._next_id += 1
            run = Run(like(facts, self._next_id), position, parent, owners)
            run.extent.protected = False  # by what waits for the GPU's blocks
            run.keys.append(key)
            run.slots.append(_NO_SLOT)
            self._runs[run.extent.id] = run
            self._hanging.setdefault(parent, {})[run] = None
            for branch in owners:
                branch.kept[run] = None
        self._kept[key] = run
        self._change(key, is_here=True)
        self._measure(run)
        if run.is_ranked:
            self._policy.reconsider(run.extent, now)
        self._rank(run, now)
        self._rank_of(parent, now)
        return run

    def _displace(self) -> None:
        """Make room by what the policy gives up first, if there is anything."""
        extent = self._policy.to_evict(self._clock())
        if extent is not None:
            self._pop_back(self._runs[extent.id])
            self.num_displaced_blocks += 1

    def _pop_back(self, run: Run) -> None:
        self._gone(run.keys.pop())
        slot = run.slots.pop()
        if slot != _NO_SLOT:
            self._free.append(slot)
        self._shrunk(run)

    def _pop_front(self, run: Run, count: int, *, is_read: bool = False) -> list[int]:
        """The slots of its first `count` blocks, which leave."""
        if not count:
            return []
        slots = [run.slots.popleft() for _ in range(count)]
        keys = [run.keys.popleft() for _ in range(count)]
        for key in keys:
            self._gone(key)
        (self._retired if is_read else self._free).extend(slot for slot in slots if slot != _NO_SLOT)
        run.start += count
        if run.keys:
            before = run.parent
            self._hang(run, keys[-1])
            self._rank_of(before, self._clock())
        self._shrunk(run)
        return slots

    def _gone(self, key: Key) -> None:
        del self._kept[key]
        self._change(key, is_here=False)

    def _change(self, key: Key, *, is_here: bool) -> None:
        if self._changed.pop(key, None) is None:  # else it is again what it was
            self._changed[key] = is_here

    def _shrunk(self, run: Run) -> None:
        now = self._clock()
        self._measure(run)
        if run.keys:
            self._rank(run, now)
            return
        if run.is_known:
            self._policy.forget(run.extent, now)
        del self._runs[run.extent.id]
        for branch in run.owners:
            branch.kept.pop(run, None)
        if run.is_promised:
            self._promised.remove(run)
        self._unhang(run)
        self._rank_of(run.parent, now)

    def _hang(self, run: Run, parent: Key | None) -> None:
        self._unhang(run)
        run.parent = parent
        self._hanging.setdefault(parent, {})[run] = None

    def _unhang(self, run: Run) -> None:
        beside = self._hanging[run.parent]
        del beside[run]
        if not beside:
            del self._hanging[run.parent]

    def _measure(self, run: Run) -> None:
        run.extent.num_blocks, run.extent.end_block = len(run.keys), run.end

    def _rank_of(self, key: Key | None, now: float) -> None:
        run = self._kept.get(key) if key is not None else None
        if run is not None:
            self._rank(run, now)

    def _rank(self, run: Run, now: float) -> None:
        """Tell the policy whether it may be chosen, where that has changed."""
        is_free = bool(run.keys) and not self._hanging.get(run.keys[-1]) and not run.is_promised
        rank(run, self._policy, now, is_free=is_free)


def _renew(extent: Extent, facts: Extent) -> None:
    """What is known of a session's newest block holds for all of its run."""
    extent.freed_seconds = max(extent.freed_seconds, facts.freed_seconds)
    extent.return_class, extent.priority, extent.retention_seconds = facts.return_class, facts.priority, facts.retention_seconds
