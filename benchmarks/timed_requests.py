"""Requests of generated sessions, for what the simulator is compared with: where they lie in a forest, and the same as token ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replays.generator import GeneratorSettings, generate_sessions
from replays.simulator.chains import BranchSet
from replays.simulator.chains import Path as BlockPath
from replays.simulator.scripts import script_of
from replays.traces import session_from_weka

_TAIL_TOKEN = 10_000_000
_OUTPUT_TOKEN = 20_000_000


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request that arrives before step `step`. Token ids are equal where the blocks are."""

    number: int
    step: int
    path: BlockPath
    token_ids: list[int]
    num_output_tokens: int

    @property
    def output_token(self) -> int:
        """What it generates, over and over; no other request does."""
        return _OUTPUT_TOKEN + self.number


def timed_requests(
    *, num_sessions: int, seed: int, block_size: int, max_turns: int = 8, mean_gap_steps: float = 30.0, output_factor: int = 1
) -> list[TimedRequest]:
    """The calls of generated sessions at fixed steps, in order of arrival; a part of each session's calls overlap."""
    settings = GeneratorSettings(
        num_sessions, seed, block_size=block_size, token_scale=block_size / 4096, max_turns=max_turns, subagent_share=0.5, cut_share=0.2
    )
    rng = np.random.default_rng(seed)
    found: list[tuple[int, BlockPath, list[int], int]] = []
    for index, weka in enumerate(generate_sessions(settings)):
        session = session_from_weka(weka, Path(weka.id))
        script = script_of(session, block_size)
        branches = BranchSet(script.forest, index)
        ids = [request.hash_ids for stream in session.streams for request in stream.requests]
        starts = [request.start_seconds for stream in session.streams for request in stream.requests]
        step = int(rng.integers(0, num_sessions * 4))
        for number, hash_ids in enumerate([ids[place] for place in np.argsort(starts, kind="stable")]):
            call = script.plan.calls[number]
            step += int(rng.exponential(mean_gap_steps))
            path = branches.tail(script.places[number]).path()
            tokens = _tokens(index, hash_ids, call.request.num_prompt_tokens, block_size, len(found))
            found.append((step, path, tokens, max(1, min(call.request.num_output_tokens, 30)) * output_factor))
    order = sorted(range(len(found)), key=lambda place: found[place][0])
    return [TimedRequest(number, *found[place][:3], found[place][3]) for number, place in enumerate(order)]


def _tokens(session: int, hash_ids: np.ndarray[tuple[int], np.dtype[np.int64]], length: int, block_size: int, number: int) -> list[int]:
    whole = (1 + session * 20_000 + hash_ids[: length // block_size]).repeat(block_size)
    return [*whole.tolist(), *[_TAIL_TOKEN + number] * (length - len(whole))]
