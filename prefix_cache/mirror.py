"""A guess of what an engine's prefix cache holds, built from its KV events and corrected by the hits that it reports.

Batches are numbered and applied in the order of their numbers, each once. A gap is reported and later batches wait (bounded) until it has
been replayed or given up. Numbers that start again mean that the engine did: then nothing is resident. After a gap that cannot be replayed
the mirror is *suspect*: it starts empty, and what it does not know may well be resident. Copies of a block are counted one by one, as stock
vLLM announces them; its opt-in report of mere reuse looks the same and must stay off.

A response can overtake the events of its step, or they can be lost and come by a replay: a miss that contradicts the mirror empties it at
once, but what it knew is kept in doubt, and comes back if the next events explain the miss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from prefix_cache.blocks import BlockHash
from prefix_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, EventBatch
from prefix_cache.residency import Residency
from prefix_cache.sent_prompts import SentPrompts

FULL_ATTENTION_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
"""KV group kinds whose blocks a hit needs from the first token on. None: an engine that does not say has one such group."""

_NUM_REMEMBERED = 1024
_NUM_BATCHES_IN_DOUBT = 16
"""After so many batches in order a contradiction counts as unexplained."""
_NUM_RIGHT_TO_TRUST = 32
"""So many right predictions in a row, and a suspect mirror is trusted again."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Batches `start` up to, not including, `stop` are missing. Ask for a replay from `ask_from`."""

    start: int
    stop: int

    @property
    def ask_from(self) -> int:
        """One before the gap: a batch that we have. If it comes back different, the engine has restarted in between."""
        return max(0, self.start - 1)


class Behind(Protocol):
    """Follows what stands behind this cache and takes what leaves it, announced by name alone in another medium of the same stream."""

    def apply(self, batch: EventBatch, departed: Mapping[int, BlockHash]) -> None:
        """A batch was taken in, in order and once; `departed`: our hashes by name of what left in it. Changes state."""

    def forget(self) -> None:
        """The engine has emptied all, or what it announced is lost: nothing is known to be there. Changes state."""


@dataclass(slots=True)
class _Doubt:
    """What was known before a miss of `missed` contradicted it."""

    groups: dict[int | None, Residency]
    missed: BlockHash
    was_suspect: bool
    num_batches: int = 0


class Mirror:
    """One engine's blocks in one medium. `block_size` in tokens; blocks of another size earn nothing and are counted."""

    def __init__(self, block_size: int, *, medium: str = "GPU", max_blocks: int = 1_000_000, max_held_batches: int = 4096) -> None:
        assert block_size > 0
        self.block_size = block_size
        self.is_suspect = False
        """Whether blocks may be resident that no event told us of. Ends by a reset, a restart, or predictions that prove right again."""
        self.event_block_size: int | None = None
        """The block size that the engine's events carry; a deployment where it differs from `block_size` predicts nothing."""
        self.num_applied_batches = 0
        self.num_duplicate_batches = 0
        self.num_lost_batches = 0
        self.num_restarts = 0
        self.num_clears = 0
        self.num_ignored_events = 0
        """Events of other media, group kinds, block sizes, and kinds of event not known here."""
        self.num_under_predictions = 0
        self.num_over_predictions = 0
        self.num_contradictions = 0
        """Misses of blocks whose removal had not been announced; each empties the mirror, until it is explained."""
        self.num_explained_contradictions = 0
        self.on_batch: Callable[[EventBatch], None] | None = None
        """Called with each batch when it is applied: in order, once. For those who follow other media of the same stream."""
        self.behind: Behind | None = None
        self.sent = SentPrompts(block_size)
        """For those who decode the engine's events."""
        self._medium = medium
        self._max_blocks = max_blocks
        self._max_held_batches = max_held_batches
        self._groups: dict[int | None, Residency] = {None: Residency(max_blocks)}
        """By KV group index; None until the first event says which one it is."""
        self._doubts: _Doubt | None = None
        self._departed: dict[int, BlockHash] | None = None
        """What left in the batch that is being applied, where somebody follows it."""
        self._next = 0
        self._last_live = -1
        self._num_right = 0
        self._held: dict[int, EventBatch] = {}
        self._applied: dict[int, float] = {}
        """Timestamps of the last batches by number: what tells a duplicate from a restart."""

    @property
    def gap(self) -> Gap | None:
        """What is missing now; None when all that was seen has been applied."""
        return Gap(self._next, min(self._held)) if self._held else None

    @property
    def num_resident_blocks(self) -> int:
        """Resident blocks by the events; of several KV groups, the smallest."""
        return min(group.num_blocks for group in self._groups.values())

    @property
    def num_resident_tokens(self) -> int:
        return self.num_resident_blocks * self.block_size

    @property
    def num_unresolved_blocks(self) -> int:
        """Resident blocks below a parent that is not known; they never match."""
        return sum(group.num_unresolved_blocks for group in self._groups.values())

    def apply(self, seq: int, batch: EventBatch, *, replayed: bool = False) -> Gap | None:
        """Take batch number `seq`; return what is missing before the mirror can go on, or None.

        `replayed` marks an answer to a replay request: those come in order, so one beyond the gap proves that the gap cannot be filled.
        """
        if seq < self._next:
            if not self._is_restart(seq, batch, replayed=replayed):
                self.num_duplicate_batches += 1
                self._last_live = max(self._last_live, -1 if replayed else seq)
                return self.gap
            self._restart(batch)
        elif replayed and seq > self._next:
            self._give_up(seq)
        if not replayed:
            self._last_live = seq
        if seq > self._next:
            self._held[seq] = batch
            if len(self._held) > self._max_held_batches:
                self._give_up(min(self._held))
                self._apply_held()
            return self.gap
        self._apply(seq, batch)
        self._apply_held()
        return self.gap

    def end_replay(self, asked: Gap) -> Gap | None:
        """The answer to `asked` is over, or there is none. What it left missing is lost; return what is missing beyond that."""
        gap = self.gap
        if gap is not None and asked.start <= gap.start < asked.stop:
            self._give_up(gap.stop)
            self._apply_held()
        return self.gap

    def lose(self, seq: int) -> Gap | None:
        """Batch `seq` came, but cannot be read."""
        if seq < self._next:
            return self.gap
        self._give_up(seq + 1)
        self._apply_held()
        return self.gap

    def restarted(self) -> None:
        """The engine is known to have restarted: nothing is resident, and its numbers begin at 0."""
        self.num_restarts += 1
        self._clear(announced=True)
        self._forget_behind()
        self.is_suspect = False
        self._next = 0
        self._last_live = -1
        self._held.clear()
        self._applied.clear()

    def match(self, hashes: Sequence[BlockHash], start: int = 0) -> int:
        """Leading blocks of `hashes` that are resident in every group; the first `start` are taken as resident."""
        groups = self._groups.values()
        if len(groups) == 1:  # nearly always
            (group,) = groups
            return group.match(hashes, start)
        return min([group.match(hashes, start) for group in groups])

    def touch(self, hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """A request uses the first `num_blocks` of `hashes` now. Of blocks that nobody speaks of, the events tell when they were stored."""
        for group in self._groups.values():
            group.touch(hashes, num_blocks)

    def num_announced(self, hashes: Sequence[BlockHash], num_blocks: int) -> int:
        """How many of the first `num_blocks` of `hashes`, from the first on, events have told of: in every group."""
        return min(group.num_announced(hashes, num_blocks) for group in self._groups.values())

    def num_left(self, hashes: Sequence[BlockHash], num_matched: int, num_taken: int) -> int:
        """How many of the first `num_matched` of `hashes`, which match, stay when the engine needs room for `num_taken` blocks.

        That is said of an engine that evicts by last use alone, and has one KV group: several share their pool.
        """
        groups = tuple(self._groups.values())
        return groups[0].num_left(hashes, num_matched, num_taken) if len(groups) == 1 else num_matched

    @property
    def num_held_blocks(self) -> int:
        """Blocks of the engine's pool that hold something resident, copies counted."""
        return sum(group.num_blocks + group.num_copies for group in self._groups.values())

    def resident_hashes(self) -> set[BlockHash]:
        """All blocks that are resident in every group, whatever is before them. Costs a walk: for tests and reports."""
        return set.intersection(*(group.resident_hashes() for group in self._groups.values()))

    @property
    def departures(self) -> tuple[int, ...]:
        """Changes whenever a block may have left; while it is the same, blocks that matched still do (`start` of `match`)."""
        return tuple(group.num_departures for group in self._groups.values())

    def removed_since(self, block_hash: BlockHash, departures: tuple[int, ...]) -> bool:
        """Whether the engine announced that the block left after `departures` was read, also if it has come back."""
        groups = zip(self._groups.values(), departures, strict=False)
        return any(group.removed_since(block_hash, before) for group, before in groups)

    def num_returned_since(self, hashes: Sequence[BlockHash], departures: tuple[int, ...]) -> int:
        """How many of the blocks left after `departures` was read and have been stored again."""
        groups = zip(self._groups.values(), departures, strict=False)
        return max((group.num_returned_since(hashes, before) for group, before in groups), default=0)

    def predict(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, start: int = 0) -> int:
        """The engine's num_cached_tokens for this prompt, as far as we know: whole blocks, never the last token.

        The first `start` blocks are taken as resident.
        """
        return min(self.match(hashes, start), max(0, num_prompt_tokens - 1) // self.block_size) * self.block_size

    def hash_of(self, name: int) -> BlockHash | None:
        """Our hash of a block that the engine calls so and that is resident; None: it is not, or not known. For rare questions."""
        doubted = self._doubts.groups.values() if self._doubts is not None else ()
        found = (group.hash_of(name) for group in (*self._groups.values(), *doubted))
        return next((block_hash for block_hash in found if block_hash is not None), None)

    def is_only_learned(self, block_hash: BlockHash) -> bool:
        """Whether the block is known from a response's usage and no event has told of it yet."""
        return any(group.is_only_learned(block_hash) for group in self._groups.values())

    def was_removed(self, block_hash: BlockHash) -> bool:
        """Whether the block was resident, is not now, and the engine announced that (as far back as the bounded log goes)."""
        return any(group.was_removed(block_hash) for group in self._groups.values())

    def learn(
        self, hashes: Sequence[BlockHash], num_cached_tokens: int, predicted_tokens: int | None = None, num_blocks: int | None = None
    ) -> None:
        """Correct the guess by a finished request.

        The first `num_blocks` of `hashes` (None: all) are the whole blocks that it computed or reused, `num_cached_tokens` the engine's
        count of what it reused, and `predicted_tokens` what `predict` said before it was sent (also while suspect: that is how trust
        returns). Those blocks are resident now unless a removal was announced since; what was predicted and hit needs no second look.
        """
        num_blocks = len(hashes) if num_blocks is None else num_blocks
        num_hit_blocks = min(num_cached_tokens // self.block_size, num_blocks)
        num_known_blocks = min(num_hit_blocks, (predicted_tokens or 0) // self.block_size)
        if predicted_tokens is not None:
            self.num_under_predictions += num_cached_tokens > predicted_tokens
            if num_cached_tokens < predicted_tokens:
                self.num_over_predictions += 1
                self._doubt(hashes[num_hit_blocks : num_hit_blocks + 1])
            self._num_right = self._num_right + 1 if num_cached_tokens == predicted_tokens else 0
            if self._num_right >= _NUM_RIGHT_TO_TRUST:
                self.is_suspect = False
        for group in self._groups.values():
            group.learn(hashes, num_known_blocks, num_blocks, hashes[num_hit_blocks - 1] if num_hit_blocks else None)

    def _doubt(self, missed: Sequence[BlockHash]) -> None:
        """A block was missed that we held for resident. Unless events are on their way, the engine dropped blocks without a word."""
        if self.gap is None and any(group.contradicts(block_hash) for group in self._groups.values() for block_hash in missed):
            self.num_contradictions += 1
            known = _Doubt(self._groups, missed[0], self.is_suspect)
            self._groups = {index: Residency(self._max_blocks, group.num_departures + 1) for index, group in self._groups.items()}
            self._suspect()
            self._doubts = known

    def _is_restart(self, seq: int, batch: EventBatch, *, replayed: bool) -> bool:
        known = self._applied.get(seq)
        if known is not None:
            return known != batch.timestamp_seconds
        # Live numbers only rise within one life; those below `_next` are late copies of what a replay has brought.
        return not replayed and seq <= self._last_live

    def _restart(self, batch: EventBatch) -> None:
        # Batches that wait may be of the new life already, when this one comes from a replay; those are later than it.
        held = {seq: other for seq, other in self._held.items() if other.timestamp_seconds > batch.timestamp_seconds}
        self.restarted()
        self._held = held

    def _give_up(self, seq: int) -> None:
        """Go on at `seq` although batches before it are lost: what they removed is not known, so nothing is."""
        self.num_lost_batches += seq - self._next
        self._suspect()
        self._forget_behind()
        self._next = seq

    def _suspect(self) -> None:
        self.is_suspect = True
        self._num_right = 0
        self._clear(announced=False)

    def _forget_behind(self) -> None:
        if self.behind is not None:
            self.behind.forget()

    def _clear(self, *, announced: bool) -> None:
        self._doubts = None
        for group in self._groups.values():
            group.clear(announced=announced)

    def _apply_held(self) -> None:
        while (batch := self._held.pop(self._next, None)) is not None:
            self._apply(self._next, batch)
        for seq in [seq for seq in self._held if seq < self._next]:
            del self._held[seq]

    def _apply(self, seq: int, batch: EventBatch) -> None:
        self._next = seq + 1
        self._applied[seq] = batch.timestamp_seconds
        if len(self._applied) > _NUM_REMEMBERED:
            del self._applied[next(iter(self._applied))]
        self.num_applied_batches += 1
        self.num_ignored_events += batch.num_unknown_events
        if self.on_batch is not None:
            self.on_batch(batch)
        self._departed = {} if self.behind is not None else None
        self._take(batch)
        if self._doubts is not None:
            self._weigh(self._doubts, batch)
        if self.behind is not None and self._departed is not None:
            self.behind.apply(batch, self._departed)

    def _weigh(self, doubts: _Doubt, batch: EventBatch) -> None:
        """Whether `batch` explains the miss that put `doubts` in doubt: then what was known is known again."""
        guessed, self._groups = self._groups, doubts.groups
        num_ignored = self.num_ignored_events
        self._take(batch)
        self.num_ignored_events = num_ignored
        doubts.num_batches += self.gap is None
        if not any(group.contradicts(doubts.missed) for group in doubts.groups.values()):
            self.num_explained_contradictions += 1
            for index, group in doubts.groups.items():  # positions of before and of meanwhile hold no longer
                group.num_departures = max(group.num_departures, guessed[index].num_departures if index in guessed else 0) + 1
            self.is_suspect = doubts.was_suspect
            self._doubts = None
            return
        self._groups = guessed
        if doubts.num_batches >= _NUM_BATCHES_IN_DOUBT:
            self._doubts = None
            self._forget_behind()

    def _take(self, batch: EventBatch) -> None:
        for kind, events in itertools.groupby(batch.events, type):
            if issubclass(kind, BlockRemoved):
                self._remove(cast("Iterator[BlockRemoved]", events))
            else:
                for event in events:
                    self._enter(event)

    def _enter(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, AllBlocksCleared):
            self.num_clears += 1
            self._clear(announced=True)
            self._forget_behind()
            self.is_suspect = False

    def _store(self, event: BlockStored) -> None:
        if event.kv_cache_spec_kind not in FULL_ATTENTION_KINDS or event.medium not in (None, self._medium):
            self.num_ignored_events += 1
            return
        self.event_block_size = event.block_size
        if event.block_size != self.block_size:
            self.num_ignored_events += 1
            return
        index = event.group_idx or 0
        group = self._groups.get(index)
        if group is None:
            group = self._groups.pop(None) if None in self._groups else Residency(self._max_blocks)
            self._groups[index] = group
        group.store(event)

    def _remove(self, events: Iterator[BlockRemoved]) -> None:
        """An engine that makes room announces each block by an event of its own: what follows one another leaves at once."""
        gone: dict[int, list[EngineHash]] = {}
        medium = self._medium
        for event in events:
            if event.medium is None or event.medium == medium:
                gone.setdefault(event.group_idx or 0, []).extend(event.block_hashes)
            else:
                self.num_ignored_events += 1
        for index, names in gone.items():
            group = self._groups.get(index)
            if group is None:
                self.num_ignored_events += len(names)
            else:
                group.remove(names, self._departed)
