"""A row of the table: a policy's parameters, what they may be, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from admission.choice import Choice
from admission.choice import PolicyParameterError as PolicyParameterError
from admission.eviction.guard import Guard
from admission.eviction.policy import EvictionPolicy, Pool


class PolicyChoice(Choice):
    """How to build one eviction policy."""

    __slots__ = ("needs_future", "needs_returns", "reads_fates")

    def __init__(
        self,
        parameters: type[Any],
        make: Callable[[Any, Pool], EvictionPolicy],
        *,
        needs_returns: bool = False,
        needs_future: bool = False,
        reads_fates: bool = False,
    ) -> None:
        super().__init__(parameters, make)
        self.needs_returns = needs_returns
        """Whether `Pool.returns` must be given."""
        self.needs_future = needs_future
        """Whether `Extent.next_use_seconds` must be filled in, which only a replay can do."""
        self.reads_fates = reads_fates
        """Whether it makes a difference what is believed dead."""

    def build(self, pool: Pool, values: Mapping[str, float] | None = None) -> EvictionPolicy:
        """The policy with `values` in place of the defaults. Raises PolicyParameterError."""
        assert not self.needs_returns or pool.returns is not None
        return Guard(self._make(self.chosen(values), pool))
