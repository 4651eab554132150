"""What a request finds that is sent behind others: their demand against vLLM's own scheduler and block pool, whose events come late."""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from prefix_cache.blocks import HashChain
from prefix_cache.demand import Demand, Taker
from prefix_cache.events import BlockRemoved, BlockStored, Event, EventBatch, decode_batch
from prefix_cache.mirror import Mirror
from replays.simulator.options import EngineOptions

BLOCK = 16
NUM_BLOCKS = 96
NUM_OUTPUT_TOKENS = 5


def chain(ids: list[int]) -> HashChain:
    made = HashChain(BLOCK)
    made.extend(array("I", ids))
    return made


class Pool:
    """A mirror of `num_blocks` blocks, fed by hand, and the demand on it. A prompt is `size` blocks of one token."""

    def __init__(self, num_blocks: int) -> None:
        self.mirror = Mirror(BLOCK)
        self.demand = Demand(self.mirror, num_blocks)

    def tell(self, *events: Event) -> None:
        seq = self.mirror.num_applied_batches
        self.mirror.apply(seq, EventBatch(float(seq), list(events)))

    def stored(self, token: int, size: int, start: int = 0) -> None:
        names: list[int | bytes] = [1000 * token + index for index in range(size)]
        self.tell(BlockStored(names[start:], names[start - 1] if start else None, [token] * (size - start) * BLOCK, BLOCK))

    def removed(self, token: int, *indices: int) -> None:
        self.tell(BlockRemoved([1000 * token + index for index in indices]))

    def send(self, token: int, size: int) -> Taker:
        return self.demand.begin(chain([token] * size * BLOCK).hashes, size)

    def num_left(self, token: int, size: int) -> int:
        hashes = chain([token] * size * BLOCK).hashes
        return self.demand.num_left(hashes, self.mirror.match(hashes))


def test_what_was_sent_takes_room_from_the_blocks_used_the_longest_ago_and_from_their_ends() -> None:
    pool = Pool(12)
    pool.stored(1, 4)
    pool.stored(2, 4)
    assert (pool.num_left(1, 4), pool.num_left(2, 4)) == (4, 4)
    pool.send(3, 5)  # five and the one that it writes to, of which four are free
    assert (pool.num_left(1, 4), pool.num_left(2, 4)) == (2, 4)
    pool.send(4, 3)
    assert (pool.num_left(1, 4), pool.num_left(2, 4)) == (0, 2)


def test_what_events_have_told_of_is_not_taken_twice() -> None:
    pool = Pool(9)
    pool.stored(1, 8)
    pool.send(2, 3)
    assert pool.num_left(1, 8) == 5
    pool.removed(1, 7)
    pool.stored(2, 2)  # a chunk of its prompt
    assert pool.num_left(1, 8) == 5
    pool.removed(1, 6, 5)
    pool.stored(2, 3, 2)
    assert pool.num_left(1, 8) == 5


def test_running_requests_keep_their_blocks_however_long_ago_they_were_stored() -> None:
    pool = Pool(9)
    running = pool.send(1, 4)
    pool.stored(1, 4)
    pool.stored(2, 4)
    pool.send(3, 2)
    assert (pool.num_left(1, 4), pool.num_left(2, 4)) == (4, 1)
    pool.demand.end(running, running.hashes, 4)  # which frees the block that it wrote to
    assert (pool.num_left(1, 4), pool.num_left(2, 4)) == (4, 2)


def test_an_answer_ahead_of_its_events_has_taken_its_room_until_they_come_or_never_will() -> None:
    pool = Pool(8)
    pool.stored(1, 8)
    sent = pool.send(2, 3)
    pool.demand.end(sent, sent.hashes, 3)
    assert pool.num_left(1, 8) == 5
    for _ in range(16):
        pool.tell()
    assert (pool.num_left(1, 8), len(pool.demand)) == (8, 0)


def test_blocks_that_came_and_went_are_not_waited_for() -> None:
    pool = Pool(8)
    pool.stored(1, 5)
    sent = pool.send(2, 3)
    pool.stored(2, 3)
    pool.demand.end(sent, sent.hashes, 3)
    pool.removed(2, 2)
    assert (pool.num_left(1, 5), len(pool.demand)) == (5, 0)


def test_a_request_that_broke_off_takes_nothing() -> None:
    pool = Pool(8)
    pool.stored(1, 8)
    sent = pool.send(2, 3)
    pool.demand.end(sent)
    pool.demand.end(sent)
    assert (pool.num_left(1, 8), len(pool.demand)) == (8, 0)


def test_a_head_that_others_share_stays_with_the_latest_of_them() -> None:
    pool = Pool(8)
    head, own = [1] * 4 * BLOCK, [2] * 2 * BLOCK
    first, second = chain([*head, *own]), chain(head)
    pool.tell(BlockStored([1, 2, 3, 4, 5, 6], None, [*head, *own], BLOCK))
    pool.stored(7, 2)
    pool.mirror.touch(second.hashes, 4)
    pool.send(9, 4)  # five blocks: the two that only the first uses, the two of the other prompt, and the end of the head
    assert pool.demand.num_left(first.hashes, 6) == 3
    assert pool.num_left(7, 2) == 0


@dataclass(slots=True)
class Sent:
    session: list[int]
    chain: HashChain
    mirrored: int
    predicted: int
    taker: Taker


class LateEvents:
    """Stands where the engine's publisher stands, and passes batches on when it is told to."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._waiting: deque[bytes] = deque()

    def publish(self, batch: Any) -> None:
        self._waiting.append(msgspec.msgpack.encode(batch))

    def pass_on(self, num_kept: int) -> None:
        while len(self._waiting) > num_kept:
            self._mirror.apply(self._mirror.num_applied_batches, decode_batch(self._waiting.popleft()))

    def shutdown(self) -> None:
        pass


@pytest.mark.engine
@pytest.mark.parametrize("num_lanes", [2, 4])
def test_predictions_of_turns_that_run_side_by_side_are_what_vllms_scheduler_finds(
    vllm_side: ModuleType, num_lanes: int, tmp_path: Path
) -> None:
    options = EngineOptions(num_blocks=NUM_BLOCKS, block_size=BLOCK, max_num_batched_tokens=256, max_num_seqs=16)
    replay = vllm_side.VllmReplay(options, vllm_side.make_scheduler(options, tmp_path))
    replay.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
    mirror = Mirror(BLOCK)
    demand, events, rng = Demand(mirror, NUM_BLOCKS), LateEvents(mirror), random.Random(num_lanes)
    replay.scheduler.kv_event_publisher = events
    idle: list[list[int]] = [[] for _ in range(12)]
    running: dict[int, Sent] = {}
    wrong = wrong_without = number = 0
    for now in range(2000):
        if len(running) < num_lanes and rng.random() < 0.5:
            session = idle.pop(rng.randrange(len(idle)))
            if len(session) > 25 * BLOCK:
                session.clear()
            session += [rng.randrange(1000) for _ in range(rng.randrange(10, 60))]
            hashed, size = chain(session), len(session)
            mirrored = mirror.predict(hashed.hashes, size)
            predicted = demand.num_left(hashed.hashes, mirrored // BLOCK) * BLOCK
            running[number] = Sent(session, hashed, mirrored, predicted, demand.begin(hashed.hashes, size // BLOCK))
            replay.add(number, list(session), NUM_OUTPUT_TOKENS, 1 + number % 900)
            number += 1
        replay.step(now)
        for ended in [each for each in running if each in replay.finished_at]:
            sent, actual = running.pop(ended), replay.num_hit_tokens[ended]
            wrong += abs(sent.predicted - actual) > BLOCK
            wrong_without += abs(sent.mirrored - actual) > BLOCK
            computed = [*sent.session, *[1 + ended % 900] * (NUM_OUTPUT_TOKENS - 1)]
            demand.end(sent.taker, chain(computed).hashes, len(computed) // BLOCK)
            mirror.learn(chain(computed).hashes, actual)
            sent.session += [1 + ended % 900] * NUM_OUTPUT_TOKENS
            idle.append(sent.session)
        events.pass_on(rng.randrange(4))
    assert number > 200
    assert wrong_without >= 20, "nothing was at stake"
    assert wrong <= 0.01 * number
