"""Telling the engine's plugin what is known of sessions, so that its eviction spares what will be needed.

    hints = PluginHints(engine.url, api_key=key)      # or NoHints(), where the engine has no plugin
    await hints.start()
    request = GenerateRequest(…, session_id=session.id, xargs={**options.xargs, **hints.xargs(TurnHints(branch_id=branch))})
    hints.tell(SessionHint(session_id=session.id, return_class=lifecycle.return_class(session.id)))      # the turn is over
    hints.tell(SessionHint(session_id=session.id, fate=Fate.ENDED))                                      # and so is the session

`xargs` and `tell` return at once and never raise. Hints that cannot be delivered are dropped and counted: a turn never waits for them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol

import aiohttp
import structlog

from agentserve.engines.plugin.wire import (
    HINTS_PATH,
    STATE_PATH,
    BadHint,
    HintBatch,
    PluginState,
    SessionHint,
    TurnHints,
    encode,
    read_state,
    xargs,
)

__all__ = ["EngineHints", "NoHints", "PluginHints", "PluginState", "SessionHint", "TurnHints", "engine_hints"]

MAX_PENDING: Final = 20_000
MAX_ALONG: Final = 200
"""Hints that travel along with one request, where there is no route for them."""
BATCH_SECONDS: Final = 0.02
TIMEOUT_SECONDS: Final = 2.0
_AGAIN_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Before each try to set the policy in an engine that has been started again."""
_ROUTE_ABSENT: Final = (401, 403, 404, 405)

_log = structlog.get_logger(__name__)


class EngineHints(Protocol):
    """Where hints go."""

    num_lost: int
    """Hints that could not be delivered."""

    def xargs(self, hints: TurnHints) -> Mapping[str, str]:
        """What a request carries for `hints`, to be merged into `GenerateRequest.xargs`."""
        ...

    def tell(self, *hints: SessionHint) -> None:
        """Delivered soon, in order, at most once."""
        ...

    async def start(self) -> None:
        """Learn whether the engine takes hints. Does not fail."""
        ...

    async def state(self) -> PluginState | None:
        """What the plugin says of itself; None where there is none or it does not answer."""
        ...

    async def switch(self, policy: str, parameters: Mapping[str, float]) -> PluginState | None:
        """Another eviction policy from now on. None where nothing took it."""
        ...

    async def restarted(self) -> None:
        """The engine has been started again, with the policy of its start: set the one in force. Does not fail."""
        ...

    async def close(self) -> None:
        """Deliver what is pending, if that is possible at once."""
        ...


class NoHints:
    """An engine without the plugin."""

    num_lost = 0

    def xargs(self, hints: TurnHints) -> Mapping[str, str]:
        return {}

    def tell(self, *hints: SessionHint) -> None:
        pass

    async def start(self) -> None:
        pass

    async def state(self) -> PluginState | None:
        return None

    async def switch(self, policy: str, parameters: Mapping[str, float]) -> PluginState | None:
        return None

    async def restarted(self) -> None:
        pass

    async def close(self) -> None:
        pass


def engine_hints(plugin: str, url: str, api_key: str | None = None) -> EngineHints:
    """For the setting `engine.plugin` and the engine at `url`."""
    return NoHints() if plugin == "off" else PluginHints(url, api_key=api_key)


class PluginHints:
    """The plugin of the vLLM at `url`. Where its routes are not open (VLLM_PLUGINS does not name agentserve), hints on sessions travel
    along with the next request."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.num_lost = 0
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({} if api_key is None else {"Authorization": f"Bearer {api_key}"})
        self._session: aiohttp.ClientSession | None = None
        self._pending: deque[SessionHint] = deque()
        self._has_route = False
        self._sender: asyncio.Task[None] | None = None
        self._warned = False
        self._switched: HintBatch | None = None
        """The policy in force, where it is not that of the engine's start."""

    async def start(self) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_SECONDS), headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        state = await self.state()
        self._has_route = state is not None
        _log.info("engine hints", url=self._url, by_route=self._has_route, policy=None if state is None else state.policy)

    def xargs(self, hints: TurnHints) -> Mapping[str, str]:
        if not self._has_route and self._pending:
            along = [self._pending.popleft() for _ in range(min(len(self._pending), MAX_ALONG))]
            hints = replace(hints, others=(*hints.others, *along))
        return xargs(hints)

    def tell(self, *hints: SessionHint) -> None:
        self._pending.extend(hints)
        while len(self._pending) > MAX_PENDING:
            self._pending.popleft()
            self._lost(1, "more hints than the engine takes")
        if self._has_route and self._sender is None:
            self._sender = asyncio.get_running_loop().create_task(self._send(), name="engine-hints")

    async def state(self) -> PluginState | None:
        return await self._ask("GET", STATE_PATH, None)

    async def switch(self, policy: str, parameters: Mapping[str, float]) -> PluginState | None:
        """Another eviction policy from now on. None where the plugin did not take it."""
        wanted = HintBatch(policy=policy, parameters=parameters)
        state = await self._ask("POST", HINTS_PATH, encode(wanted))
        if state is not None:
            self._switched = wanted
        return state

    async def restarted(self) -> None:
        if self._switched is None:
            return
        for wait_seconds in _AGAIN_SECONDS:
            await asyncio.sleep(wait_seconds)
            wanted = self._switched  # another may have been chosen meanwhile
            if await self._ask("POST", HINTS_PATH, encode(wanted)) is not None:
                _log.info("eviction policy set again", url=self._url, policy=wanted.policy, parameters=dict(wanted.parameters))
                return
        _log.error("eviction policy lost: the engine that was started again has that of its start", url=self._url, lost=wanted.policy)

    async def close(self) -> None:
        if self._sender is not None:
            await asyncio.gather(self._sender, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _send(self) -> None:
        await asyncio.sleep(BATCH_SECONDS)  # the end of a turn is known in pieces: one request for all of them
        while self._pending:
            batch = tuple(self._pending)
            self._pending.clear()
            if await self._ask("POST", HINTS_PATH, encode(HintBatch(batch))) is None:
                self._lost(len(batch), "the engine did not take them")
        self._sender = None

    async def _ask(self, method: str, path: str, body: bytes | None) -> PluginState | None:
        if self._session is None:
            return None
        try:
            async with self._session.request(method, f"{self._url}{path}", data=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._warn(f"the engine does not answer: {error or type(error).__name__}")
            return None
        if response.status != 200:
            if response.status not in _ROUTE_ABSENT:
                self._warn(f"status {response.status}: {answer[:200].decode(errors='replace')}")
            return None
        try:
            return read_state(answer)
        except BadHint as error:
            self._warn(f"an answer that is not the plugin's: {error}")
            return None

    def _lost(self, num_hints: int, why: str) -> None:
        self.num_lost += num_hints
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("hints are not reaching the engine; further losses are only counted", url=self._url, reason=why)
