"""What a simulated engine says: ordinary words of the model's vocabulary, chosen by the prompt: the same prompt, the same answer."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from model.tokenizer import Tokenizer

MEDIAN_TOKENS = 444
"""Of an answer whose length the client leaves open: the AgentX corpus's median output."""
_SIGMA = 1.1
"""Puts the mean of the lognormal at AgentX's 1.8 times the median."""
_MAX_WORDS = 4096


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: ids, and why it ends there, in vLLM's word."""

    ids: tuple[int, ...]
    finish_reason: str


class Speaker:
    """Speaks with ids of whole lower-case words, so that no control token and no broken character comes out."""

    def __init__(self, tokenizer: Tokenizer, stop_id: int) -> None:
        self._tokenizer = tokenizer
        self._stop_id = stop_id
        ids = range(min(tokenizer.vocab_size, 1 << 17))
        words = [id for id in ids if _is_word(tokenizer.token_bytes(id))]
        self._words = words[:_MAX_WORDS]
        if not self._words:
            raise ValueError("the vocabulary has no whole words to answer with")

    def say(self, prompt: array[int], max_tokens: int, *, ignore_eos: bool, seed: int = 0) -> Said:
        """The answer to `prompt`: exactly `max_tokens` with `ignore_eos`, else as long as answers are, and ended by the stop id."""
        rng = random.Random(xxhash.xxh3_64_intdigest(prompt.tobytes(), seed))
        wanted = max_tokens if ignore_eos else max(1, round(rng.lognormvariate(0, _SIGMA) * MEDIAN_TOKENS))
        if wanted >= max_tokens:
            return Said(tuple(rng.choices(self._words, k=max_tokens)), "length")
        return Said((*rng.choices(self._words, k=wanted - 1), self._stop_id), "stop")

    def text(self, ids: Sequence[int]) -> str:
        """As vLLM's detokenizer shows it: without the stop id."""
        return self._tokenizer.decode_bytes([id for id in ids if id != self._stop_id]).decode("utf-8", "replace")


def _is_word(token: bytes) -> bool:
    return token[:1] == b" " and len(token) > 2 and token[1:].isalpha() and token[1:].islower()
