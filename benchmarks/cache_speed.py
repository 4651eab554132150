"""How fast block events are applied and prefixes matched, and what a resident block costs in memory: seconds of one core, no engine."""

from __future__ import annotations

import random
import time
import tracemalloc
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from prefix_cache.blocks import HashChain, root_hash
from prefix_cache.events import BlockRemoved, BlockStored, Event, EventBatch, decode_batch
from prefix_cache.mirror import Mirror
from prefix_cache.tree import PrefixTree

BLOCK_SIZE = 128
NUM_BLOCKS = 800
"""Of one prompt, and of one store event."""
VOCABULARY = 200_000
MEMORY_BLOCKS = 100_000
"""Size of the pool whose mirror is weighed."""
NUM_UNIQUE, NUM_UNIQUE_QUICK = 10_000_000, 500_000
NUM_MATCHES = 20_000


@dataclass(frozen=True, slots=True)
class Speed:
    """Events a second count blocks stored and removed alike; `wire` adds the decoding of vLLM's messages to it."""

    block_events_per_second: float
    wire_block_events_per_second: float
    """Of prompts that this server sent."""
    packed_block_events_per_second: float
    """The same with what it costs to note such a prompt when it is sent."""
    foreign_block_events_per_second: float
    """Of prompts that it did not send, each id of which is decoded."""
    matches_per_second: float
    bytes_per_block: float
    bytes_per_block_midway: float


def measure(*, quick: bool) -> Speed:
    num_prompts = 20 if quick else 60
    own, foreign = _event_seconds(num_prompts, is_own=True), _event_seconds(num_prompts, is_own=False)
    num_events = 2 * num_prompts * NUM_BLOCKS
    midway, end = _memory(NUM_UNIQUE_QUICK if quick else NUM_UNIQUE)
    return Speed(
        num_events / own.apply,
        num_events / (own.apply + own.decode),
        num_events / (own.apply + own.decode + own.send),
        num_events / (foreign.apply + foreign.decode),
        _match_rate(),
        end,
        midway,
    )


def _prompt(rng: random.Random) -> array[int]:
    return array("I", (rng.randrange(VOCABULARY) for _ in range(NUM_BLOCKS * BLOCK_SIZE)))


@dataclass(slots=True)
class _Seconds:
    """CPU seconds of the steps of the same events."""

    send: float = 0.0
    decode: float = 0.0
    apply: float = 0.0


def _event_seconds(num_prompts: int, *, is_own: bool) -> _Seconds:
    """Whole prompts are stored, then leave from their ends: half of them a block at a time as stock vLLM evicts, half in one event."""
    rng = random.Random(1)
    ids = _prompt(rng)
    stores: list[BlockStored] = []
    removals: list[list[Event]] = []
    for number in range(num_prompts):
        names = [rng.getrandbits(64) for _ in range(NUM_BLOCKS)]
        ids[0] = number
        stored = BlockStored(list(names), None, ids.tolist(), BLOCK_SIZE, medium="GPU", extra_keys=[None] * NUM_BLOCKS, group_idx=0)
        stored.session_id = str(number)
        stores.append(stored)
        names.reverse()
        singles: list[Event] = [BlockRemoved([name], "GPU", 0) for name in names]
        removals.append(singles if number % 2 else [BlockRemoved(list(names), "GPU", 0)])
    batches: list[list[Event]] = [[store] for store in stores]
    messages = [msgspec.msgpack.encode([float(number), events, 0]) for number, events in enumerate(batches + removals)]
    mirror = Mirror(BLOCK_SIZE)
    seconds = _Seconds()
    for number, message in enumerate(messages):
        ids[0] = number
        chain = HashChain(BLOCK_SIZE)
        chain.extend(ids)
        started = time.thread_time()
        if is_own and number < num_prompts:
            mirror.sent.add(str(number), ids, chain.hashes, 0, NUM_BLOCKS, root_hash())
        sent = time.thread_time()
        batch = decode_batch(message, mirror.sent)
        decoded = time.thread_time()
        mirror.apply(number, batch)
        seconds.apply += time.thread_time() - decoded
        seconds.decode += decoded - sent
        seconds.send += sent - started
    assert mirror.num_resident_blocks == 0
    assert mirror.sent.num_known_events == (num_prompts if is_own else 0)
    return seconds


def _match_rate() -> float:
    """Prompts that extend a known one by a block: ceiling and prediction, from where the prompt stood."""
    rng = random.Random(2)
    known = _prompt(rng)
    tree, mirror = PrefixTree(10_000_000), Mirror(BLOCK_SIZE)
    position = tree.insert(known)
    mirror.apply(0, EventBatch(0.0, [BlockStored(list(range(1, NUM_BLOCKS + 1)), None, known, BLOCK_SIZE)]))
    chain = HashChain(BLOCK_SIZE)
    longer = known + array("I", (rng.randrange(VOCABULARY) for _ in range(BLOCK_SIZE + 40)))
    chain.extend(longer)
    hashes, num_tokens = chain.hashes, len(longer)
    started = time.thread_time()
    for _ in range(NUM_MATCHES):
        ceiling = tree.match(longer, position).num_tokens
        predicted = mirror.predict(hashes, num_tokens, NUM_BLOCKS)
    seconds = time.thread_time() - started
    assert ceiling == predicted == NUM_BLOCKS * BLOCK_SIZE
    return NUM_MATCHES / seconds


def _memory(num_unique: int) -> tuple[float, float]:
    """Bytes that the mirror of a full pool holds for each of its blocks: midway, and after `num_unique` different ones."""
    ids = _prompt(random.Random(3))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        mirror = Mirror(BLOCK_SIZE, max_blocks=MEMORY_BLOCKS)
        weights = []
        for number, batch in enumerate(_life(ids, num_unique)):
            mirror.apply(number, batch)
            if number in (num_unique // NUM_BLOCKS // 2, num_unique // NUM_BLOCKS - 1):
                weights.append((tracemalloc.get_traced_memory()[0] - before) / mirror.num_resident_blocks)
    finally:
        tracemalloc.stop()
    assert mirror.num_resident_blocks == MEMORY_BLOCKS
    return weights[0], weights[1]


def _life(ids: array[int], num_unique: int) -> Iterator[EventBatch]:
    """An engine's events whose full pool evicts the oldest prompt for each new one."""
    num_held = MEMORY_BLOCKS // NUM_BLOCKS
    for number in range(num_unique // NUM_BLOCKS):
        first = number * NUM_BLOCKS + 1
        events: list[Event] = []
        if number >= num_held:
            oldest = first - num_held * NUM_BLOCKS
            events.append(BlockRemoved(list(range(oldest + NUM_BLOCKS - 1, oldest - 1, -1))))
        ids[0] = number
        events.append(BlockStored(list(range(first, first + NUM_BLOCKS)), None, ids, BLOCK_SIZE))
        yield EventBatch(float(number), events)
