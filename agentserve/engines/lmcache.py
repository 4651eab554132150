"""The offload tier beside the embedded engine: a real LMCache server as a child process, started again when it dies.

vLLM outlives it: requests then miss what the tier held and are computed; the connector registers again by itself when the server is back.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from agentserve.engines.child import end, free_port, spawn
from agentserve.engines.lmcache_command import LmcacheOptions, connector_args, lmcache_command
from agentserve.engines.lmcache_counts import RankCounts
from agentserve.engines.vllm_log import excerpt
from agentserve.errors import SetupError

HOW_TO_INSTALL: Final = (
    "LMCache is not installed here. Run `make offload` (or `python -m pip install --no-deps -r requirements/offload.txt`), "
    "or start without --offload-tier."
)
START_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.2
PROGRESS_SECONDS: Final = 2.0
FIRST_BACKOFF_SECONDS: Final = 1.0
LAST_BACKOFF_SECONDS: Final = 60.0

ORPHAN_SECONDS: Final = 5.0
SHARED_MEMORY: Final = Path("/dev/shm")
_SEGMENTS: Final = "lmcache_kv_*"

_log = structlog.get_logger(__name__)


class LmcacheServer:
    """Runs from `start` to `close`, on ports that stay the same over its lives. `progress` gets a line of text while it starts."""

    def __init__(self, options: LmcacheOptions, *, progress: Callable[[str], None]) -> None:
        self.options = options
        self._progress = progress
        self._run_folder = Path(tempfile.mkdtemp(prefix="agentserve-"))
        self.port = free_port()
        self.http_port = free_port()
        self.is_up = False
        self.on_change: Callable[[bool], None] | None = None
        """Called with False when the server has died, and with True when it answers again with an empty memory."""
        self.ranks = RankCounts(f"http://127.0.0.1:{self.http_port}")
        """How often ranks differ in what they hold."""
        self._num_launches = 0
        self._keep_log = False
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._others = _segments()

    @property
    def engine_args(self) -> tuple[str, ...]:
        """What makes vLLM use this server."""
        return connector_args(self.port)

    @property
    def log_path(self) -> Path:
        """What the server writes; every launch has its own file."""
        return self._run_folder / f"lmcache-{self._num_launches}.log"

    async def start(self) -> None:
        """Start the server and wait until it answers. Raises `SetupError` with the reason from its log."""
        if importlib.util.find_spec("lmcache") is None:
            raise SetupError(HOW_TO_INSTALL)
        try:
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._tasks = [
            asyncio.create_task(self._watch(), name="lmcache-watcher"),
            asyncio.create_task(self.ranks.follow(), name="lmcache-ranks"),
        ]

    async def close(self) -> None:
        """Stop the server and wait until it is gone. Call it after the engine's own `close`, so that nothing is asked of it then."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self.is_up = False
        if self._process is not None:
            await end(self._process)
            self._process = None
        await remove_orphans(_segments() - self._others)
        (self._run_folder / "password").unlink(missing_ok=True)
        if not self._keep_log:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    async def _launch(self) -> None:
        self._num_launches += 1
        password_file = self._run_folder / "password"  # in a folder that only this user may enter
        password_file.write_text(self.options.password)
        self._process = await spawn(lmcache_command(self.options, self.port, self.http_port, password_file), self.log_path)
        ready = asyncio.create_task(self._answers())
        exited = asyncio.create_task(self._process.wait())
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            while not (await asyncio.wait({ready, exited}, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
                self._progress(f"starting LMCache ({loop.time() - begun:.0f} s)")
            if exited.done():
                raise self._start_failed(f"LMCache ended with code {exited.result()} while it started.")
            await ready
            self._changed(True)
            _log.info("offload tier ready", port=self.port, http_port=self.http_port, num_bytes=self.options.num_bytes)
        except TimeoutError as error:
            raise self._start_failed(f"LMCache did not answer within {START_SECONDS:.0f} s.") from error
        finally:
            ready.cancel()
            exited.cancel()
            await asyncio.gather(ready, exited, return_exceptions=True)
            if not self.is_up:
                await end(self._process)

    def _start_failed(self, what: str) -> SetupError:
        self._keep_log = True
        return SetupError(f"{what} {excerpt(self.log_path)}")

    def _changed(self, is_up: bool) -> None:
        self.is_up = is_up
        if is_up:
            self.ranks.restarted()
        if self.on_change is not None:
            self.on_change(is_up)

    async def _answers(self) -> None:
        """Return when the health check says 200. Raises TimeoutError."""
        url = f"http://127.0.0.1:{self.http_port}/healthcheck"
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(url) as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass  # it does not listen yet
                await asyncio.sleep(POLL_SECONDS)

    async def _watch(self) -> None:
        """See the server die, and start it again with a doubling back-off."""
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while self._process is not None:
            if self.is_up:
                code = await self._process.wait()
                self._changed(False)
                self._keep_log = True
                backoff_seconds = FIRST_BACKOFF_SECONDS
                _log.error("LMCache died", code=code, reason=excerpt(self.log_path))
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, LAST_BACKOFF_SECONDS)
            try:
                await self._launch()
            except SetupError as error:
                _log.error("LMCache did not start again", reason=error.message, next_try_seconds=backoff_seconds)


def _segments() -> set[Path]:
    """Shared memory in which vLLM shows its KV cache to LMCache: lmcache_kv_<process>_<number>."""
    return set(SHARED_MEMORY.glob(_SEGMENTS))


async def remove_orphans(segments: set[Path], seconds: float = ORPHAN_SECONDS) -> None:
    """A vLLM that is stopped by a signal leaves its segments behind; its ranks may end a moment after it, and are waited for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while segments:
        gone = {segment for segment in segments if not _is_alive(segment.name.split("_")[2])}
        for segment in gone:
            segment.unlink(missing_ok=True)
        segments = segments - gone
        if loop.time() >= deadline:
            return  # another vLLM's, which has started since
        await asyncio.sleep(POLL_SECONDS)


def _is_alive(process: str) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
