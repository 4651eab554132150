"""Block hash chains: one hash for equal prefixes, in every process, however the tokens came in."""

from __future__ import annotations

import itertools
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_cache.blocks import HashChain, root_hash

token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=60)


def chain_of(ids: list[int], block_size: int = 4, salt: bytes = b"") -> HashChain:
    chain = HashChain(block_size, salt)
    chain.extend(array("I", ids))
    return chain


@given(token_ids, st.lists(st.integers(0, 60), max_size=5), st.integers(1, 9))
def test_hashes_do_not_depend_on_how_the_tokens_were_cut(ids: list[int], cuts: list[int], block_size: int) -> None:
    pieces = HashChain(block_size)
    for start, end in itertools.pairwise([0, *sorted(cuts), len(ids)]):
        pieces.extend(array("I", ids[start:end]))
    assert pieces.num_tokens == len(ids)
    assert pieces.hashes == chain_of(ids, block_size).hashes
    assert len(pieces.hashes) == len(ids) // block_size


@given(token_ids, st.data())
def test_a_fork_goes_on_by_itself_and_leaves_its_parent_alone(ids: list[int], data: st.DataObject) -> None:
    chain = chain_of(ids)
    hashes = list(chain.hashes)
    num_tokens = data.draw(st.integers(0, len(ids)))
    fork = chain.fork(num_tokens)
    assert num_tokens - 4 < fork.num_tokens <= num_tokens
    other = ids[:num_tokens] + [7] * 9
    fork.extend(array("I", other[fork.num_tokens :]))
    assert fork.hashes == chain_of(other).hashes
    assert (chain.hashes, chain.num_tokens) == (hashes, len(ids))


def test_a_fork_at_the_end_keeps_the_part_block() -> None:
    assert chain_of([1, 2, 3, 4, 5, 6]).fork(6).num_tokens == 6
    assert chain_of([1, 2, 3, 4, 5, 6]).fork(5).num_tokens == 5
    assert chain_of([1, 2, 3, 4, 5, 6]).fork(3).num_tokens == 0


def test_equal_blocks_after_different_prefixes_have_different_hashes() -> None:
    assert chain_of([1, 2, 3, 4, 9, 9, 9, 9]).hashes[1] != chain_of([1, 2, 3, 5, 9, 9, 9, 9]).hashes[1]


@pytest.mark.case("KVM-09")
def test_salt_and_adapter_of_one_name_are_different_roots() -> None:
    roots = {root_hash(), root_hash(salt=b"X"), root_hash(lora=b"X"), root_hash(salt=b"X", lora=b"X")}
    assert len(roots) == 4
    assert set(chain_of([1] * 8, salt=b"X").hashes).isdisjoint(chain_of([1] * 8).hashes)


@pytest.mark.case("KVM-08")
def test_hashes_are_the_same_in_every_process() -> None:
    program = "from tests.test_blocks import chain_of; print(chain_of(list(range(256)), 16, b's').hashes[-1].hex())"
    printed = {
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True).stdout
        for seed in ("0", "1", "random")
    }
    assert printed == {chain_of(list(range(256)), 16, b"s").hashes[-1].hex() + "\n"}
