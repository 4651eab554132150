"""What is wrong with rows of a trace. A strict reading ends at the first bad row; a lenient one leaves it out, counts it and names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from replays.traces import TraceError

MAX_NAMED = 200
"""Rows of each kind that a report names; the counts are of all."""


class RowFault(Struct, frozen=True, omit_defaults=True):
    """A row: its file, its line (None: the whole file is one row), the field at fault where one is, and what is wrong with it."""

    path: str
    line: int | None
    reason: str
    field: str | None = None

    def __str__(self) -> str:
        return self.path + (f", line {self.line}" if self.line is not None else "") + (f", {self.field}" if self.field else "")


class RowsReport(Struct, kw_only=True):
    """The rows of a trace that were left out, and those that were read and are odd; the first `MAX_NAMED` of each by name."""

    num_skipped: int = 0
    num_flagged: int = 0
    skipped: list[RowFault] = []
    flagged: list[RowFault] = []


class RowFaults:
    """Hears of every odd row of one reading. A row that is read twice is counted once."""

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict
        self._skipped: dict[tuple[str, int | None], RowFault] = {}
        self._flagged: dict[tuple[str, int | None], RowFault] = {}

    def skip(self, error: TraceError) -> None:
        """A bad row. Raises `error` in a strict reading."""
        if self.strict:
            raise error
        self.note(error)

    def note(self, error: TraceError) -> None:
        """A row that every reading leaves out, such as a last line that a crash cut off."""
        self._skipped.setdefault((str(error.path), error.row), _fault(error))

    def flag(self, error: TraceError) -> None:
        """A row that is read, and is odd."""
        self._flagged.setdefault((str(error.path), error.row), _fault(error))

    @property
    def num_skipped(self) -> int:
        return len(self._skipped)

    def report(self) -> RowsReport:
        """What was heard so far, in order of file and line."""
        skipped, flagged = (sorted(found.values(), key=_place) for found in (self._skipped, self._flagged))
        return RowsReport(num_skipped=len(skipped), num_flagged=len(flagged), skipped=skipped[:MAX_NAMED], flagged=flagged[:MAX_NAMED])


def _fault(error: TraceError) -> RowFault:
    return RowFault(str(error.path), error.row, error.problem, error.field)


def _place(fault: RowFault) -> tuple[str, int]:
    return fault.path, fault.line or 0


def say_rows(rows: RowsReport, num_shown: int = 5) -> list[str]:
    """Lines for people: how many rows were left out or are odd, and the first of them."""
    said = []
    kinds = ((rows.num_skipped, "left out (--strict stops at the first)", rows.skipped), (rows.num_flagged, "odd but read", rows.flagged))
    for number, what, named in kinds:
        if number:
            said.append(f"{number} row{'s' if number > 1 else ''} of the trace {what}:")
            said += [f"  {fault}: {fault.reason}" for fault in named[:num_shown]]
            said += ["  …"] if number > num_shown else []
    return said
