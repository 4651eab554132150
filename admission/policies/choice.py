"""A row of the table of admission policies: its parameters, what they may be, and how to build it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from admission.choice import Choice
from admission.policies.gate import Gate
from admission.policies.rule import Conditions, Rule
from admission.requests import Limits, Outlook
from admission.tickets import TicketBook


class AdmissionChoice(Choice):
    """How to build one admission policy."""

    __slots__ = ()

    def __init__(self, parameters: type[Any], make: Callable[[Any, Conditions], Rule]) -> None:
        super().__init__(parameters, make)

    def __call__(self, book: TicketBook, limits: Limits, values: Mapping[str, float] | None = None, outlook: Outlook | None = None) -> Gate:
        """A gate by this policy, with `values` in place of the defaults. Raises PolicyParameterError."""
        return Gate(book, limits, self.rule(limits, values, outlook))

    def rule(self, limits: Limits, values: Mapping[str, float] | None = None, outlook: Outlook | None = None) -> Rule:
        """Only the rule, for a gate that is open already. Raises PolicyParameterError."""
        rule: Rule = self._make(self.chosen(values), Conditions(limits, outlook))
        return rule
