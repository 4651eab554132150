"""The exclusive tier in an engine's process: what goes to it when the GPU gives it up, what a request gets back, and what workers copy.

Its calls never raise, and never wait: a fault is told to `warn` once, and from then on the tier has nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from admission.eviction.policy import MAY_RETURN, EvictionPolicy
from agentserve.engines.plugin.nodes import Block, Branch, Key, Node, Run
from agentserve.engines.plugin.speeds import Speeds
from agentserve.engines.plugin.tier import ExclusiveTier

NO_SLOT: Final = -1
_GROUP_BYTES: Final = 4
"""vLLM's hash of a cached block ends with the number of its KV cache group."""


@dataclass(frozen=True, slots=True)
class TierJobs:
    """What workers copy in a step: all stores before any load, and both before anything is computed."""

    step: int = 0
    """Its number."""
    stores: tuple[tuple[int, int], ...] = ()
    """GPU block → slot, by their numbers."""
    loads: tuple[tuple[int, int], ...] = ()
    """Slot → GPU block. `NO_SLOT`: what was promised is lost, and is to be computed after all."""


@dataclass(slots=True)
class TierCounts:
    """Blocks, since the engine started."""

    num_stored: int = 0
    num_loaded: int = 0


class OffloadTier:
    """`tier` None: there is none. `block_size` in tokens; `clock`: seconds, only rising."""

    def __init__(
        self, tier: ExclusiveTier | None, block_size: int, clock: Callable[[], float], warn: Callable[[str, Exception], None]
    ) -> None:
        self.counts = TierCounts()
        self.speeds = Speeds(clock)
        self.off_because = "" if tier is not None else "there is no tier"
        self._tier = tier
        self._block_size = block_size
        self._warn = warn
        self._stores: dict[int, int] = {}
        """Slot → GPU block: what a slot is given last is what it gets."""
        self._stored: set[Key] = set()
        self._loads: list[tuple[int, int]] = []
        self._step = 0
        self._abandoned: list[Key] = []
        """What was there when it was turned off, until that has been told."""
        self._promised = ("", 0)
        """Request that was promised something last, and from which block on."""
        self._unsure: dict[Key, int] = {}
        """Blocks whose store no worker has spoken of yet, by its step: until all ranks have them they are not promised."""

    @property
    def is_on(self) -> bool:
        return self._tier is not None

    @property
    def num_slots(self) -> int:
        return 0 if self._tier is None else self._tier.num_slots

    @property
    def num_kept(self) -> int:
        """Blocks."""
        return 0 if self._tier is None else len(self._tier)

    @property
    def num_dropped(self) -> int:
        """Blocks that nobody alive owned any more, or that the GPU had computed again."""
        return 0 if self._tier is None else self._tier.num_dropped_blocks

    @property
    def num_displaced(self) -> int:
        """Blocks that were alive and had to make room, or found none."""
        return 0 if self._tier is None else self._tier.num_displaced_blocks

    def evicted(self, node: Node, blocks: list[Block]) -> None:
        """Victims of the GPU, the deepest of `node` first; it is what is left of them. What is dead is not kept."""
        if node.extent.fate in MAY_RETURN:
            self._safely(self._store, node, blocks)

    def promise(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens that a request will get from here, beyond those that the GPU has."""
        return self._safely(self._promise, request, num_computed_tokens) or 0

    def placed(self, request: Any, blocks: Sequence[Block], num_external_tokens: int) -> None:
        """It got its `blocks`, and what it was promised is to be loaded into some of them."""
        request_id, first = self._promised
        count = num_external_tokens // self._block_size
        wanted = [block.block_id for block in blocks[first : first + count]]
        if request_id != request.request_id or len(wanted) != count:
            self.turn_off(RuntimeError(f"request {request.request_id!r} loads what it was not promised"))
            wanted = [block.block_id for block in blocks]
        slots = self._safely(self._load, request, first, count)
        self._loads += zip(slots or len(wanted) * [NO_SLOT], wanted, strict=True)

    def finished(self, request: Any, branch: Branch, num_cached_blocks: int, *, concludes: bool) -> None:
        """The GPU has the first blocks of its chain. `concludes`: what `branch` had elsewhere is dead to it."""
        self._safely(self._finished, request, branch, num_cached_blocks, concludes)

    def cut(self, branch: Branch, depth: int) -> None:
        """What `branch` has at block `depth` of its chain and behind is dead to it."""
        if branch.kept:
            self._safely(lambda tier: tier.cut(branch, depth))

    def reconsider(self, runs: Iterable[Run]) -> None:
        """Facts of their extents have changed."""
        for run in runs:
            self._safely(lambda tier, run: tier.reconsider(run), run)

    def switch(self, policy: EvictionPolicy) -> None:
        self._safely(lambda tier: tier.switch(policy))

    def clear(self) -> None:
        """vLLM has emptied its prefix cache, and says so itself: nothing may be used any more."""
        self._safely(self._clear)

    def take_changes(self) -> tuple[list[Key], list[Key]]:
        """Blocks that came and blocks that went since the last call, for those who follow what is here. Changes state."""
        if self._tier is not None:
            came, gone = self._safely(lambda tier: tier.take_changes()) or ([], [])
            return came, gone
        gone, self._abandoned = self._abandoned, []
        return [], gone

    def jobs(self, num_tokens: int) -> TierJobs:
        """What the step that was just scheduled, of so many tokens, asks of the workers. Changes state."""
        self._step += 1
        jobs = TierJobs(self._step, tuple((block, slot) for slot, block in self._stores.items()), tuple(self._loads))
        self._unsure.update(dict.fromkeys(self._stored, self._step))
        self._stored.clear()
        self._stores.clear()
        self._loads.clear()
        self._safely(lambda tier: tier.settle())
        self.speeds.step_sent(self._step, num_tokens)
        return jobs

    def done(self, step: int, loaded: tuple[int, float], stored: tuple[int, float], fault: str) -> None:
        """What the workers say of a step: blocks and seconds. Changes state."""
        num_loaded, load_seconds = loaded
        num_stored, store_seconds = stored
        self.speeds.step_done(step, num_loaded * self._block_size, load_seconds, num_stored * self._block_size, store_seconds)
        if self._unsure:
            self._unsure = {key: since for key, since in self._unsure.items() if since > step}
        if fault:
            self.turn_off(RuntimeError(fault))

    def turn_off(self, error: Exception) -> None:
        """From now on there is nothing here; what was promised before is still loaded. Changes state."""
        if self._tier is None:
            return
        self._abandoned = self._tier.abandon()
        self._tier = None
        self.off_because = f"{type(error).__name__}: {error}"
        self._warn("agentserve's offload tier is off, what leaves the GPU is computed again", error)

    def check_integrity(self) -> None:
        """Assert what must hold between steps. O(blocks)."""
        if self._tier is not None:
            self._tier.check_integrity()

    def _store(self, tier: ExclusiveTier, node: Node, blocks: list[Block]) -> None:
        owners = [branch for branch, fate in node.owners.items() if fate in MAY_RETURN]
        above = node.blocks[-1] if node.blocks else node.parent.blocks[-1] if node.parent is not None else None
        chain = [*blocks, above]
        for place, block in enumerate(blocks):
            parent = chain[place + 1]
            position = node.end + len(blocks) - 1 - place
            slot = tier.store(_key(block), None if parent is None else _key(parent), position, node.extent, owners)
            if slot is not None:
                self._stores[slot] = block.block_id
                self._stored.add(_key(block))
                self.counts.num_stored += 1

    def _promise(self, tier: ExclusiveTier, request: Any, num_computed_tokens: int) -> int:
        first = num_computed_tokens // self._block_size
        keys = request.block_hashes
        # vLLM always computes a request's last token.
        limit = min(len(keys), (request.num_tokens - 1) // self._block_size)
        count = self._num_sure(keys[first : first + tier.match(keys, first, limit)])
        if count and not self.speeds.is_worth_loading():
            count = 0
        tier.promise(keys[first : first + count])
        self._promised = (request.request_id, first)
        return count * self._block_size

    def _num_sure(self, keys: Sequence[Key]) -> int:
        """How many from the front were stored by a step that is over, or are not being stored at all."""
        if not self._unsure and not self._stored:
            return len(keys)
        return next((at for at, key in enumerate(keys) if key in self._unsure or key in self._stored), len(keys))

    def _load(self, tier: ExclusiveTier, request: Any, first: int, count: int) -> list[int]:
        slots = tier.load(request.block_hashes, first, count)
        tier.promise(())
        self.counts.num_loaded += count
        return slots

    @staticmethod
    def _clear(tier: ExclusiveTier) -> None:
        tier.clear()
        tier.take_changes()  # told by vLLM's own event

    def _finished(self, tier: ExclusiveTier, request: Any, branch: Branch, num_cached_blocks: int, concludes: bool) -> None:
        keys = request.block_hashes
        if len(tier):
            tier.computed(keys[:num_cached_blocks])
        for run in list(branch.kept) if concludes else ():
            if run.start >= len(keys) or keys[run.start] != run.keys[0]:
                tier.disown(branch, run)

    def _safely(self, call: Callable[..., Any], *arguments: Any) -> Any:
        if self._tier is None:
            return None
        try:
            return call(self._tier, *arguments)
        except Exception as error:  # noqa: BLE001 # whatever it is, the engine must go on
            self.turn_off(error)
            return None


def _key(block: Block) -> Key:
    return bytes(block.block_hash[:-_GROUP_BYTES])
