"""What a generated session does, step by step; and how one is made up at random."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from agentserve.canonical.table import CANONICAL_RULES


class StepKind(StrEnum):
    """What an agent does next with its history."""

    GO_ON = "go_on"
    """It sends the results of the calls, or what its user says next."""
    EDIT = "edit"
    """An earlier message is changed; what followed it stays in the history."""
    FORK = "fork"
    """It goes back to an earlier answer and goes on from there otherwise."""
    REGENERATE = "regenerate"
    """The same history again, for another answer."""
    RETRY = "retry"
    """The client leaves in the middle of the answer and sends the same again."""
    SUB_AGENT = "sub_agent"
    """A sub-agent with a head of its own works for some turns; what it says comes back as a message."""
    COMPACT = "compact"
    """The history is replaced by a summary."""
    TWO_AT_ONCE = "two_at_once"
    """Two turns on the same answer at the same time."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step. `dialect`: index into `forms.FORMS`. The rest is how the client writes the history this time."""

    kind: StepKind
    dialect: int = 0
    seconds: float = 10.0
    """Since the step before."""
    streams: bool = True
    reserialises: bool = False
    """Arguments in other key order, white space, escapes and spellings of numbers."""
    pads_text: bool = False
    """Other outer white space around what the assistant said."""
    by_id: bool = False
    """Responses only: what is new, behind `previous_response_id`."""


@dataclass(frozen=True, slots=True)
class Script:
    """One session. `is_named`: the client says its session in a header; else the server finds it by what it says.

    Texts are of `head_bytes` and about `turn_bytes`; sessions of the same `product` share their head. `disturbances` are rules' names.
    `drops_reasoning`: the client never sends back what the model thought.
    """

    seed: int
    steps: tuple[Step, ...]
    is_named: bool = True
    product: int = 0
    disturbances: tuple[str, ...] = tuple(CANONICAL_RULES)
    drops_reasoning: bool = False
    head_bytes: int = 16_000
    turn_bytes: int = 1_800


KINDS: dict[StepKind, float] = {
    StepKind.GO_ON: 0.80,
    StepKind.EDIT: 0.03,
    StepKind.FORK: 0.03,
    StepKind.REGENERATE: 0.04,
    StepKind.RETRY: 0.03,
    StepKind.SUB_AGENT: 0.03,
    StepKind.COMPACT: 0.01,
    StepKind.TWO_AT_ONCE: 0.03,
}
"""How often a generated session does each."""
_SWITCH_SHARE = 0.02
"""Steps that go on in another dialect."""
_STRICT_SHARE = 0.3
"""Sessions whose client echoes what it got as it got it."""
PRODUCTS = 4


def generate(seed: int, num_steps: int) -> Script:
    """A session of an agent that works with its user, with everything that clients do."""
    rng = random.Random(seed)
    dialect, strict = rng.randrange(3), rng.random() < _STRICT_SHARE
    steps = []
    for _ in range(num_steps):
        if rng.random() < _SWITCH_SHARE:
            dialect = rng.randrange(3)
        steps.append(_step(rng, dialect, strict))
    is_named, drops = rng.random() < 0.5, not strict and rng.random() < 0.3
    return Script(seed, tuple(steps), is_named, rng.randrange(PRODUCTS), _disturbances(rng), drops)


def _step(rng: random.Random, dialect: int, strict: bool) -> Step:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    seconds = rng.expovariate(1 / 12)
    streams, again, pads, by_id = (rng.random() < share for share in (0.5, 0.3, 0.1, 0.2))
    return Step(kind, dialect, seconds, streams, again and not strict, pads and not strict, by_id)


def _disturbances(rng: random.Random) -> tuple[str, ...]:
    """Some rules' content; in every fourth session that of all of them."""
    names = list(CANONICAL_RULES)
    return tuple(names if rng.random() < 0.25 else [name for name in names if rng.random() < 0.4])
