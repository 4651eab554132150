"""A check and what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from agentserve.doctor.facts import Facts


class State(StrEnum):
    """What a check came to."""

    FINE = "fine"
    FOUND = "found"
    UNKNOWN = "unknown"
    """What it reads could not be read."""
    APART = "does not apply"
    """There is nothing here that it could be wrong about."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and for FOUND what to do about it; for UNKNOWN `fix` says how it can be known."""

    state: State
    finding: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the table. `reads` in words."""

    name: str
    reads: str
    look: Callable[[Facts], Verdict]


def fine(finding: str) -> Verdict:
    """Nothing to do."""
    return Verdict(State.FINE, finding)


def found(finding: str, fix: str) -> Verdict:
    """Something that costs hits or crashes."""
    return Verdict(State.FOUND, finding, fix)


def unknown(finding: str, fix: str) -> Verdict:
    """Nobody says."""
    return Verdict(State.UNKNOWN, finding, fix)


def apart(finding: str) -> Verdict:
    """Nothing to look at."""
    return Verdict(State.APART, finding)


WHERE_TO_ASK = "run the doctor on the engine's host, or start vLLM with VLLM_SERVER_DEV_MODE=1, which opens /server_info"
"""The way to know what vLLM does not tell over HTTP."""
