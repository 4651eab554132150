"""The fixed-shape benchmark that most published figures come from, on a simulated engine.

So many requests at any time, ten times as many in all, prompts and answers of random length between `shortest` and all of what is said,
nothing shared, nothing stopped early. Figures are over the whole run, its ramp and its end included.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

from admission.eviction import EVICTION_POLICIES
from admission.eviction.policy import Pool
from admission.lifecycle import Lifecycle
from admission.policies import ADMISSION_POLICIES
from admission.requests import Limits
from admission.returns import ReturnModel
from admission.tickets import TicketBook
from replays.simulator.chains import Branch
from replays.simulator.clock import Clock
from replays.simulator.cost import Profile
from replays.simulator.engine import Engine
from replays.simulator.handover import Handover
from replays.simulator.lives import Lives
from replays.simulator.outcomes import Outcome
from replays.simulator.pool import BlockPool
from replays.simulator.server import Call, Server


@dataclass(frozen=True, slots=True)
class FixedShape:
    """Tokens, and requests at a time."""

    concurrency: int
    num_prompt_tokens: int = 8192
    num_output_tokens: int = 1024
    shortest: float = 0.8
    num_requests_each: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """What such a benchmark reports."""

    output_tokens_per_second_gpu: float
    total_tokens_per_second_gpu: float
    ttft_seconds: float
    """Median."""
    tpot_seconds: float
    """Mean."""


def engines_of(profile: Profile, make: Callable[[Profile], Engine]) -> tuple[list[Engine], Handover | None]:
    """One replica's engines: with prefill and decode apart, those that prefill come first."""
    if profile.prefill is None:
        return [make(profile)], None
    engines = [make(profile.prefill) for _ in range(profile.num_prefill)]
    handover = Handover(profile.reads, profile.num_prefill)
    decoder = make(profile)
    decoder.loader = handover
    return [*engines, decoder], handover


def _engine(profile: Profile, concurrency: int) -> Engine:
    size = profile.engine.block_size
    options = replace(
        profile.engine, num_blocks=profile.capacity_tokens // size, max_num_seqs=max(concurrency, profile.engine.max_num_seqs)
    )
    policy = EVICTION_POLICIES["lru"].build(Pool(options.num_blocks))
    return Engine(options, BlockPool(options.num_blocks, policy), profile.cost)


def run_fixed_shape(profile: Profile, shape: FixedShape) -> ShapeFigures:
    """Play the benchmark. The same arguments give the same figures."""
    clock = Clock()
    engines, handover = engines_of(profile, lambda each: _engine(each, shape.concurrency))
    outcomes: list[Outcome] = []
    admission = ADMISSION_POLICIES["fcfs"](TicketBook(), Limits(capacity_tokens=1 << 60))
    lives = Lives(Lifecycle(ReturnModel()), says_ends=False)
    server = Server(clock, engines, admission, lives, profile.front_seconds, outcomes.append, handover=handover)
    rng = random.Random(shape.seed)
    left = shape.concurrency * shape.num_requests_each

    def send(_: Outcome | None = None) -> None:
        nonlocal left
        if left:
            left -= 1
            server.submit(_call(left, rng, shape, send), left)

    for _ in range(shape.concurrency):
        send()
    clock.run()
    return _figures(outcomes, clock.now, profile.num_gpus)


def _call(number: int, rng: random.Random, shape: FixedShape, on_done: Callable[[Outcome | None], None]) -> Call:
    prompt, output = (rng.randint(int(tokens * shape.shortest), tokens) for tokens in (shape.num_prompt_tokens, shape.num_output_tokens))
    path = (Branch(None, 0, number, generated=True),)
    return Call(number, str(number), path, prompt, output, "", warmup=False, on_done=on_done, is_last=True)


def _figures(outcomes: list[Outcome], seconds: float, num_gpus: int) -> ShapeFigures:
    output = sum(outcome.num_output_tokens for outcome in outcomes)
    prompt = sum(outcome.num_prompt_tokens for outcome in outcomes)
    return ShapeFigures(
        output / seconds / num_gpus,
        (output + prompt) / seconds / num_gpus,
        median(outcome.first_token - outcome.asked for outcome in outcomes),
        fmean((outcome.finished - outcome.first_token) / (outcome.num_output_tokens - 1) for outcome in outcomes),
    )
