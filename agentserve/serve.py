"""`agentserve serve`: the server from its first message to its last."""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import structlog
import uvloop

from agentserve.asking import DEFAULT_URL
from agentserve.boot import running_server
from agentserve.engines.embedded import WHAT_IS_REAL, EmbeddedEngine
from agentserve.errors import AgentserveError, SetupError
from agentserve.log import configure_log
from agentserve.policies import chosen
from agentserve.server import Server
from agentserve.settings import Settings
from agentserve.terminal import ERRORS
from agentserve.web import most_connections, web_server

MANY_CONNECTIONS = 10_000
"""Where so many clients may connect, files do not run out before other things do."""

_log = structlog.get_logger(__name__)


def serve(settings: Settings, reload: Callable[[], Settings] | None = None) -> None:
    """Serve until stopped. `reload` reads the settings again, on SIGHUP. Raises SetupError."""
    configure_log(settings.log_level)
    _raise_open_files()
    with asyncio.Runner(loop_factory=_event_loop) as runner:
        try:
            runner.run(_serve(settings, reload or (lambda: settings)))
        except asyncio.CancelledError:
            sys.exit(128 + signal.SIGTERM)


async def _serve(settings: Settings, reload: Callable[[], Settings]) -> None:
    listener = _listen(settings.host, settings.port)
    task = asyncio.current_task()
    assert task is not None
    # While the engine starts; and after uvicorn, which raises the signal that stopped it once more when it is done.
    signal.signal(signal.SIGTERM, lambda *_: task.cancel())
    with listener:
        async with running_server(settings, _progress) as server:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, follow, server, reload)
            host, port = listener.getsockname()[:2]
            announce(server, f"http://{host}:{port}")
            await web_server(server).serve(sockets=[listener])


def follow(server: Server, reload: Callable[[], Settings]) -> None:
    """Take over what may change while turns run and wait: the admission policy. Settings that cannot be read leave everything as it is."""
    try:
        picked = reload().admission
        server.policies.change_admission(chosen(picked.policy, picked.parameters))
    except AgentserveError as error:
        _log.error("the settings were not taken over", reason=error.message)
    else:
        _log.info("the admission policy follows the settings", policy=picked.policy, parameters=picked.parameters)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before the engine starts, so that a port in use is said at once."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise SetupError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --port") from error
    return listener


def _event_loop() -> asyncio.AbstractEventLoop:
    """uvloop, except where files may run out: there libuv resets clients that asyncio leaves waiting until they can be accepted."""
    limit = most_connections()
    if limit is None or limit >= MANY_CONNECTIONS:
        return uvloop.new_event_loop()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_UsedUp())
    return loop


class _UsedUp:
    """Says once a minute that files have run out; asyncio says it up to 2,048 times a second, with a traceback."""

    def __init__(self) -> None:
        self._quiet_until = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._quiet_until:
            self._quiet_until = loop.time() + 60
            _log.warning("no files left for new connections, which wait", cure="raise the hard limit of `ulimit -n`")


def _raise_open_files() -> None:
    """Each turn holds two connections: take as many file descriptors as the host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _progress(text: str) -> None:
    ERRORS.print(text, style="dim", markup=False, soft_wrap=True)


def announce(server: Server, url: str) -> None:
    """Print what serves where, and what to try."""
    if isinstance(server.engine, EmbeddedEngine):
        ERRORS.print(WHAT_IS_REAL, soft_wrap=True)
    info = server.engine.info
    capacity = f"{info.kv_capacity_tokens:,} tokens of KV cache" if info.kv_capacity_tokens else "KV capacity unknown"
    ERRORS.print(f"\n[bold]agentserve {version('agentserve')}[/bold] on {info.name}, model {server.model_name!r}, {capacity}")
    options = server.settings
    if options.engine.plugin != "off":
        ERRORS.print(f"eviction plugin: {options.engine.plugin}", markup=False)
    if options.offload.tier != "off":
        ERRORS.print(f"offload tier: {options.offload.tier}", markup=False)
    ERRORS.print(f"listening on [bold]{url}[/bold]\n")
    body = f'{{"model":"{server.model_name}","stream":true,"max_tokens":64,"messages":[{{"role":"user","content":"Hello"}}]}}'
    ERRORS.print("Try:", style="bold")
    ERRORS.print(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", soft_wrap=True, markup=False)
    ERRORS.print(f"  curl {url}/v1/sessions          # what the server knows of each session", soft_wrap=True, markup=False)
    ERRORS.print(f"  curl {url}/metrics              # agentserve_* and the engine's own", soft_wrap=True, markup=False)
    address = "" if url == DEFAULT_URL else f" --url {url}"
    command = "python -m agentserve" if sys.argv[0].endswith(".py") else sys.argv[0]
    ERRORS.print(f"  {command} doctor{address}          # what will cost hits or crash", soft_wrap=True, markup=False)
    replay = "make replay" if url == DEFAULT_URL else f"make replay URL={url}"
    ERRORS.print(f"  {replay}          # drive agent sessions through it and print the hit report", soft_wrap=True, markup=False)
    ERRORS.print("Stop with Ctrl-C.")
