"""A real vLLM for tests: the embedded engine in a thread of its own, so that tests of any kind can use its URL."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentserve.engines import Engine, EngineInfo, GenerateRequest
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


@dataclass(frozen=True, slots=True)
class Generated:
    """A whole answer. `num_cached_tokens`: of its prompt, as the engine says."""

    ids: tuple[int, ...]
    num_cached_tokens: int


async def generated(
    engine: Engine, name: str, ids: Sequence[int], num_tokens: int, *, session_id: str | None = None, xargs: Mapping[str, str] | None = None
) -> Generated:
    """So many tokens after exactly these, greedily. `name` must be new to the engine."""
    request = GenerateRequest(
        name,
        (",".join(map(str, ids)).encode(),),
        len(ids),
        num_tokens,
        {"temperature": 0.0, "ignore_eos": True},
        session_id=session_id,
        xargs=xargs or {},
    )
    answer: list[int] = []
    num_cached = 0
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            answer += chunk.ids
            if chunk.usage is not None:
                num_cached = chunk.usage.num_cached_tokens or 0
    return Generated(tuple(answer), num_cached)
