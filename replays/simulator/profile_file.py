"""A profile in a file: what `agentserve calibrate` measured, the constants fitted to it, and how far off they are elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from replays.simulator.cost import CostModel, Profile
from replays.simulator.options import EngineOptions


class Measured(msgspec.Struct, frozen=True):
    """One measured point.

    A prefill of `num_new` tokens behind `context` cached ones, as the client sees it; the step of `num_sequences` that decode with
    `context` tokens each; or both, joined: a prefill of `num_new` tokens that comes at any moment while so many decode.
    """

    kind: str
    """prefill, decode or joined."""
    num_new: int
    context: int
    num_sequences: int
    seconds: float
    held_back: bool = False
    predicted_seconds: float = 0.0

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_seconds / self.seconds - 1


class Constants(msgspec.Struct, frozen=True):
    """Seconds: of a step and of what is in it (`replays.simulator.cost.CostModel`); of a request and its prompt tokens outside of steps."""

    step: float
    per_sequence: float
    per_context_token: float
    per_prefill_token: float
    per_prefill_product: float
    request: float
    token: float
    busy: float = 0.0
    """Outside of steps too, for each other request that the engine has."""
    wake: float = 0.0
    """Where it has none."""


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file's content."""

    name: str
    engine: str
    """What was measured: engine and version, model, address."""
    measured: str
    """When, as a date."""
    capacity_tokens: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    constants: Constants
    points: Sequence[Measured] = ()

    @property
    def held_back(self) -> list[Measured]:
        return [point for point in self.points if point.held_back]


class ProfileFileError(ValueError):
    """The file is not there or is no profile; the message says which."""


def read_profile_file(path: Path) -> ProfileFile:
    """Raises ProfileFileError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ProfileFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfileFileError(f"{str(path)!r} cannot be read as a profile: {error}") from error


def profile_of(file: ProfileFile) -> Profile:
    """As the simulator wants it."""
    constants = file.constants
    return Profile(
        name=file.name,
        capacity_tokens=file.capacity_tokens,
        engine=EngineOptions(
            num_blocks=0,
            block_size=file.block_size,
            max_num_batched_tokens=file.max_num_batched_tokens,
            max_num_seqs=file.max_num_seqs,
        ),
        cost=CostModel(
            constants.step,
            constants.per_sequence,
            constants.per_context_token,
            constants.per_prefill_token,
            constants.per_prefill_product,
        ),
        request_seconds=constants.request,
        token_seconds=constants.token,
        busy_seconds=constants.busy,
        wake_seconds=constants.wake,
        about=f"calibrated on {file.engine}, {file.measured}",
    )
