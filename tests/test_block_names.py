"""Engines behind one offload tier must name blocks alike: a server in front of those that do not is refused, with what to do about it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from agentserve.block_names import compare_names
from agentserve.engines.vllm import VllmEngine
from agentserve.errors import SetupError
from agentserve.settings import load
from agentserve.starting import Made, follow
from tests.real_engine import RealEngine
from tests.scripted import asked
from tests.serving import Served, chat, serving
from tests.upstream import FormatRenderer, KvModel, Upstream, in_thread

pytestmark = pytest.mark.anyio

CONNECTOR = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": {"lmcache.mp.port": 5999}}


@contextmanager
def fleet(
    renderer: FormatRenderer, model_folder: Path, models: Sequence[Mapping[str, Any]], *, events: bool = True, tier: str = "lmcache"
) -> Iterator[tuple[Served, list[Upstream]]]:
    """A server in front of an engine for each of `models`."""
    with ExitStack() as stack:
        made = [stack.enter_context(in_thread(Upstream(renderer=renderer, kv=KvModel(block_size=32, **model)))) for model in models]
        yield stack.enter_context(serve(made, model_folder, events=events, tier=tier)), made


@contextmanager
def serve(engines: Sequence[Upstream], model_folder: Path, *, events: bool, tier: str = "lmcache") -> Iterator[Served]:
    settings: dict[str, Any] = {"offload_tier": tier}
    if events:
        told = [engine.engine.events for engine in engines]
        settings["engine_events"] = ",".join(each.endpoint for each in told if each)
        settings["engine_events_replay"] = ",".join(each.replay_endpoint for each in told if each)
    with serving(",".join(engine.url for engine in engines), model_folder, **settings) as served:
        yield served


@contextmanager
def process_at(port: str, words: Sequence[str], seed: str | None, **options: Any) -> Iterator[None]:
    """A process that was started as an engine, or an LMCache server, at that port would be; all that it does is wait."""
    flags = [word for name, value in {"port": port, **options}.items() for word in (f"--{name.replace('_', '-')}", value)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [*words[:1], "-c", "import sys; print(flush=True); sys.stdin.read()", *words[1:], *flags]
    with subprocess.Popen(command, executable=sys.executable, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()


@contextmanager
def vllm_at(engine: Upstream, seed: str | None, **options: Any) -> Iterator[None]:
    """A vLLM process with LMCache's connector."""
    connector = msgspec.json.encode(CONNECTOR).decode()
    port = engine.url.rpartition(":")[2]
    with process_at(port, ["python", "vllm.entrypoints.openai.api_server"], seed, kv_transfer_config=connector, **options):
        yield


@pytest.mark.case("KVM-08")
@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([{}, {"hash_seed": "1"}], "different names.*PYTHONHASHSEED=0"),
        ([{"hash_seed": "0"}, {"hash_seed": "1"}], "different names.*--prefix-caching-hash-algo"),
        ([{}, {}, {"hash_seed": "random"}], "different names"),
        ([{}, {"hash_algorithm": "sha256_cbor"}], "hash algorithm differs: sha256 at .*, sha256_cbor at .*--prefix-caching-hash-algo"),
    ],
)
async def test_engines_that_name_blocks_differently_are_refused_before_one_tier(
    renderer: FormatRenderer, model_folder: Path, models: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(SetupError, match=message), fleet(renderer, model_folder, models):
        pass


@pytest.mark.case("KVM-08")
@pytest.mark.parametrize("number", [2, 3])
async def test_engines_that_name_blocks_alike_serve_and_the_log_says_how_it_is_known(
    renderer: FormatRenderer, model_folder: Path, number: int
) -> None:
    with structlog.testing.capture_logs() as logs, fleet(renderer, model_folder, [{"hash_seed": "7"}] * number) as (served, engines):
        assert [len(asked(engine)) for engine in engines] == [1] * number, "each has named one block"
        reply = await chat(served.url, [{"role": "user", "content": "hi"}], stream=False)
        assert reply.status == 200
        assert all(replica.books.mirror is not None and replica.books.mirror.on_batch is not None for replica in served.server.replicas)
    assert [(line["engines"], line["by"]) for line in logs if line["event"] == "block names are alike"] == [(number, "events")]


async def test_engines_that_share_no_tier_may_name_blocks_as_they_like(renderer: FormatRenderer, model_folder: Path) -> None:
    with fleet(renderer, model_folder, [{}, {"hash_seed": "1"}], tier="off") as (_, engines):
        assert not any(asked(engine) for engine in engines)


@pytest.mark.case("KVM-08")
@pytest.mark.parametrize(
    ("seeds", "lmcache_seed", "algorithm", "message"),
    [
        (("0", "1"), "0", "sha256", "PYTHONHASHSEED differs"),
        (("0", None), "0", "sha256", "PYTHONHASHSEED differs"),
        (("0", "0"), "1", "sha256", "PYTHONHASHSEED differs"),
        ((None, None), None, "xxhash", "random seed"),
        (("0", "0"), "0", "xxhash", None),
    ],
)
async def test_without_events_the_processes_of_this_host_tell(
    renderer: FormatRenderer,
    model_folder: Path,
    seeds: tuple[str | None, str | None],
    lmcache_seed: str | None,
    algorithm: str,
    message: str | None,
) -> None:
    with ExitStack() as stack:
        engines = []
        for seed in seeds:
            kv = KvModel(block_size=32, hash_algorithm=algorithm)
            engines.append(stack.enter_context(in_thread(Upstream(renderer=renderer, kv=kv))))
            stack.enter_context(vllm_at(engines[-1], seed))
        stack.enter_context(process_at("5999", ["lmcache", "server"], lmcache_seed))
        stack.enter_context(process_at("5998", ["lmcache", "server"], "another's"))
        if message is not None:
            stack.enter_context(pytest.raises(SetupError, match=message))
        with structlog.testing.capture_logs() as logs, serve(engines, model_folder, events=False):
            pass
        assert [line["by"] for line in logs if line["event"] == "block names are alike"] == ["processes"]


@pytest.mark.case("KVM-08")
async def test_real_engines_tell_their_names_by_their_events(engine: RealEngine, small_engine: RealEngine) -> None:
    async with AsyncExitStack() as stack:
        followed = []
        for each in (engine, small_engine):
            client = VllmEngine(each.url)
            stack.push_async_callback(client.close)
            await client.start()
            made = Made(client, each.events_endpoint, each.replay_endpoint)
            followed.append(await follow(load({("engine", "url"): each.url}), made, None, stack))
        assert await compare_names(followed) == [], "both were heard, and say the same"


async def test_what_cannot_be_read_is_said_and_stops_nothing(renderer: FormatRenderer, model_folder: Path) -> None:
    with structlog.testing.capture_logs() as logs, fleet(renderer, model_folder, [{}, {}], events=False) as (served, engines):
        assert len(served.server.replicas) == len(engines)
    (warning,) = [line for line in logs if line["event"] == "block names are not compared"]
    assert warning["engines"] == [engine.url for engine in engines]
    assert "--engine-events" in warning["cure"]
