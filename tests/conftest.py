"""What every test may ask for: an event loop, a real engine that starts once when first asked for, and proof that nothing is left."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from agentserve.engines.vllm_command import EmbeddedOptions
from benchmarks.fault_cases import ENGINE_FIXTURES
from model.chat.minimax_m3 import MiniMaxM3Format
from model.nano import make_nano, nano_is_complete
from model.tokenizer import Tokenizer
from tests.processes import adopt_orphans, descendants, wait_until
from tests.real_engine import CACHE_FOLDER, RealEngine, real_engine
from tests.scripted import assert_nothing_is_held
from tests.serving import Served, serving
from tests.upstream import FormatRenderer, KvModel, Upstream, in_thread

SMALL_KV_TOKENS = 8192


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ENGINE_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.engine)


@pytest.fixture
def anyio_backend() -> str:
    """Tests marked `anyio` run under asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """Set up before and torn down after every other fixture: what still runs then was left behind, is killed, and fails the run."""
    adopt_orphans()
    yield
    me = os.getpid()
    wait_until(lambda: not descendants(me), seconds=5)
    left = descendants(me)
    for process in left:
        os.kill(process.pid, signal.SIGKILL)
    assert not left, f"processes were left behind: {left}"


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The generated nano model: tokenizer and chat template."""
    folder = CACHE_FOLDER / "nano"
    if not nano_is_complete(folder):
        CACHE_FOLDER.mkdir(parents=True, exist_ok=True)
        make_nano(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_side() -> ModuleType:
    """`benchmarks.vllm_scheduler`, which imports vLLM, with warnings of its own that are not ours to mend."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("benchmarks.vllm_scheduler")


@pytest.fixture(scope="session")
def engine() -> Iterator[RealEngine]:
    """A real vLLM on the nano model, with room for everything a test run caches."""
    with real_engine(EmbeddedOptions(CACHE_FOLDER)) as running:
        yield running


@pytest.fixture(scope="session")
def small_engine() -> Iterator[RealEngine]:
    """A real vLLM whose KV cache holds 64 blocks of 128 tokens, so that it evicts."""
    with real_engine(EmbeddedOptions(CACHE_FOLDER, kv_tokens=SMALL_KV_TOKENS)) as running:
        yield running


@pytest.fixture(scope="session")
def renderer(model_folder: Path) -> FormatRenderer:
    """Says what a script says in M3's format and the nano model's tokens."""
    tokenizer = Tokenizer.load(model_folder)
    return FormatRenderer(MiniMaxM3Format(tokenizer), tokenizer)


@pytest.fixture
def upstream(renderer: FormatRenderer) -> Iterator[Upstream]:
    """A scripted engine with a block cache."""
    with in_thread(Upstream(renderer=renderer, kv=KvModel(num_blocks=4096, block_size=32))) as running:
        yield running


@pytest.fixture
def served(upstream: Upstream, model_folder: Path) -> Iterator[Served]:
    """The server over `upstream`; nothing may be held when the test is over."""
    with serving(upstream.url, model_folder) as running:
        yield running
        assert_nothing_is_held(running)
