"""A real vLLM for tests: the embedded engine in a thread of its own, so that tests of any kind can use its URL."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentserve.engines import EngineInfo
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.vllm_command import EmbeddedOptions

CACHE_FOLDER = Path(__file__).parents[1] / ".agentserve"


@dataclass(frozen=True, slots=True)
class RealEngine:
    """Where the running vLLM is, and what it serves."""

    url: str
    info: EngineInfo
    events_endpoint: str
    replay_endpoint: str
    model_folder: Path
    log_path: Path


@contextmanager
def real_engine(options: EmbeddedOptions) -> Iterator[RealEngine]:
    """Start vLLM, and stop it whatever happens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="real-engine")
    thread.start()
    engine = EmbeddedEngine(options, progress=lambda text: print(text, file=sys.stderr))  # noqa: T201 - shown by pytest if the start fails
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result()
        yield RealEngine(engine.url, engine.info, engine.events_endpoint, engine.replay_endpoint, engine.model_folder, engine.log_path)
    finally:
        asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
