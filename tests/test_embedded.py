"""The embedded engine is a real vLLM: what it serves, and that it never outlives the server."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq

from agentserve.engines import Chunk, Engine, GenerateRequest, Usage, guard
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.prometheus import samples
from agentserve.engines.vllm import VllmEngine
from agentserve.engines.vllm_command import EmbeddedOptions, vllm_command
from agentserve.engines.vllm_log import excerpt, stage
from agentserve.engines.vllm_wire import COMPLETIONS, GENERATE, Route
from agentserve.errors import EngineRefused, EngineUnavailable, SetupError
from tests.processes import Process, living, wait_until
from tests.real_engine import CACHE_FOLDER, RealEngine

SERVE = """
import asyncio, sys
from pathlib import Path
from agentserve.engines.embedded import EmbeddedEngine
from agentserve.engines.vllm_command import EmbeddedOptions

async def main() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(Path(sys.argv[1]), kv_tokens=8192), progress=lambda text: None)
    await engine.start()
    print("run folder", engine.log_path.parent, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def ask(num_prompt_tokens: int, max_tokens: int, first_id: int = 300, **fields: Any) -> GenerateRequest:
    ids = ",".join(str(first_id + position % 1000) for position in range(num_prompt_tokens))
    return GenerateRequest("request", (ids.encode(),), num_prompt_tokens, max_tokens, **fields)


async def run(client: Engine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in client.generate(request)]


async def run_at(engine: RealEngine, *requests: GenerateRequest, route: Route = GENERATE) -> list[list[Chunk]]:
    client = VllmEngine(engine.url, route=route)
    try:
        await client.start()
        return [await run(client, request) for request in requests]
    finally:
        await client.close()


def usage_of(chunks: list[Chunk]) -> Usage:
    assert chunks[-1].usage is not None
    return chunks[-1].usage


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [id for chunk in chunks for id in chunk.ids]


def text_of(chunks: list[Chunk]) -> str:
    return "".join(chunk.text or "" for chunk in chunks)


# --- what a real vLLM serves


@pytest.mark.anyio
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS], ids=["generate", "completions"])
async def test_a_prompt_that_comes_again_hits_in_whole_blocks(engine: RealEngine, route: Route) -> None:
    request = ask(300, 4, cache_salt=f"whole blocks {len(route.path)}", sampling={"ignore_eos": True, "temperature": 0})
    first, second = await run_at(engine, request, request, route=route)
    assert [usage_of(chunks) for chunks in (first, second)] == [Usage(300, 4, 0), Usage(300, 4, 256)]
    assert ids_of(first) == ids_of(second)
    assert [chunk.finish_reason for chunk in first if chunk.finish_reason] == ["length"]


@pytest.mark.anyio
async def test_both_routes_generate_the_same_ids(engine: RealEngine) -> None:
    request = ask(50, 12, sampling={"ignore_eos": True, "temperature": 0})
    [by_generate] = await run_at(engine, request, route=GENERATE)
    [by_completions] = await run_at(engine, request, route=COMPLETIONS)
    assert ids_of(by_generate) == ids_of(by_completions)


@pytest.mark.anyio
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS], ids=["generate", "completions"])
async def test_a_stop_string_comes_back_as_the_stop_reason_and_is_cut_from_the_text(engine: RealEngine, route: Route) -> None:
    greedy = {"temperature": 0, "ignore_eos": True, "logprobs": 0}
    [whole] = await run_at(engine, ask(50, 16, sampling=greedy), route=route)
    text = text_of(whole)
    stop = text[len(text) // 2 :][:3]
    [cut] = await run_at(engine, ask(50, 16, sampling={**greedy, "stop": [stop]}), route=route)
    assert [(chunk.finish_reason, chunk.stop_reason) for chunk in cut if chunk.finish_reason] == [("stop", stop)]
    assert text_of(cut) == text[: text.index(stop)]
    assert ids_of(cut) == ids_of(whole)[: len(ids_of(cut))]


@pytest.mark.anyio
async def test_a_constraint_holds_from_the_first_token(engine: RealEngine) -> None:
    sampling = {"structured_outputs": {"choice": ["yes, quite", "not at all"]}, "logprobs": 0}
    [chunks] = await run_at(engine, ask(20, 32, sampling=sampling))
    assert text_of(chunks) in ("yes, quite", "not at all")


@pytest.mark.anyio
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS], ids=["generate", "completions"])
async def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_know(engine: RealEngine, route: Route) -> None:
    with pytest.raises(EngineRefused, match="maximum context length") as caught:
        await run_at(engine, ask(engine.info.max_model_len + 1, 1), route=route)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")


@pytest.mark.anyio
async def test_a_generation_that_is_left_is_aborted_within_a_second(engine: RealEngine) -> None:
    client = VllmEngine(engine.url)
    try:
        await client.start()
        async with aclosing(client.generate(ask(10, 20_000, sampling={"ignore_eos": True}))) as chunks:
            await anext(chunks)
            assert await num_running(client) == 1
        left_at = time.monotonic()
        while await num_running(client):
            assert time.monotonic() < left_at + 1
    finally:
        await client.close()


async def num_running(client: VllmEngine) -> float:
    return samples(await client.metrics(), "vllm:num_requests_running")[0].value


def test_a_small_cache_has_the_blocks_that_were_asked_for(small_engine: RealEngine) -> None:
    info = small_engine.info
    assert (info.num_blocks, info.block_size, info.kv_capacity_tokens, info.max_model_len) == (64, 128, 8192, 8192)


@pytest.mark.anyio
async def test_a_small_cache_runs_the_longest_request_and_evicts_what_was_there(small_engine: RealEngine) -> None:
    kept = ask(1000, 1, first_id=300)
    longest = ask(8000, 192, first_id=1500, sampling={"ignore_eos": True})
    before, hit, full, after = await run_at(small_engine, kept, kept, longest, kept)
    assert [usage_of(chunks).num_cached_tokens for chunks in (before, hit, full, after)] == [0, 896, 0, 0]
    assert usage_of(full).num_generated_tokens == 192


@pytest.mark.anyio
async def test_every_kv_event_can_be_replayed(engine: RealEngine) -> None:
    await run_at(engine, ask(300, 1, cache_salt="events"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as replay:
        replay.setsockopt(zmq.RCVTIMEO, 5000)
        replay.connect(engine.replay_endpoint)
        replay.send_multipart([b"", (0).to_bytes(8, "big")])
        numbers = []
        while (number := int.from_bytes(replay.recv_multipart()[-2], "big", signed=True)) >= 0:
            numbers.append(number)
    context.term()
    assert numbers == list(range(len(numbers)))
    assert numbers


@pytest.mark.anyio
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_vllms_own_chat_route_takes_tools(engine: RealEngine, choice: str) -> None:
    tool = {"name": "read", "description": "Read a file.", "parameters": {"type": "object", "properties": {"path": {"enum": ["a", "b"]}}}}
    body = {
        "model": engine.info.model,
        "messages": [{"role": "user", "content": "Read a."}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": choice,
        "max_tokens": 64,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/v1/chat/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 200, answer
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0


# --- how it lives and dies


def processes_of(run_folder: Path) -> list[Process]:
    """The API server of the engine whose sockets are in `run_folder`, without its guard."""
    return [process for process in living() if f"{run_folder}/kv-events" in process.command and guard.__file__ not in process.command]


def group_of(pid: int) -> list[Process]:
    return [process for process in living() if process.group == pid]


async def until_healthy(engine: EmbeddedEngine, healthy: bool) -> None:
    while await engine.healthy() is not healthy:  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.1)


@pytest.mark.anyio
@pytest.mark.timeout(600)  # two starts, on a machine that may be busy
async def test_an_engine_that_dies_says_so_and_comes_back() -> None:
    said: list[str] = []
    engine = EmbeddedEngine(EmbeddedOptions(CACHE_FOLDER, kv_tokens=8192), progress=said.append)
    restarts: list[bool] = []

    async def restarted() -> None:
        restarts.append(await engine.healthy())

    engine.on_restart = restarted
    try:
        await engine.start()
        assert any("starting vLLM" in text for text in said)
        before = await run(engine, ask(10, 1))
        # More than one step's tokens, so it is prefilled in chunks; vLLM's CPU build dies on that with a seed.
        assert ids_of(await run(engine, ask(3000, 1, sampling={"seed": 7})))
        [vllm] = processes_of(engine.log_path.parent)
        os.kill(vllm.pid, signal.SIGKILL)
        await until_healthy(engine, False)
        with pytest.raises(EngineUnavailable):
            await run(engine, ask(10, 1))
        await asyncio.sleep(1)
        with pytest.raises(EngineUnavailable, match=r"died \(code 137\)"):
            await run(engine, ask(10, 1))
        await until_healthy(engine, True)
        assert ids_of(await run(engine, ask(10, 1, sampling={"temperature": 0})))
        assert restarts == [True]
        assert before
    finally:
        await engine.close()
        shutil.rmtree(engine.log_path.parent, ignore_errors=True)
    assert not group_of(vllm.pid)
    assert not processes_of(engine.log_path.parent)
    with pytest.raises(EngineUnavailable, match="stopped"):
        engine.generate(ask(10, 1))


def test_a_server_that_is_killed_takes_its_engine_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE, str(CACHE_FOLDER)], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            run_folder = next(Path(line.split()[2]) for line in server.stdout if line.startswith("run folder"))
            [vllm] = processes_of(run_folder)
            # vLLM's API server, its engine, and multiprocessing's resource tracker.
            assert len(group_of(vllm.pid)) >= 3
        finally:
            server.kill()
    assert wait_until(lambda: not group_of(vllm.pid), 5)
    shutil.rmtree(run_folder)


@pytest.mark.anyio
async def test_an_engine_that_cannot_start_says_why_and_where_its_log_is() -> None:
    options = EmbeddedOptions(CACHE_FOLDER, extra_args=("--no-such-flag",))
    engine = EmbeddedEngine(options, progress=lambda text: None)
    with pytest.raises(SetupError, match="--no-such-flag") as caught:
        await engine.start()
    assert str(engine.log_path) in caught.value.message
    assert engine.log_path.exists()
    shutil.rmtree(engine.log_path.parent)


@pytest.mark.anyio
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    engine = EmbeddedEngine(EmbeddedOptions(CACHE_FOLDER), progress=lambda text: None)
    start = asyncio.create_task(engine.start())
    run_folder = engine.log_path.parent
    while not processes_of(run_folder):  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.05)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not processes_of(run_folder)
    assert run_folder not in set(run_folder.parent.iterdir())


@pytest.mark.anyio
async def test_without_vllm_the_way_to_install_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # how Python itself marks a module that cannot be imported
    with pytest.raises(SetupError, match="make install"):
        await EmbeddedEngine(EmbeddedOptions(tmp_path), progress=lambda text: None).start()


@pytest.mark.anyio
async def test_closing_an_engine_that_never_started_is_harmless(tmp_path: Path) -> None:
    engine = EmbeddedEngine(EmbeddedOptions(tmp_path), progress=lambda text: None)
    await engine.close()
    await engine.close()
    assert not engine.log_path.parent.exists()
    assert not await engine.healthy()


# --- its command line and its log


@pytest.mark.parametrize("fields", [{"block_size": 100}, {"block_size": 0}, {"kv_tokens": 127}])
def test_sizes_that_vllm_would_refuse_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=next(iter(fields))):
        EmbeddedOptions(Path("cache"), **fields)


@pytest.mark.parametrize(
    ("kv_tokens", "asked", "max_model_len"),
    [(8192, 131_072, 8192), (8200, 131_072, 8192), (262_144, 131_072, 4096), (8192, 1000, 1000)],
)
def test_the_longest_request_fits_the_cache_and_the_model(tmp_path: Path, kv_tokens: int, asked: int, max_model_len: int) -> None:
    config = {"num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 32}
    config["max_position_embeddings"] = 4096 if kv_tokens == 262_144 else 131_072
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    options = EmbeddedOptions(tmp_path, kv_tokens=kv_tokens, max_model_len=asked)
    command = vllm_command(tmp_path, 8000, options, events_endpoint="ipc://a", replay_endpoint="ipc://b")
    values = dict(pairwise(command))
    assert int(values["--max-model-len"]) == max_model_len
    num_gpu_blocks = int(values["--num-gpu-blocks-override"])
    assert num_gpu_blocks == kv_tokens // 128 + 1
    assert int(values["--kv-cache-memory-bytes"]) == num_gpu_blocks * 128 * 2 * 2 * 32 * 4


def test_the_log_tells_the_stage_and_the_first_error(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("")
    assert stage(log) == "importing vLLM"
    log.write_text(
        "WARNING a limit (OSError: [Errno 24]) may be met\nINFO Starting to load model x\nTraceback\nValueError: the cause\n"
        + "more\n" * 50
        + "RuntimeError: the effect\n"
    )
    assert stage(log) == "loading the model"
    told = excerpt(log)
    assert "First error: ValueError: the cause" in told
    assert "RuntimeError: the effect" in told
    assert str(log) in told
    assert told.count("more") < 15
