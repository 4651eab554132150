"""The benchmarks' own parts: what they measure with must not be what they measure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import pytest

from benchmarks.client import BadAnswer, Client
from benchmarks.contenders import CONTENDERS, Contender, ContenderFailed, Launch, free_port, install, running
from benchmarks.history import History
from benchmarks.instant_upstream import ANSWER_TEXT, InstantProtocol, answers
from benchmarks.report import Result, Row, percentile, show, write_json
from tests.upstream import Script, Upstream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def instant() -> AsyncIterator[int]:
    ready = answers("demo-model", [7, 2])
    server = await asyncio.get_running_loop().create_server(lambda: InstantProtocol(ready), "127.0.0.1", 0)
    async with server:
        port: int = server.sockets[0].getsockname()[1]
        yield port


async def test_the_instant_upstream_streams_one_turn_on_every_generating_route() -> None:
    async with instant() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for path in ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate"):
            async with session.post(path, json={"stream": True}) as response:
                *events, done = (await response.read()).decode().strip().split("\n\n")
            assert done == "data: [DONE]"
            bodies = [msgspec.json.decode(event.removeprefix("data: ")) for event in events]
            assert bodies[-1]["usage"]["completion_tokens"] == 2
            if path != "/v1/chat/completions":
                assert bodies[0]["choices"][0]["token_ids"] == [7, 2]


async def test_the_instant_upstream_takes_bodies_of_any_framing_on_one_connection() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for size in (1, 70_000, 3):
            yield b"x" * size

    async with instant() as port, aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for _ in range(2):
            async with session.post("/v1/completions", data=pieces()) as response:
                assert ANSWER_TEXT in await response.text()
            async with session.post("/v1/completions", data=b"x" * 300_000) as response:
                assert ANSWER_TEXT in await response.text()
            assert (await session.get("/health")).status == 200
            assert (await session.get("/nowhere")).status == 404


async def test_the_client_times_the_first_text_and_not_the_headers() -> None:
    async with Upstream([Script(say="ok", ttft_seconds=0.2)]) as upstream, Client(int(upstream.url.rpartition(":")[2])) as client:
        answer = await client.chat(History(1, model="demo-model", num_messages=6, num_bytes=600).body(), {})
        assert answer.text == "ok"
        assert 0.2 <= answer.first_text_seconds <= answer.total_seconds


async def test_the_client_refuses_an_answer_that_is_none() -> None:
    scripts = [Script(status=503), Script(say="ok", cut="fin", cut_after_chunks=2)]
    async with Upstream(scripts) as upstream:
        body = History(1, model="demo-model", num_messages=6, num_bytes=600).body()
        for _ in scripts:
            async with Client(int(upstream.url.rpartition(":")[2])) as client:
                with pytest.raises(BadAnswer):
                    await client.chat(body, {})


async def test_the_client_connects_again_where_the_server_closed_an_idle_connection() -> None:
    class Closing(InstantProtocol):
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            asyncio.get_running_loop().call_later(0.05, self._transport.close)

    ready, body = answers("demo-model", [7, 2]), History(1, model="demo-model", num_messages=6, num_bytes=600).body()
    server = await asyncio.get_running_loop().create_server(lambda: Closing(ready), "127.0.0.1", 0)
    async with server, Client(server.sockets[0].getsockname()[1]) as client:
        await client.chat(body, {})
        await asyncio.sleep(0.2)
        assert (await client.chat(body, {})).text == ANSWER_TEXT


def test_a_history_grows_by_its_end_only_and_every_session_has_its_own() -> None:
    history = History(1, model="demo-model", num_messages=306, num_bytes=420_000)
    before = history.body()
    assert history.num_messages == 306
    assert 400_000 < len(before) < 440_000
    history.grow("ok", 600)
    messages, grown = [msgspec.json.decode(body)["messages"] for body in (before, history.body())]
    assert grown[:306] == messages
    assert [message["role"] for message in grown[306:]] == ["assistant", "user"]
    assert History(2, model="demo-model", num_messages=306, num_bytes=420_000).body() != before


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [5.0, 1.0, 3.0, 2.0, 4.0]
    assert [percentile(values, percent) for percent in (0, 50, 95, 100)] == [1.0, 3.0, 5.0, 5.0]


def test_a_result_is_printed_and_written_with_its_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result("Title", ("a ms", "b"), (Row("one", {"a ms": 1.234, "b": None}),))
    show(result)
    printed = capsys.readouterr().out
    assert "1.23" in printed
    write_json(result, tmp_path / "result.json")
    written = msgspec.json.decode((tmp_path / "result.json").read_bytes())
    assert written["result"]["rows"] == [{"name": "one", "figures": {"a ms": 1.234, "b": None}}]
    assert written["environment"]["machine"]


def test_a_contender_that_ends_at_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ContenderFailed, match=r"ended with 3[\s\S]*no such worker"),
        running(["sh", "-c", "echo no such worker; exit 3"], free_port(), tmp_path / "log"),
    ):
        raise AssertionError("it never became ready")


def test_every_peer_is_pinned_and_starts_on_the_port_given() -> None:
    launch = Launch(Path("/venv/bin/python"), 4321, "http://127.0.0.1:1234", "demo-model", Path("/model"))
    for name, contender in CONTENDERS.items():
        assert contender.name == name
        assert contender.requirement is None or "==" in contender.requirement
        if contender.command is not None:
            command = contender.command(launch)
            assert "4321" in command
            assert any(word.startswith(launch.upstream) for word in command)


def test_an_installed_peer_is_used_again(tmp_path: Path) -> None:
    peer = Contender("peer", None, "no-such-package==1")
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / "installed").write_text("no-such-package==1")
    assert install(peer, tmp_path) == tmp_path / "peer" / "bin" / "python"
