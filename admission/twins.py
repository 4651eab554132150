"""Twins: requests that need the same blocks, which nobody has computed yet. One computes them, the others wait for that and find them.

A gate in front of the admission policy: who waits here is in nobody's queue and holds nothing. The wait is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lead:
    """A request that computes blocks `start` to `stop` of a prompt whose chained block hashes are `hashes` (which may grow behind them)."""

    request_id: str
    hashes: Sequence[bytes]
    start: int
    stop: int


class TwinGate:
    """Who computes what. `min_blocks`: fewer shared blocks than this are not worth a wait; 0 lets everybody through."""

    def __init__(self, min_blocks: int) -> None:
        assert min_blocks >= 0
        self._min_blocks = min_blocks
        self._leads: dict[str, Lead] = {}

    @property
    def num_leads(self) -> int:
        """Requests whose prompts are being computed."""
        return len(self._leads)

    def enter(self, request_id: str, hashes: Sequence[bytes], start: int) -> None:
        """A request sets out to compute the blocks of its prompt from `start` on. Owes one `leave`."""
        assert request_id not in self._leads
        if self._min_blocks and len(hashes) - start >= self._min_blocks:
            self._leads[request_id] = Lead(request_id, hashes, start, len(hashes))

    def leave(self, request_id: str) -> bool:
        """Its prompt is computed, or never will be. Whether it was being computed until now; a second call is harmless."""
        return self._leads.pop(request_id, None) is not None

    def twin(self, hashes: Sequence[bytes], start: int) -> tuple[Lead, int] | None:
        """The request that computes the most of `hashes[start:]` now, and the block up to which it does; None if it is too little."""
        found = ((lead, self._shared_end(lead, hashes, start)) for lead in self._leads.values())
        lead, end = max(found, key=lambda pair: pair[1], default=(None, 0))
        return (lead, end) if lead is not None and end - start >= self._min_blocks else None

    def _shared_end(self, lead: Lead, hashes: Sequence[bytes], start: int) -> int:
        """How many leading blocks both prompts have, if `lead` computes what is behind `start`; else 0. Equal hash, equal prefix."""
        stop = min(lead.stop, len(hashes))
        if not lead.start <= start < stop or lead.hashes[start] != hashes[start]:
            return 0
        equal, differs = start + 1, stop + 1
        while equal + 1 < differs:
            middle = (equal + differs) // 2
            if lead.hashes[middle - 1] == hashes[middle - 1]:
                equal = middle
            else:
                differs = middle
        return equal
