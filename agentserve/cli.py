"""The command line. Flags of `serve` derive from the settings; the replay commands come from `replays`, found by name."""

from __future__ import annotations

import asyncio
import errno
import importlib
import importlib.util
import inspect
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import structlog
import uvloop
from cyclopts import App, Parameter, validators
from rich.console import Console
from rich.table import Table

from admission.choice import Choice
from admission.eviction import EVICTION_POLICIES
from admission.policies import ADMISSION_POLICIES
from agentserve import explain
from agentserve.boot import running_server
from agentserve.doctor.read import Where, read
from agentserve.doctor.show import as_json, show
from agentserve.doctor.table import examine, is_healthy
from agentserve.engines.embedded import WHAT_IS_REAL, EmbeddedEngine
from agentserve.errors import AgentserveError, SetupError
from agentserve.log import configure_log
from agentserve.model_commands import app as model_commands
from agentserve.policies import chosen, describe_choices, parameters_of
from agentserve.server import Server
from agentserve.settings import Settings, environment_name, flag, leaves, load
from agentserve.web import most_connections, web_server

DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `make serve` listens and `make replay` looks, unless told otherwise."""

PIPE_WIDTH = 180
MANY_CONNECTIONS = 10_000
"""Where so many clients may connect, files do not run out before other things do."""

_log = structlog.get_logger(__name__)
_console = Console(stderr=True, highlight=False)
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
            _announce(server, f"http://{host}:{port}")
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
    _console.print(f"[dim]{text}[/dim]")


def _announce(server: Server, url: str) -> None:
    if isinstance(server.engine, EmbeddedEngine):
        _console.print(WHAT_IS_REAL, soft_wrap=True)
    info = server.engine.info
    capacity = f"{info.kv_capacity_tokens:,} tokens of KV cache" if info.kv_capacity_tokens else "KV capacity unknown"
    _console.print(f"\n[bold]agentserve {version('agentserve')}[/bold] on {info.name}, model {server.model_name!r}, {capacity}")
    _console.print(f"listening on [bold]{url}[/bold]\n")
    body = f'{{"model":"{server.model_name}","stream":true,"max_tokens":64,"messages":[{{"role":"user","content":"Hello"}}]}}'
    _console.print("Try:", style="bold")
    _console.print(f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'", soft_wrap=True, markup=False)
    _console.print(f"  curl {url}/v1/sessions          # what the server knows of each session", soft_wrap=True, markup=False)
    _console.print(f"  curl {url}/metrics              # agentserve_* and the engine's own", soft_wrap=True, markup=False)
    address = "" if url == DEFAULT_URL else f" --url {url}"
    command = "python -m agentserve" if sys.argv[0].endswith(".py") else sys.argv[0]
    _console.print(f"  {command} doctor{address}          # what will cost hits or crash", soft_wrap=True, markup=False)
    replay = "make replay" if url == DEFAULT_URL else f"make replay URL={url}"
    _console.print(f"  {replay}          # drive agent sessions through it and print the hit report", soft_wrap=True, markup=False)
    _console.print("Stop with Ctrl-C.")


def settings_page() -> str:
    """The reference page of the settings, as Markdown."""
    rows = [
        "# Settings",
        "",
        "Flag over environment over file (`--config FILE`, TOML, one table per group) over default. Unknown names are refused.",
        "",
        "| flag | environment | default | meaning |",
        "|---|---|---|---|",
    ]
    for path, info in leaves():
        default = "" if info.default in (None, ()) else str(info.default).replace(str(Path.home()), "~")
        rows.append(f"| `{flag(path)}` | `{environment_name(path)}` | {default} | {info.description} |")
    return "\n".join(rows) + "\n"


def _serve_command() -> Callable[..., None]:
    """`serve` with one flag per setting."""
    paths = {"_".join(path): path for path, _ in leaves()}

    def command(*, config: Path | None = None, **flags: Any) -> None:
        """Serve agent sessions over HTTP: in front of --engine-url, or of the embedded CPU engine."""
        given = {paths[name]: value for name, value in flags.items() if value is not None}
        serve(load(given, config), lambda: load(given, config))

    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, Parameter(name="--config", help="A TOML file with settings.")],
        )
    ]
    for path, info in leaves():
        kind: Any = bool if info.annotation is bool else list[str] if isinstance(info.default, tuple) else str
        help_text = f"{info.description} [default: {info.default}] [env: {environment_name(path)}]"
        parameters.append(
            inspect.Parameter(
                "_".join(path),
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, Parameter(name=flag(path), help=help_text, show_default=False)],
            )
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # cyclopts reads the signature
    return command


def _print_settings() -> None:
    """Print every setting as a Markdown table: flag, environment name, default, meaning."""
    sys.stdout.write(settings_page())


def _policies(*, json: bool = False) -> None:
    """List the admission and eviction policies with what they do and their parameters.

    Parameters
    ----------
    json
        Print JSON.
    """
    tables: dict[str, Mapping[str, Choice]] = {"admission": ADMISSION_POLICIES, "eviction": EVICTION_POLICIES}
    if json:
        sys.stdout.write(msgspec.json.encode({kind: describe_choices(table) for kind, table in tables.items()}).decode() + "\n")
        return
    console = wide_console()
    for kind, table in tables.items():
        shown = Table("policy", "what it does", "parameter", "default", "range", "meaning", title=f"{kind} policies", title_justify="left")
        for name, choice in table.items():
            rows = [(knob, f"{row.low:g} to {row.high:g}", row.about) for knob, row in choice.knobs().items()] or [("", "", "")]
            defaults = parameters_of(choice, {})
            for position, (knob, bounds, about) in enumerate(rows):
                first = (name, choice.about) if position == 0 else ("", "")
                shown.add_row(*first, knob, f"{defaults[knob]:g}" if knob else "", bounds, about, end_section=position == len(rows) - 1)
        console.print(shown)


def wide_console() -> Console:
    """Where tables go: as wide as the terminal, and wide in a file or a pipe."""
    return Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)


def _explain(
    session: str,
    *,
    url: str = DEFAULT_URL,
    api_key: Annotated[str, Parameter(show_default=False)] = "",
    limit: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1000))] = 100,
    json: bool = False,
) -> None:
    """Show the turns of a session: hits, the cause of every miss, where it left its history; and what to do about what cost most.

    Parameters
    ----------
    session
        The session's id, as GET /v1/sessions lists it.
    url
        The server.
    api_key
        One of the server's API keys, if it has any: a session is seen by its own key only.
    limit
        Its latest turns, so many.
    json
        Print JSON: the turns, and the advice.
    """
    turns = explain.read_turns(url, session, api_key or None, limit)
    if json:
        sys.stdout.write(msgspec.json.encode({"session": session, "turns": turns, "advice": explain.advice(turns)}).decode() + "\n")
    else:
        explain.show(wide_console(), session, turns)


def _doctor(
    *,
    url: str = DEFAULT_URL,
    engine_url: tuple[str, ...] = (),
    lmcache_url: tuple[str, ...] = (),
    model_folder: Path | None = None,
    api_key: Annotated[str, Parameter(show_default=False)] = "",
    engine_api_key: Annotated[str, Parameter(show_default=False)] = "",
    concurrency: Annotated[int, Parameter(validator=validators.Number(gte=1))] = 1024,
    json: bool = False,
) -> int:
    """Look for what will cost hits or crash: in the running engine, LMCache, this host, and the server. Exit code 1 if something is found.

    Parameters
    ----------
    url
        The server, if one runs: it knows sessions, return gaps and whether events arrive.
    engine_url
        vLLM's own address; several where several share their cache. By default what the server says.
    lmcache_url
        HTTP address of each LMCache server; by default those that run on this host.
    model_folder
        Folder with the model's tokenizer and configuration; by default the one that the engine names.
    api_key
        One of the server's API keys, if it has any.
    engine_api_key
        The engine's API key, if it has one.
    concurrency
        Turns that are to run at once.
    json
        Print JSON.
    """
    where = Where(url, engine_url, lmcache_url, model_folder, api_key or None, engine_api_key or None, concurrency)
    facts = read(where)
    verdicts = examine(facts)
    if json:
        sys.stdout.write(as_json(verdicts, facts.unread).decode() + "\n")
    else:
        show(wide_console(), verdicts, facts.unread)
    return 0 if is_healthy(verdicts) else 1


def build_cli() -> App:
    """The whole command line; `replay`, `report` and `generate` join where their dependencies are installed."""
    app = App(name="agentserve", help="A session server for agentic coding in front of vLLM.", version=version("agentserve"))
    app.command(_serve_command(), name="serve")
    app.command(_print_settings, name="settings")
    app.command(model_commands)
    app.command(_explain, name="explain")
    app.command(_doctor, name="doctor")
    app.command(_policies, name="policies")
    if importlib.util.find_spec("replays") is not None:
        app.update(importlib.import_module("replays.cli").app)
    return app


def main() -> None:
    """Run the command line. Exit code 0 on success, 2 for a bad setting or set-up, 130 after Ctrl-C."""
    try:
        build_cli()()
    except AgentserveError as error:
        _console.print(f"[red]agentserve: {error.message}[/red]", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
