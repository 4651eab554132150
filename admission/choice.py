"""A row of a table of policies: its parameters, what they may be, and what it says of itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Knob:
    """What a parameter of a policy may be: from this its check, its row in the docs and the tuner's search space derive."""

    low: float
    high: float
    about: str
    log: bool = False
    """Whether a search steps by ratios rather than by differences."""


class PolicyParameterError(ValueError):
    """A parameter that the policy does not have, or a value outside its range. Says which there are."""


class Choice:
    """One policy to choose. `parameters` is its frozen dataclass; each field is annotated with a `Knob`. `make` builds the policy."""

    __slots__ = ("_make", "parameters")

    def __init__(self, parameters: type[Any], make: Callable[..., Any]) -> None:
        self.parameters = parameters
        self._make = make

    @property
    def about(self) -> str:
        """What it does, in a sentence: the first of its module's docstring, without its name."""
        return (sys.modules[self._make.__module__].__doc__ or "").split("\n")[0].partition(": ")[2]

    def knobs(self) -> dict[str, Knob]:
        """Parameters by name, in the order of the dataclass."""
        hints = get_type_hints(self.parameters, include_extras=True)
        return {name: hint.__metadata__[0] for name, hint in hints.items()}

    def chosen(self, values: Mapping[str, float] | None = None) -> Any:
        """The parameters with `values` in place of the defaults. Raises PolicyParameterError."""
        knobs = self.knobs()
        for name, value in (values or {}).items():
            if name not in knobs:
                raise PolicyParameterError(f"no parameter {name!r}; there are: {', '.join(knobs) or 'none'}")
            if not knobs[name].low <= value <= knobs[name].high:
                raise PolicyParameterError(f"{name} = {value:g} is outside {knobs[name].low:g} to {knobs[name].high:g}")
        return self.parameters(**(values or {}))
