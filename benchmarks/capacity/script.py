"""What the lanes of the benchmark play: recorded sessions at 1/64 of their tokens and a fifteenth of their time."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from admission.last_turn import TurnEnd
from replays.generator import GeneratorSettings, generate_sessions
from replays.return_prior import CONTEXT_TOKENS, distinct, held_back
from replays.traces import HashIds, Request, Session, TraceSet, session_from_weka

TokenIds: TypeAlias = "NDArray[np.int64]"

TIME_SCALE = 15.0
TOKEN_SCALE = 64
"""Recorded tokens that one token stands for: a block of 64 that a trace names by one id."""
GAP_CAP_SECONDS = 300.0
"""Of recorded idle time."""
STAGGER_SECONDS = 16.0
_FIRST_TOKEN, _NUM_TOKENS = 100, 7_900
"""Token ids that prompts are made of; control tokens lie outside."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Times are as played, tokens of `end` as recorded."""

    hash_ids: HashIds
    num_output_tokens: int
    gap_seconds: float
    """Idle time before it, from the end of the one before."""
    end: TurnEnd


@dataclass(frozen=True, slots=True)
class Play:
    """A session as one lane plays it."""

    turns: tuple[Turn, ...]
    first: int
    """Where it is entered: the first session of a lane is under way."""


def turns_of(session: Session) -> tuple[Turn, ...]:
    """The root's requests that a model of 262,144 tokens takes."""
    requests = [request for request in session.root.requests if request.num_prompt_tokens <= CONTEXT_TOKENS and len(request.hash_ids)]
    gaps = [0.0, *(max(after.start_seconds - before.end_seconds, 0.0) for before, after in pairwise(requests))]
    return tuple(_turn(request, gap) for request, gap in zip(requests, gaps, strict=False))  # without requests there is a gap too many


def _turn(request: Request, gap_seconds: float) -> Turn:
    end = TurnEnd(
        ends_turn=request.stop == "end_turn",
        tools=("tool",) if request.stop == "tool_use" else (),
        from_user="text" in request.input_types,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
    )
    num_output = max(1, round(request.num_output_tokens / TOKEN_SCALE))
    return Turn(request.hash_ids, num_output, min(gap_seconds, GAP_CAP_SECONDS) / TIME_SCALE, end)


def scripts(traces: Path | None) -> list[tuple[Turn, ...]]:
    """Sessions that no prior was fitted on: the held-back half of `traces`, or generated ones."""
    if traces is None:
        settings = GeneratorSettings(240, seed=11, max_turns=160, subagent_share=0.0)
        sessions: Iterable[Session] = (session_from_weka(weka, Path(weka.id)) for weka in generate_sessions(settings))
    else:
        sessions = (session for session in distinct(TraceSet(traces).checked()) if held_back(session))
    return [turns for turns in map(turns_of, sessions) if len(turns) > 1]


def lanes(made: Sequence[tuple[Turn, ...]], num_lanes: int, seed: int) -> list[list[Play]]:
    """Each lane's own sessions in order, so that whatever one arm delays does not change what another lane plays."""
    rng = random.Random(seed)
    order = list(made)
    rng.shuffle(order)
    plays = [[Play(turns, 0) for turns in order[lane::num_lanes]] for lane in range(num_lanes)]
    for own in plays:
        own[0] = Play(own[0].turns, int(len(own[0].turns) * rng.uniform(0.25, 0.75)))
    return plays


def prompt_ids(hash_ids: HashIds, salt: int) -> TokenIds:
    """A token for each block of the trace; another salt shares nothing, not even by chance a block of them."""
    own = np.uint64(salt * 0xC2B2AE3D27D4EB4F & 0xFFFFFFFFFFFFFFFF)
    mixed = (hash_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + own
    mixed ^= mixed >> np.uint64(31)
    ids: TokenIds = (mixed * np.uint64(0x94D049BB133111EB) >> np.uint64(33)).astype(np.int64) % _NUM_TOKENS + _FIRST_TOKEN
    return ids


class Ceiling:
    """How much of a prompt this play has sent before, in whole blocks: what an unlimited cache would have."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._seen: set[int] = set()

    def of(self, ids: TokenIds) -> int:
        """Tokens; the prompt counts as sent from now on. At least one token is always computed."""
        size = self._block_size
        chain, shared, is_known = 0, 0, True
        for start in range(0, len(ids) - size + 1, size):
            chain = hash((chain, ids[start : start + size].tobytes()))
            is_known = is_known and chain in self._seen and start + size < len(ids)
            shared += size if is_known else 0
            self._seen.add(chain)
        return shared
