"""The cache benchmark's own parts: the truth that it compares with, and its arithmetic."""

from __future__ import annotations

from array import array

import msgspec
import numpy as np
import pytest

from benchmarks.cache_alignment import Call, _calls, _prefilled
from benchmarks.cache_engine import Agreement, EngineFigures
from benchmarks.cache_truth import TrueBlocks
from prefix_cache.blocks import HashChain
from prefix_cache.hits import Cause, account
from replays.traces import Request, Session, Stream


def payload(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([0.0, events, 0])


def stored(names: list[int], parent: int | None, ids: list[int]) -> dict[str, object]:
    return {"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": ids, "block_size": 2}


def test_the_truth_counts_copies_and_knows_blocks_by_their_whole_prefix() -> None:
    chain = HashChain(2)
    chain.extend(array("I", range(6)))
    truth = TrueBlocks()
    truth.apply(payload(stored([1, 2], None, [0, 1, 2, 3]), stored([3], 2, [4, 5])))
    assert truth.hashes == set(chain.hashes)
    truth.apply(payload(stored([3], 2, [4, 5]), {"type": "BlockRemoved", "block_hashes": [3]}))
    assert truth.hashes == set(chain.hashes)
    truth.apply(payload({"type": "BlockRemoved", "block_hashes": [3, 2]}))
    assert (truth.hashes, truth.num_removed) == (set(chain.hashes[:1]), 3)
    truth.apply(payload({"type": "AllBlocksCleared"}))
    assert truth.hashes == set()


def test_figures_of_an_engine_count_what_is_missing_against_us() -> None:
    figures = EngineFigures()
    for predicted, actual in ((128, 128), (256, 128), (512, 128), (None, 128)):
        figures.hits.append(account(num_prompt_tokens=1000, ceiling=640, block_size=128, predicted=predicted, actual=actual))
    assert figures.within_block_share == 0.5
    assert figures.cause_sum_error_tokens == 0
    assert figures.unknown_share == pytest.approx(512 / 872)
    assert {cause for hits in figures.hits for cause in hits.missed or {}} == {Cause.NEW, Cause.UNKNOWN}
    agreement = Agreement("", num_mirror=4, num_true=10, num_both=3)
    assert (agreement.precision, agreement.recall) == (0.75, 0.3)


def request(order: int, prompt: int, output: int, ids: list[int], start: float) -> Request:
    return Request(order, start, 1.0, prompt, output, np.array(ids, dtype=np.int64), "")


def test_a_call_shares_the_answer_before_it_or_the_ids_that_its_session_knows() -> None:
    root = Stream("", (request(0, 130, 50, [1, 2, 3], 0), request(1, 300, 20, [1, 2, 4, 5, 6], 11), request(2, 200, 9, [1, 9, 9, 9], 20)))
    agent = Stream("a", (request(1, 150, 9, [1, 2, 8], 12),))
    calls = list(_calls(Session("s", 64, root, (agent,))))
    assert calls == [
        Call(130, 0, 0.0, shares_head=False),
        Call(300, 179, 10.0, shares_head=False),
        Call(150, 128, 0.0, shares_head=True),
        Call(200, 64, 8.0, shares_head=False),
    ]
    assert [_prefilled(calls[1], unit) for unit in (64, 128, 256)] == [172, 172, 300]
