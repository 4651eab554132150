"""The command line: what scripts rely on. Exit code 2 and one clear line for a bad set-up, no traceback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

import replays.cli
from agentserve.cli import COMMANDS, build_cli
from tests.processes import descendants, living, wait_until
from tests.real_engine import CACHE_FOLDER
from tests.upstream import Script, Upstream, in_thread


def environment(**names: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("AGENTSERVE_")}, **names}


def run(*arguments: str, **names: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    command = [sys.executable, "-m", "agentserve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(**names), check=False)
    return done.returncode, done.stdout + done.stderr


@contextmanager
def listening(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A `serve` process and its address, once it announces it."""
    command = [sys.executable, "-m", "agentserve", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            address = next(line.split()[-1] for line in process.stdout if line.startswith("listening on"))
            yield process, address
        finally:
            process.kill()


@pytest.fixture(scope="module")
def upstream() -> Iterator[Upstream]:
    with in_thread(Upstream()) as running:
        yield running


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--port", "70000"], "--port"),
        (["serve", "--engine-kv-tokens", "many"], "--engine-kv-tokens"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["serve", "--host", "256.0.0.1"], "cannot listen"),
        (["serve", "--port", "0", "--engine-url", "http://127.0.0.1:9", "--engine-start-seconds", "1"], "127.0.0.1:9"),
        (["replay", "missing-traces", "--url", "http://127.0.0.1:9"], "missing-traces"),
        (["report", "missing.json"], "missing.json"),
        (["no-such-command"], "no-such-command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_use_is_said_in_a_line_and_exits_with_2(arguments: list[str], said: str) -> None:
    code, output = run(*arguments)
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output


def test_an_unknown_setting_in_the_environment_is_refused() -> None:
    code, output = run("serve", AGENTSERVE_PROT="1")
    assert (code, "AGENTSERVE_PROT" in output, "Traceback" in output) == (2, True, False)


def test_a_port_in_use_is_said_before_the_engine_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output = run("serve", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "in use" in output
    assert "vLLM" not in output


@pytest.mark.parametrize("content", [None, "{not json"], ids=["no folder", "broken tokenizer.json"])
def test_a_model_folder_that_cannot_be_read_is_named(tmp_path: Path, upstream: Upstream, content: str | None) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text(content)
    code, output = run("serve", "--port", "0", "--engine-url", upstream.url, "--engine-model-folder", str(folder))
    assert code == 2, output
    assert str(folder) in output.replace("\n", "")
    assert "Traceback" not in output


def test_a_chat_format_that_is_not_known_is_refused_with_those_that_are(upstream: Upstream, model_folder: Path) -> None:
    where = ["--port", "0", "--engine-url", upstream.url, "--engine-model-folder", str(model_folder)]
    code, output = run("serve", *where, "--engine-chat-format", "klingon")
    assert code == 2
    assert "klingon" in output
    assert "minimax_m3" in output


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_server_stops_cleanly_on_a_signal(upstream: Upstream, model_folder: Path, stop: signal.Signals) -> None:
    with listening("--engine-url", upstream.url, "--engine-model-folder", str(model_folder)) as (process, address):
        with urllib.request.urlopen(f"{address}/health") as answer:
            assert answer.status == 200
        process.send_signal(stop)
        assert wait_until(lambda: process.poll() is not None, seconds=10)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()
        assert process.returncode in (0, 130, 143, -stop)


def test_a_stream_that_runs_when_the_server_is_stopped_ends_in_an_error_event(upstream: Upstream, model_folder: Path) -> None:
    upstream.script(Script(say="word " * 5000, itl_seconds=0.01))
    with listening("--engine-url", upstream.url, "--engine-model-folder", str(model_folder)) as (process, address):
        body = b'{"stream": true, "messages": [{"role": "user", "content": "Hello"}]}'
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            events = answer.read().decode().split("\n\n")
        assert "stopping" in events[-2]
        assert wait_until(lambda: process.poll() is not None, seconds=10)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


def test_a_whole_answer_that_is_made_when_the_server_is_stopped_is_refused_as_a_client_expects(
    upstream: Upstream, model_folder: Path
) -> None:
    upstream.script(Script(say="word " * 5000, itl_seconds=0.01))
    with listening("--engine-url", upstream.url, "--engine-model-folder", str(model_folder)) as (process, address):
        body = b'{"messages": [{"role": "user", "content": "Hello"}]}'
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"content-type": "application/json"})
        num_before = len(upstream.requests)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(urllib.request.urlopen, request)
            assert wait_until(lambda: len(upstream.requests) > num_before, seconds=10)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(urllib.error.HTTPError) as refused:
                answer.result()
        with refused.value as error:
            assert (error.code, error.headers["retry-after"] is not None) == (503, True)
            assert "stopping" in msgspec.json.decode(error.read())["error"]["message"]
        assert wait_until(lambda: process.poll() is not None, seconds=10)
        assert process.stdout is not None
        assert "Traceback" not in process.stdout.read()


@pytest.mark.engine
def test_serve_alone_answers_on_a_real_engine_and_leaves_nothing_behind() -> None:
    with listening("--cache-folder", str(CACHE_FOLDER), "--engine-kv-tokens", "16384") as (process, address):
        body = b'{"stream": true, "max_tokens": 5, "messages": [{"role": "user", "content": "Hello"}]}'
        request = urllib.request.Request(f"{address}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            events = answer.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        assert any('"content":' in event for event in events)
        assert any("vllm.entrypoints" in child.command for child in descendants(process.pid))
        children = [child.pid for child in descendants(process.pid)]
        process.send_signal(signal.SIGINT)
        assert wait_until(lambda: process.poll() is not None, seconds=20)
        assert wait_until(lambda: not {other.pid for other in living()} & set(children), seconds=5)


def test_help_and_version_are_quick_to_find() -> None:
    code, output = run("--help")
    assert code == 0
    assert all(command in output for command in ("serve", "replay", "report", "generate"))
    assert run("--version") == (0, "0.1.0\n")


def test_summaries_are_those_of_the_commands() -> None:
    app = build_cli()
    for name, (_, summary) in {**COMMANDS, **replays.cli.COMMANDS}.items():
        assert app[name].help.startswith(summary.rstrip(".")), name


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], [], ["no-such-command"], ["serve", "--prot", "1"], ["serve", "--help"]])
def test_what_starts_no_server_imports_no_part_of_one(arguments: list[str]) -> None:
    """Seconds on a slow machine: these libraries are most of the start of a command."""
    script = """
import sys
from agentserve.cli import main
sys.argv[1:] = sys.argv[2:]
try:
    main()
except SystemExit:
    pass
sys.exit([name for name in ("numpy", "redis", "fastapi", "aiohttp", "jinja2", "structlog", "tokenizers", "torch") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, "agentserve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert done.stderr.splitlines()[-1:] == ["[]"], done.stderr
