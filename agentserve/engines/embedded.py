"""The embedded engine: a real vLLM on the CPU as a child process, serving a generated nano model."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from agentserve.engines import ChatChunk, ChatRequest, Chunk, EngineInfo, GenerateRequest
from agentserve.engines.child import end, free_port, spawn
from agentserve.engines.own_plugin import plugin_environment
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EMBEDDED_MODELS, NANO_M3, EmbeddedOptions, vllm_command
from agentserve.engines.vllm_log import excerpt, how_it_died, stage
from agentserve.errors import EngineError, EngineUnavailable, SetupError
from model.nano import nano_is_complete

WHAT_IS_REAL: Final = (
    "Embedded engine: vLLM on the CPU with a generated nano model.\n"
    "  Real: the scheduler, the prefix cache and its evictions, KV events, metrics, and every token count.\n"
    "  Not real: the weights are random, so the text means nothing; and latency says nothing about a GPU."
)
HOW_TO_INSTALL: Final = (
    "vLLM is not installed here. Run `make install` (or `python -m pip install --no-deps -r requirements/all.txt`), "
    "or use a running vLLM with --engine-url."
)

PROGRESS_SECONDS: Final = 2.0
FIRST_BACKOFF_SECONDS: Final = 1.0
LAST_BACKOFF_SECONDS: Final = 60.0
# An engine that ran this long was sound: its next death starts again with the first back-off.
SOUND_SECONDS: Final = 60.0

_log = structlog.get_logger(__name__)


class EmbeddedEngine:
    """A vLLM that starts with `start`, is started again when it dies, and is gone after `close` or when this process dies.

    `progress` gets a line of text while something takes longer than two seconds.
    """

    info: EngineInfo

    def __init__(self, options: EmbeddedOptions, *, progress: Callable[[str], None]) -> None:
        self._options = options
        self._progress = progress
        self._model_folder = options.cache_folder / options.model
        # Not in the cache folder: a socket's path may have about 100 characters, and two servers may share the cache.
        self._run_folder = Path(tempfile.mkdtemp(prefix="agentserve-"))
        self._num_launches = 0
        self.events_endpoint = f"ipc://{self._run_folder}/kv-events"
        self.replay_endpoint = f"ipc://{self._run_folder}/kv-replay"
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._client = VllmEngine(self.url, start_timeout_seconds=options.start_timeout_seconds)
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._down: str | None = "The embedded vLLM is not started."
        self._keep_log = False
        self._warned_of_seed = False
        self.on_restart: Callable[[], Awaitable[None]] | None = None
        """Awaited after vLLM has been started again: its cache is empty then, and what was changed while it ran is as at its start."""

    @property
    def num_retries(self) -> int:
        """As `VllmEngine.num_retries`."""
        return self._client.num_retries

    @property
    def model_folder(self) -> Path:
        """The generated model: its tokenizer and chat template are what the engine uses."""
        return self._model_folder

    @property
    def _needs_plugin(self) -> bool:
        return self._options.model == NANO_M3 or self._options.plugin is not None

    @property
    def log_path(self) -> Path:
        """What vLLM writes; every launch has its own file."""
        return self._run_folder / f"vllm-{self._num_launches}.log"

    async def start(self) -> None:
        """Generate the model if need be and start vLLM on it. Raises `SetupError` with the reason from its log."""
        if importlib.util.find_spec("vllm") is None:
            raise SetupError(HOW_TO_INSTALL)
        try:
            await self._make_model()
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._watcher = asyncio.create_task(self._watch(), name="embedded-engine-watcher")

    async def close(self) -> None:
        """Stop vLLM and wait until it and its children are gone. The log goes too, unless vLLM failed."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None
        self._down = "The embedded vLLM is stopped."
        await self._client.close()
        await self._stop()
        if not self._keep_log:
            shutil.rmtree(self._run_folder, ignore_errors=True)

    async def healthy(self) -> bool:
        """Whether vLLM runs and answers."""
        return self._down is None and await self._client.healthy()

    async def metrics(self) -> bytes:
        """vLLM's own metrics, unchanged."""
        self._raise_if_down()
        return await self._client.metrics()

    def chat(self, request: ChatRequest) -> AsyncGenerator[ChatChunk, None]:
        """As `VllmEngine.chat`. Raises `EngineUnavailable` at once while vLLM is down."""
        self._raise_if_down()
        return self._client.chat(request)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """As `VllmEngine.generate`, without a seed. Raises `EngineUnavailable` at once while vLLM is down."""
        self._raise_if_down()
        return self._client.generate(self._seedless(request))

    def _seedless(self, request: GenerateRequest) -> GenerateRequest:
        """vLLM 0.32 dies on the CPU when a seeded request is prefilled in chunks: it rewinds a generator that cannot be rewound there."""
        if request.sampling.get("seed") is None:
            return request
        if not self._warned_of_seed:
            self._warned_of_seed = True
            _log.warning("seed ignored", why="vLLM on the CPU dies on a seed with chunked prefill", cure="temperature 0, or another engine")
        return replace(request, sampling={name: value for name, value in request.sampling.items() if name != "seed"})

    def _raise_if_down(self) -> None:
        if self._down is not None:
            raise EngineUnavailable(self._down)

    async def _make_model(self) -> None:
        if nano_is_complete(self._model_folder):
            return
        self._progress(f"generating the {self._options.model} model in {self._model_folder} (once)")
        self._model_folder.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(EMBEDDED_MODELS[self._options.model], self._model_folder)

    async def _launch(self) -> None:
        """Start the process and wait until it answers. Raises `SetupError`, with the process gone, where it does not."""
        command = vllm_command(
            self._model_folder,
            self._port,
            self._options,
            events_endpoint=self.events_endpoint,
            replay_endpoint=self.replay_endpoint,
            variables=plugin_environment(self._run_folder) if self._needs_plugin else {},
        )
        self._num_launches += 1
        self._process = await spawn(command, self.log_path)
        ready = asyncio.create_task(self._client.start())
        exited = asyncio.create_task(self._process.wait())
        try:
            await self._report_until(ready, exited)
            if exited.done():
                raise self._start_failed(f"vLLM ended with code {exited.result()} while it started.")
            await ready
            self.info = self._client.info
            self._down = None
        except EngineError as error:
            raise self._start_failed(f"vLLM was not ready in time. {error.message}") from error
        finally:
            ready.cancel()
            exited.cancel()
            await asyncio.gather(ready, exited, return_exceptions=True)
            if self._down is not None:
                await self._stop()

    def _start_failed(self, what: str) -> SetupError:
        self._keep_log = True
        return SetupError(f"{what} {excerpt(self.log_path)}")

    async def _report_until(self, *tasks: asyncio.Task[object]) -> None:
        """Wait for the first of `tasks`, with progress."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not (await asyncio.wait(tasks, timeout=PROGRESS_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
            self._progress(f"starting vLLM on the CPU: {stage(self.log_path)} ({loop.time() - begun:.0f} s)")

    async def _watch(self) -> None:
        """See vLLM die, and start it again with a doubling back-off."""
        loop = asyncio.get_running_loop()
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while self._process is not None:
            begun = loop.time()
            code = await self._process.wait()
            self._keep_log = True
            if loop.time() - begun > SOUND_SECONDS:
                backoff_seconds = FIRST_BACKOFF_SECONDS
            what_next = "It is being started again: try again in half a minute." if self._options.restart else "Start the server again."
            self._down = f"The embedded vLLM died ({how_it_died(code)}). {what_next} Its log: {self.log_path}"
            _log.error("embedded vLLM died", how=how_it_died(code), log=str(self.log_path), restart=self._options.restart)
            if not self._options.restart:
                return
            backoff_seconds = await self._relaunch(backoff_seconds)

    async def _relaunch(self, backoff_seconds: float) -> float:
        """Try until vLLM is up; return the back-off for the next time."""
        while self._down is not None:
            await asyncio.sleep(backoff_seconds)
            backoff_seconds = min(2 * backoff_seconds, LAST_BACKOFF_SECONDS)
            try:
                await self._launch()
                if self.on_restart is not None:
                    await self.on_restart()
            except SetupError as error:
                _log.error("embedded vLLM did not start again", reason=error.message, next_try_seconds=backoff_seconds)
        return backoff_seconds

    async def _stop(self) -> None:
        """End vLLM, if it runs, and wait until it is gone."""
        if self._process is None:
            return
        await end(self._process)
        self._process = None
