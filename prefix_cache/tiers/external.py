"""What the books ask of the tiers behind an engine, whichever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prefix_cache.blocks import BlockHash
from prefix_cache.tiers import Tier


@dataclass(frozen=True, slots=True)
class ExternalHit:
    """What the tiers are expected to add beyond the GPU's hit, in tokens."""

    num_tokens: int
    num_given_tokens: int
    """The same, had the tiers kept all that they were ever given."""
    tier: Tier | None = None
    """The slowest tier that takes part; None: no tier does."""
    num_explained_tokens: int = 0
    """A hit of the whole prompt that GPU and memory explain by themselves."""
    num_gpu_tokens: int = 0
    """The GPU's hit."""
    num_declined_tokens: int = 0
    """What they have beyond that and are expected not to load, as computing it is quicker."""
    is_known: bool = True
    """False: nobody has ever said what they hold."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Of a prompt that has been answered: leading tokens up to which the tiers account for what was missed. 0: they account for nothing."""

    given: int = 0
    """They had been given it, and have it no more."""
    declined: int = 0
    """They have it, and did not load it."""


class ExternalTiers(Protocol):
    """Their contents as far as they are known. `hashes`: of a prompt's whole blocks, and perhaps more behind those."""

    @property
    def num_resident_tokens(self) -> int:
        """In memory, whole on every rank."""

    def predict(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_gpu_tokens: int) -> ExternalHit:
        """The hit beyond the first `num_gpu_tokens`, which the GPU holds."""

    def ends(self, hashes: Sequence[BlockHash], num_cached_tokens: int, expected: ExternalHit) -> Ends:
        """Why a request found `num_cached_tokens` and no more, of which `expected` was expected. Asked before `learn`."""

    def learn(self, hashes: Sequence[BlockHash], num_prompt_tokens: int, num_cached_tokens: int, expected: ExternalHit) -> None:
        """Correct the guess by a finished request. Changes state."""

    def computed(self, hashes: Sequence[BlockHash], num_tokens: int, *, salted: bool) -> None:
        """A request has computed or loaded its first `num_tokens`. Changes state."""
