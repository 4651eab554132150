"""Where a request's first blocks may come from, other than the engine's own pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from replays.simulator.chains import Branch
    from replays.simulator.engine import EngineRequest


class Loader(Protocol):
    """A tier under the pool, or another engine that has prefilled."""

    def offer(self, request: EngineRequest, hit: int, limit: int, now: float) -> int:
        """Tokens of the request's front that will be there if it waits; 0 where waiting is not worth it. `hit` blocks are in the pool;
        at most `limit` blocks may be hit. Changes no content."""
        ...

    def load(self, request: EngineRequest, hit: int, num_tokens: int, now: float) -> float:
        """Start bringing what was just offered; seconds until it has come. Changes state."""
        ...

    def tell(self, branch: Branch, now: float) -> None:
        """What becomes of `branch` has changed. Changes state."""
        ...
