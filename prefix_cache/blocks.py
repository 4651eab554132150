"""Chained hashes of whole blocks: equal hash, equal tokens from the very start of the prompt.

A block hash is xxh3-128 over the parent's hash and the block's token ids (4 bytes each, little endian). The chain starts from a root that
names what must not be shared: the cache salt and the LoRA adapter. No hash depends on the process, so servers can exchange them.
xxh3 is fast, not cryptographic: a forged collision costs a wrong *prediction*, never a wrong token; exact matching is `tree`'s job.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import xxhash

BlockHash: TypeAlias = bytes
"""16 bytes."""

TOKEN_BYTES = array("I").itemsize
assert TOKEN_BYTES == 4


def root_hash(salt: bytes = b"", lora: bytes = b"") -> BlockHash:
    """The parent of the first block. The length prefix keeps salt "X" and adapter "X" apart."""
    return xxhash.xxh3_128_digest(len(salt).to_bytes(8, "little") + salt + lora)


def chain_hashes(parent: BlockHash, token_bytes: bytes, block_size: int) -> list[BlockHash]:
    """Hashes of the whole blocks in `token_bytes`, in order; a part block at the end is left out.

    `token_bytes` is `array("I").tobytes()` of the ids that follow `parent`; `block_size` is in tokens.
    """
    step = block_size * TOKEN_BYTES
    digest = xxhash.xxh3_128_digest
    hashes = []
    for end in range(step, len(token_bytes) + 1, step):
        parent = digest(parent + token_bytes[end - step : end])
        hashes.append(parent)
    return hashes


class HashChain:
    """Block hashes of a token sequence that only grows. Each token is hashed once."""

    __slots__ = ("_hashes", "_root", "_tail", "block_size")

    def __init__(self, block_size: int, salt: bytes = b"") -> None:
        assert block_size > 0
        self.block_size = block_size
        self._root = root_hash(salt)
        self._hashes: list[BlockHash] = []
        self._tail = b""

    @property
    def hashes(self) -> Sequence[BlockHash]:
        """Hashes of the whole blocks so far. The chain's own list, which grows with it: read only."""
        return self._hashes

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, with those of the part block at the end."""
        return len(self._hashes) * self.block_size + len(self._tail) // TOKEN_BYTES

    def extend(self, ids: array[int]) -> None:
        """Append `ids` (typecode "I"), the tokens after the first `num_tokens`."""
        assert ids.typecode == "I"
        token_bytes = self._tail + ids.tobytes()
        hashes = chain_hashes(self._hashes[-1] if self._hashes else self._root, token_bytes, self.block_size)
        self._hashes += hashes
        self._tail = token_bytes[len(hashes) * self.block_size * TOKEN_BYTES :]

    def fork(self, num_tokens: int) -> HashChain:
        """A chain of its own over this one's first tokens; nothing is hashed again.

        Tokens inside whole blocks are not kept, so a fork inside one starts at that block's first token: go on with
        `fork.extend(ids[fork.num_tokens:])`.
        """
        assert 0 <= num_tokens <= self.num_tokens
        num_blocks = num_tokens // self.block_size
        other = HashChain.__new__(HashChain)
        other.block_size = self.block_size
        other._root = self._root
        other._hashes = self._hashes[:num_blocks]
        whole = num_blocks == len(self._hashes)
        other._tail = self._tail[: (num_tokens - num_blocks * self.block_size) * TOKEN_BYTES] if whole else b""
        return other
