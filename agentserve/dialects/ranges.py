"""What values the sampling fields may have: a value outside is refused here, by its name, before it costs the engine anything.

As vLLM's `SamplingParams` documents and checks them (`vllm/sampling_params.py`, 0.32). What depends on the model, such as the size of its
vocabulary, the engine judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agentserve.errors import InvalidRequest
from model.conversation import Json

LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**63 - 1
"""What the engine's processes can say to each other."""
MOST_TOKEN_ID = 2**31 - 1
_SHOWN_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Range:
    """From `least` to `most`, both allowed; with `above`, `least` itself is not."""

    least: float
    most: float
    above: bool = False

    def holds(self, value: float) -> bool:
        return (self.least < value if self.above else self.least <= value) and value <= self.most

    def __str__(self) -> str:
        if self.most in (MOST_INTEGER, math.inf):
            return f"greater than {self.least:g}" if self.above else f"at least {self.least:g}, and below 2**63"
        if self.least == LEAST_INTEGER:
            return "from -2**63 to 2**63 - 1"
        return f"greater than {self.least:g} and at most {self.most:g}" if self.above else f"from {self.least:g} to {self.most:g}"


RANGES: Mapping[str, Range] = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(-1, MOST_INTEGER),
    "min_p": Range(0, 1),
    "seed": Range(LEAST_INTEGER, MOST_INTEGER),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, math.inf, above=True),
    "min_tokens": Range(0, MOST_INTEGER),
    "priority": Range(LEAST_INTEGER, MOST_INTEGER),
}
TOKEN_IDS = ("stop_token_ids", "allowed_token_ids")


def check_ranges(fields: Mapping[str, Any], max_tokens: int | None) -> None:
    """Raises InvalidRequest for the first value that is out of its range. `fields` by name, without those that were not sent."""
    for name, value in fields.items():
        if name in RANGES:
            if not RANGES[name].holds(value):
                raise _refusal(name, f"must be {RANGES[name]}, not {_shown(value)}")
        elif name in TOKEN_IDS:
            _check_ids(name, value)
    if "allowed_token_ids" in fields and not fields["allowed_token_ids"]:
        raise _refusal("allowed_token_ids", "must not be empty")
    if "" in fields.get("bad_words", ()):
        raise _refusal("bad_words", "must not hold an empty string")
    if max_tokens is not None and fields.get("min_tokens", 0) > max_tokens:
        raise _refusal("min_tokens", f"must be at most the {max_tokens} tokens that the answer may have, not {fields['min_tokens']}")
    for key in fields.get("logit_bias", ()):
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MOST_TOKEN_ID)) and int(key) <= MOST_TOKEN_ID):
            raise _refusal("logit_bias", f"must have token ids as its keys, not {_shown(key)}")


def check_integers(value: Json, name: str) -> None:
    """Raises InvalidRequest, with `name` as its field, for an integer anywhere in `value` that the engine cannot be told."""
    pending: list[Any] = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, int) and not LEAST_INTEGER <= one <= MOST_INTEGER:
            raise _refusal(name, f"holds an integer beyond 64 bits: {_shown(one)}")


def _check_ids(name: str, ids: Iterable[int]) -> None:
    for place, token_id in enumerate(ids):
        if not 0 <= token_id <= MOST_TOKEN_ID:
            raise _refusal(f"{name}[{place}]", f"must be a token id, not {_shown(token_id)}")


def _refusal(at: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{at} {problem}", param=at)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
