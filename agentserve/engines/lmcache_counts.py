"""Reads what `lmcache_ranks` counts inside an LMCache server, over all of the server's lives."""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp

from agentserve.engines.lmcache_ranks import COUNTERS, PREFIX
from agentserve.engines.prometheus import sums
from prefix_cache.tiers.ranks import RankLookups

READ_SECONDS: Final = 2.0
"""From one reading to the next."""
_TIMEOUT: Final = aiohttp.ClientTimeout(total=5.0)


class RankCounts:
    """Adds to `lookups` what the server at `url` (its HTTP side) has counted since the last reading."""

    def __init__(self, url: str) -> None:
        self.lookups = RankLookups()
        self._url = f"{url}/metrics"
        self._last = dict.fromkeys(COUNTERS, 0)

    def restarted(self) -> None:
        """A new server counts from 0."""
        self._last = dict.fromkeys(COUNTERS, 0)

    async def follow(self) -> None:
        """Read for ever. A server that does not answer is asked again the next time."""
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as client:
            while True:
                await asyncio.sleep(READ_SECONDS)
                try:
                    async with client.get(self._url) as response:
                        self.take(await response.read())
                except (aiohttp.ClientError, TimeoutError):
                    pass  # it has died, or is busy

    def take(self, text: bytes) -> None:
        """Metrics as the server shows them."""
        shown = sums(text)
        now = {name: round(shown.get(f"{PREFIX}{name}_total", 0)) for name in COUNTERS}
        grown = {name: max(0, count - self._last[name]) for name, count in now.items()}
        self._last = now
        self.lookups.num_lookups += grown["lookups"]
        self.lookups.num_differing += grown["differing_lookups"]
        self.lookups.num_given_up_tokens += grown["given_up_tokens"]
