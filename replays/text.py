"""Prompt text out of block ids: the same ids at the same place always give the same words, and one word is about one token.

The words are common ones that byte-level vocabularies trained on code hold whole (with their leading space), so that what a server
counts stays close to what the trace says, whatever its tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
import xxhash
from numpy.typing import NDArray

from replays.traces import HashIds

# Multipliers of the splitmix64 generator (Steele, Lea, Flood 2014): each input bit changes half of the output bits.
_MIX_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_MIX_SECOND = np.uint64(0x94D049BB133111EB)

_FILLER_BIT = np.uint64(1 << 63)


@cache
def words() -> NDArray[np.object_]:
    """The word list, a power of two long so that a hash picks without bias."""
    text = files("replays").joinpath("data/words.txt").read_text(encoding="ascii")
    return np.array(text.split(), dtype=object)


def scaled(num_tokens: int, scale: float) -> int:
    """`num_tokens` of the trace as words to write, rounded down."""
    return int(num_tokens * scale)


def _mix(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    keys = (keys ^ (keys >> np.uint64(30))) * _MIX_FIRST
    keys = (keys ^ (keys >> np.uint64(27))) * _MIX_SECOND
    return keys ^ (keys >> np.uint64(31))


def cache_bust_line(run: str, session_id: str, play: int) -> str:
    """AgentX's marker at the front of the first user message: one value for a whole play of a tree, new for the next play."""
    return f"[rid:{xxhash.xxh3_64_hexdigest(f'{run}/{session_id}/{play}'.encode())[:12]}]\n\n"


@dataclass(frozen=True, slots=True)
class Words:
    """Which words stand at scaled positions start … start+count−1 of a prompt.

    Position q stands for the last trace token that it covers, and that token's block id, with q itself, picks the word. Two
    prompts that share leading ids therefore share leading words, at any scale. `end_tokens` is where the passage ends in
    trace tokens; positions pushed beyond it (by message overhead at small scales) count as its last token.
    """

    start: int
    count: int
    end_tokens: int

    def token_positions(self, scale: float) -> NDArray[np.int64]:
        """The trace token that each word stands for, shape [count]."""
        positions = np.arange(self.start + 1, self.start + self.count + 1)
        tokens = np.ceil(positions / scale).astype(np.int64) - 1
        return np.minimum(tokens, max(0, self.end_tokens - 1))

    def render(self, hash_ids: HashIds, *, block_size: int, scale: float, salt: int, filler: int) -> str:
        """The text. Beyond the trace's ids the words come from `filler`, which no other prompt of the session has."""
        blocks = self.token_positions(scale) // block_size
        known = blocks < len(hash_ids)
        keys = np.full(self.count, np.uint64(filler) | _FILLER_BIT, dtype=np.uint64)
        keys[known] = hash_ids[blocks[known]].astype(np.uint64)
        places = np.arange(self.start, self.start + self.count, dtype=np.uint64)
        picks = _mix(_mix(keys + np.uint64(salt)) + places * _MIX_STEP)
        vocabulary = words()
        return " ".join(vocabulary[(picks % np.uint64(len(vocabulary))).astype(np.int64)])


def text_salt(run: str, session_id: str) -> int:
    """63 bits that keep the texts of different sessions, and of different runs against one engine, apart."""
    return xxhash.xxh3_64_intdigest(f"{run}/{session_id}".encode()) >> 1
