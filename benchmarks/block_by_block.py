"""vLLM's block pool block by block, as plainly as it can be said: what the simulator's extents must agree with, exactly."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from replays.simulator.chains import Branch, Path, covered
from replays.simulator.pool import Use


@dataclass(slots=True, eq=False)
class Block:
    """One physical block; `key` is its hash, if it has one."""

    key: tuple[Branch, int] | None = None
    num_users: int = 0


@dataclass(eq=False)
class BlockByBlock:
    """The interface of `replays.simulator.pool.BlockPool` that the engine uses, under LRU."""

    num_blocks: int
    cached: dict[tuple[Branch, int], list[Block]] = field(default_factory=dict)
    held: dict[int, list[Block]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plain = deque(Block() for _ in range(self.num_blocks))
        self._idle: OrderedDict[Block, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._plain) + len(self._idle)

    @property
    def usage(self) -> float:
        return 1 - self.num_free / self.num_blocks

    @staticmethod
    def computed_depth(path: Path, limit: int) -> int:
        return 0

    def _keys(self, path: Path, low: int, high: int) -> list[tuple[Branch, int]]:
        return [(branch, depth) for branch, start, end in covered(path, low, high) for depth in range(start, end)]

    def hit_depth(self, path: Path, limit: int) -> int:
        keys = self._keys(path, 0, limit)
        return next((index for index, key in enumerate(keys) if key not in self.cached), len(keys))

    def num_idle_in(self, path: Path, depth: int) -> int:
        return sum(not self.cached[key][0].num_users for key in self._keys(path, 0, depth))

    def hold(self, holder: int, path: Path, depth: int, now: float) -> None:
        blocks = [self.cached[key][0] for key in self._keys(path, 0, depth)]
        for block in blocks:
            self._idle.pop(block, None)
            block.num_users += 1
        self.held[holder] = blocks

    def allocate(self, num_blocks: int, now: float) -> None:
        for _ in range(num_blocks):
            if self._plain:
                self._plain.popleft()
                continue
            block, _ = self._idle.popitem(last=False)
            assert block.key is not None
            copies = self.cached[block.key]
            copies.remove(block)
            if not copies:
                del self.cached[block.key]

    def commit(self, holder: int, path: Path, low: int, high: int, now: float) -> None:
        for key in self._keys(path, low, high):
            block = Block(key, 1)
            self.cached.setdefault(key, []).append(block)
            self.held[holder].append(block)

    def free(self, holder: int, path: Path, depth: int, num_plain: int, use: Use, now: float) -> None:
        blocks = self.held.pop(holder)
        assert len(blocks) == depth
        self._plain.extend(Block() for _ in range(num_plain))
        for block in reversed(blocks):
            block.num_users -= 1
            if not block.num_users:
                self._idle[block] = None
