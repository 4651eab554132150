"""The servers that are measured: how each is installed, started and found ready. A new one is a row of `CONTENDERS`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

START_SECONDS = 90.0


class ContenderFailed(RuntimeError):
    """A server could not be installed or did not start."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What a command line is written from."""

    python: Path
    port: int
    upstream: str
    model: str
    model_folder: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """One server. `requirement` None: it runs in this environment. `command` None: no server at all, the upstream itself."""

    name: str
    command: Callable[[Launch], list[str]] | None
    requirement: str | None = None
    needs_model_folder: bool = False
    appends: bool = False
    """After a session's first turn only the new message is sent."""


def _agentserve(launch: Launch) -> list[str]:
    where = ["--engine-url", launch.upstream, "--engine-model-folder", str(launch.model_folder)]
    return [str(launch.python), "-m", "agentserve", "serve", *where, "--port", str(launch.port), "--log-level", "warning"]


def _sglang_router(launch: Launch) -> list[str]:
    program = str(launch.python.with_name("sglang-router"))
    where = ["--worker-urls", launch.upstream, "--host", "127.0.0.1", "--port", str(launch.port)]
    return [program, "launch", *where, "--policy", "cache_aware", "--log-level", "error", "--prometheus-port", str(free_port())]


def _vllm_router(launch: Launch) -> list[str]:
    program = str(launch.python.with_name("vllm-router"))
    where = ["--worker-urls", launch.upstream, "--host", "127.0.0.1", "--port", str(launch.port)]
    return [program, *where, "--policy", "cache_aware", "--log-level", "error", "--prometheus-port", str(free_port())]


def _litellm(launch: Launch) -> list[str]:
    program = str(launch.python.with_name("litellm"))
    where = ["--api_base", f"{launch.upstream}/v1", "--host", "127.0.0.1", "--port", str(launch.port)]
    # Its OpenAI client refuses to start without some key.
    return [
        "env",
        "OPENAI_API_KEY=none",
        program,
        "--model",
        f"openai/{launch.model}",
        "--alias",
        launch.model,
        *where,
        "--telemetry",
        "False",
    ]


CONTENDERS: dict[str, Contender] = {
    "direct": Contender("direct", None),
    "agentserve": Contender("agentserve", _agentserve, needs_model_folder=True),
    "agentserve-append": Contender("agentserve-append", _agentserve, needs_model_folder=True, appends=True),
    "sglang-router": Contender("sglang-router", _sglang_router, "sglang-router==0.3.2"),
    "vllm-router": Contender("vllm-router", _vllm_router, "vllm-router==0.1.17"),
    "litellm": Contender("litellm", _litellm, "litellm[proxy]==1.80.0"),
}


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def install(contender: Contender, cache_folder: Path) -> Path:
    """The Python of `contender`'s virtual environment; made on first use, and again when its pinned requirement changes."""
    if contender.requirement is None:
        return Path(sys.executable)
    folder = cache_folder / contender.name
    python, marker = folder / "bin" / "python", folder / "installed"
    if marker.exists() and marker.read_text() == contender.requirement:
        return python
    with Console(stderr=True).status(f"installing {contender.requirement} into {folder}"):
        venv.EnvBuilder(with_pip=True, clear=True).create(folder)
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", contender.requirement]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ContenderFailed(f"pip could not install {contender.requirement!r}: {done.stderr.strip()[-500:]}")
    marker.write_text(contender.requirement)
    return python


@contextmanager
def running(command: list[str], port: int, log: Path, ready_path: str = "/health") -> Iterator[None]:
    """Run `command` until the body ends; it is entered when `ready_path` answers 200.

    Raises:
        ContenderFailed: it ended, or did not answer in time.
    """
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            _wait_ready(process, f"http://127.0.0.1:{port}{ready_path}", log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=1) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    state = f"ended with {process.poll()}" if process.poll() is not None else f"did not answer within {START_SECONDS:.0f} s"
    raise ContenderFailed(f"{process.args!r} {state}; the end of its log:\n{log.read_text(errors='replace')[-1500:]}")
