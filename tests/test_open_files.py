"""A server that may open few files: it takes as many as the host allows, says so to clients beyond them, and is well afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from model.chat.minimax_m3 import MiniMaxM3Format
from model.tokenizer import Tokenizer
from tests.processes import wait_until
from tests.upstream import FormatRenderer, Script, Upstream, in_thread

FEW, MANY = 256, 300
BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 8}


@pytest.fixture
def upstream(model_folder: Path) -> Iterator[Upstream]:
    tokenizer = Tokenizer.load(model_folder)
    slow = Script(say="one two three four", ttft_seconds=1.0)
    with in_thread(Upstream(renderer=FormatRenderer(MiniMaxM3Format(tokenizer), tokenizer), default=slow)) as running:
        yield running


@contextmanager
def limited(folder: Path, engine_url: str, model_folder: Path, soft: int, hard: int) -> Iterator[tuple[str, int]]:
    """A `serve` process that was started under these limits: its address and its process id."""
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", "--engine-url", engine_url]
    command += ["--engine-model-folder", str(model_folder), "--log-level", "warning"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSERVE_")}
    limit: Callable[[], None] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # noqa: E731 - runs in the child
    log = folder / "serve.log"
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, env=clean, preexec_fn=limit) as process:
        try:
            assert wait_until(lambda: "listening on" in log.read_text(), 60), log.read_text()
            yield log.read_text().partition("listening on ")[2].split()[0], process.pid
        finally:
            process.kill()


async def ask(http: aiohttp.ClientSession, url: str) -> str:
    """How a streamed request ended."""
    try:
        async with http.post(f"{url}/v1/chat/completions", json=BODY) as response:
            body = await response.read()
            if response.status == 503:
                assert response.headers["retry-after"]
                assert b"ulimit" in body
                return "refused"
            return "answered" if response.status == 200 and body.rstrip().endswith(b"data: [DONE]") else f"{response.status} {body[-80:]!r}"
    except aiohttp.ClientError as error:
        return repr(error)


async def ask_all(url: str, number: int) -> Counter[str]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        return Counter(await asyncio.gather(*(ask(http, url) for _ in range(number))))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.case("OPS-05")
@pytest.mark.anyio
async def test_a_low_soft_limit_is_raised_at_the_start(upstream: Upstream, model_folder: Path, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with limited(tmp_path, upstream.url, model_folder, FEW, hard) as (url, _):
        assert await ask_all(url, MANY) == {"answered": MANY}


@pytest.mark.case("OPS-05")
@pytest.mark.anyio
async def test_beyond_the_hard_limit_every_client_hears_of_it_and_the_server_is_well_afterwards(
    upstream: Upstream, model_folder: Path, tmp_path: Path
) -> None:
    with limited(tmp_path, upstream.url, model_folder, FEW, FEW) as (url, pid):
        ended = await ask_all(url, MANY)
        assert set(ended) == {"answered", "refused"}
        assert FEW // 4 < ended["answered"] <= FEW
        started, before = time.monotonic(), cpu_seconds(pid)
        await asyncio.sleep(1)
        assert cpu_seconds(pid) - before < 0.5 * (time.monotonic() - started), "it spins"
        assert await ask_all(url, 20) == {"answered": 20}
    assert (tmp_path / "serve.log").read_text().count("no files left") <= 1
