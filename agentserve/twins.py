"""Holds a turn back while another request computes the head that both share, until that one has its first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from admission.twins import TwinGate


class TwinRoom:
    """Sleeps and wakes for a `TwinGate`. No turn is held for longer than `limit_seconds` in all.

    `held` hears of every turn that had to wait: for how many seconds, and whether the wait ended as it should.
    """

    def __init__(self, gate: TwinGate, *, limit_seconds: float, clock: Callable[[], float], held: Callable[[float, bool], None]) -> None:
        self._gate = gate
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._held = held
        self._computed: dict[str, asyncio.Event] = {}
        self.num_held = 0

    async def wait(self, hashes: Sequence[bytes], start: int) -> int:
        """Return when no other request computes much of `hashes[start:]`; the block up to which others have computed it meanwhile."""
        came = self._clock()
        is_over = False
        known = start
        while not is_over and (twin := self._gate.twin(hashes, known)) is not None:
            lead, end = twin
            is_over = not await self._ended(lead.request_id, came + self._limit_seconds)
            known = known if is_over else end
        if known > start or is_over:
            self._held(self._clock() - came, not is_over)
        return known

    @contextmanager
    def computing(self, request_id: str, hashes: Sequence[bytes], start: int) -> Iterator[None]:
        """The body of the `with` computes the blocks from `start` on, until `computed` is called or it ends."""
        self._gate.enter(request_id, hashes, start)
        try:
            yield
        finally:
            self.computed(request_id)

    def computed(self, request_id: str) -> None:
        """The request has its first token. A second call is harmless."""
        if self._gate.leave(request_id):
            ended = self._computed.pop(request_id, None)
            if ended is not None:
                ended.set()

    async def _ended(self, request_id: str, deadline: float) -> bool:
        """Whether the request has its first token, or has ended, before `deadline`."""
        ended = self._computed.setdefault(request_id, asyncio.Event())
        self.num_held += 1
        try:
            await asyncio.wait_for(ended.wait(), max(0.0, deadline - self._clock()))
        except TimeoutError:
            return False
        finally:
            self.num_held -= 1
        return True
