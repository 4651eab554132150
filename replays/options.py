"""What a replay can be told, said once: the command line of `agentserve replay`, locust's own options (`--replay-…`) and the
variables AGENTSERVE_REPLAY_… are all derived from these fields."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from math import inf
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Parameter, Token
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveFloat

from replays.prompts import Assistant, ScriptName

NO_IDLE_SECONDS = 0.001
"""A replay whose longest idle time is shorter has none."""


def parse_scale(text: str) -> float:
    """A number or fraction in 0 < scale ≤ 1. Raises ArgumentTypeError (a ValueError for cyclopts is made of it)."""
    try:
        scale = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ArgumentTypeError(f"{text!r} is neither a number nor a fraction such as 1/64") from None
    if not 0 < scale <= 1:
        raise ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return scale


def _scale_of(_: object, tokens: Sequence[Token]) -> float:
    try:
        return parse_scale(tokens[0].value)
    except ArgumentTypeError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay. Seconds of caps and gaps are trace time; `duration`, `grace` and `sample_interval` are wall time."""

    scale: Annotated[
        float, Parameter(converter=_scale_of, help="Tokens are multiplied by this: above 0, at most 1; a fraction such as 1/64 is fine.")
    ] = 1.0
    time_scale: Annotated[PositiveFloat, Parameter(help="Recorded times are divided by this.")] = 1.0
    delays: Annotated[
        Literal["kept", "zero"],
        Parameter(help="zero: the next request goes out at once. Nothing is evicted while tools run: an upper bound."),
    ] = "kept"
    marker: Annotated[
        Literal["on", "off"], Parameter(help="on: each play begins its first user message with a marker of its own (AgentX's cache bust).")
    ] = "on"
    duration: Annotated[PositiveFloat, Parameter(help="Seconds of profiling, after the warm-up.")] = 60.0
    grace: Annotated[NonNegativeFloat, Parameter(help="Seconds given to what is in flight when the duration is over.")] = 30.0
    seed: Annotated[int, Parameter(help="Where in its trace each first session starts.")] = 42
    assistant: Annotated[
        Assistant, Parameter(help="canned: recorded-length text stands for the answers (AgentX). live: the server's answers are sent back.")
    ] = "canned"
    script: Annotated[
        ScriptName,
        Parameter(help="tools, with live: each answer is forced to reason, to write and to call tools, whose results come back."),
    ] = "none"
    model_folder: Annotated[
        str, Parameter(help="Folder with the served model's tokenizer, for scripted answers; empty: that of the embedded engine.")
    ] = ""
    once: Annotated[bool, Parameter(help="Play each session once from its first turn to its last; no warm-up.")] = False
    warmup: Annotated[NonNegativeInt, Parameter(help="Requests per lane after the primers, with max_tokens 1 and no idle time.")] = 10
    window_start: Annotated[NonNegativeFloat, Parameter(help="First sessions start at a random point of their time: from here…")] = 0.25
    window_end: Annotated[NonNegativeFloat, Parameter(help="…to here (shares of the whole).")] = 0.75
    idle_cap: Annotated[PositiveFloat, Parameter(help="Longest idle time of one session tree, trace seconds.")] = 300.0
    system_idle_cap: Annotated[PositiveFloat, Parameter(help="Longest time with nothing in flight at all, trace seconds.")] = 10.0
    sample_interval: Annotated[PositiveFloat, Parameter(help="Seconds between two looks at the engine's metrics.")] = 0.5
    model: Annotated[str, Parameter(help="Model to ask for; empty: the first that the server lists.")] = ""

    @property
    def pace(self) -> float:
        """What recorded times are divided by; infinite where idle times are dropped."""
        return inf if self.delays == "zero" else self.time_scale

    @property
    def drops_idle_times(self) -> bool:
        """Whether no idle time is long enough for anything to happen in it."""
        return self.idle_cap / self.pace < NO_IDLE_SECONDS


def option_fields() -> Iterator[tuple[str, object, Any, str]]:
    """(name, default, type or tuple of choices, help) of each option."""
    hints = get_type_hints(ReplayOptions, include_extras=True)
    for field in fields(ReplayOptions):
        kind, *notes = get_args(hints[field.name])
        text = next(note.help for note in reversed(notes) if isinstance(note, Parameter) and note.help)
        if get_origin(kind) is not None:
            kind = get_args(kind)
        yield field.name, field.default, kind, text


def to_arguments(options: ReplayOptions) -> list[str]:
    """`options` as locust's command line."""
    arguments: list[str] = []
    for name, default, _, _ in option_fields():
        value = getattr(options, name)
        if value != default:
            flag = f"--replay-{name.replace('_', '-')}"
            arguments += [flag] if value is True else [flag, str(value)]
    return arguments


def from_namespace(namespace: Namespace) -> ReplayOptions:
    """The options that locust parsed."""
    return ReplayOptions(**{name: getattr(namespace, f"replay_{name}") for name, _, _, _ in option_fields()})
