"""A row of the table: a policy's parameters, what they may be, and how to build it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from admission.eviction.guard import Guard
from admission.eviction.policy import EvictionPolicy, Knob, Pool


class PolicyParameterError(ValueError):
    """A parameter that the policy does not have, or a value outside its range. Says which there are."""


class PolicyChoice:
    """How to build one policy. `parameters` is its frozen dataclass; each field is annotated with a `Knob`."""

    __slots__ = ("_make", "needs_future", "needs_returns", "parameters", "reads_fates")

    def __init__(
        self,
        parameters: type[Any],
        make: Callable[[Any, Pool], EvictionPolicy],
        *,
        needs_returns: bool = False,
        needs_future: bool = False,
        reads_fates: bool = False,
    ) -> None:
        self.parameters = parameters
        self._make = make
        self.needs_returns = needs_returns
        """Whether `Pool.returns` must be given."""
        self.needs_future = needs_future
        """Whether `Extent.next_use_seconds` must be filled in, which only a replay can do."""
        self.reads_fates = reads_fates
        """Whether it makes a difference what is believed dead."""

    @property
    def about(self) -> str:
        """What it does, in a sentence: the first of its module's docstring, without its name."""
        return (sys.modules[self._make.__module__].__doc__ or "").split("\n")[0].partition(": ")[2]

    def knobs(self) -> dict[str, Knob]:
        """Parameters by name, in the order of the dataclass."""
        hints = get_type_hints(self.parameters, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    def build(self, pool: Pool, values: Mapping[str, float] | None = None) -> EvictionPolicy:
        """The policy with `values` in place of the defaults. Raises PolicyParameterError."""
        assert not self.needs_returns or pool.returns is not None
        return Guard(self._make(self.parameters(**self._checked(values or {})), pool))

    def _checked(self, values: Mapping[str, float]) -> dict[str, float]:
        knobs = self.knobs()
        for name, value in values.items():
            if name not in knobs:
                raise PolicyParameterError(f"no parameter {name!r}; there are: {', '.join(knobs) or 'none'}")
            if not knobs[name].low <= value <= knobs[name].high:
                raise PolicyParameterError(f"{name} = {value:g} is outside {knobs[name].low:g} to {knobs[name].high:g}")
        return dict(values)
