"""The command line: which module holds each command. It is imported when the command is called: --version and errors cost none of them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from importlib.metadata import version

from cyclopts import App

from agentserve.errors import AgentserveError, SetupError
from agentserve.terminal import ERRORS

COMMANDS = {
    "serve": (
        "agentserve.serve_command:serve_command",
        "Serve agent sessions over HTTP: in front of --engine-url, or of the embedded CPU engine.",
    ),
    "settings": (
        "agentserve.serve_command:print_settings",
        "Print every setting as a Markdown table: flag, environment name, default, meaning.",
    ),
    "model": (
        "agentserve.model_commands:app",
        "MiniMax-M3: shapes, KV bytes, capacity, launch profiles, and what runs of what was configured.",
    ),
    "explain": (
        "agentserve.explain_command:explain",
        "Show the turns of a session: hits, the cause of every miss, where it left its history; and what to do about what cost most.",
    ),
    "doctor": (
        "agentserve.doctor.command:doctor",
        "Look for what will cost hits or crash: in the running engine, LMCache, this host, and the server.",
    ),
    "policies": (
        "agentserve.policies_command:policies",
        "List the admission and eviction policies with what they do and their parameters.",
    ),
}
"""By name: where it is, and its summary, which `agentserve --help` shows without importing it."""


def build_cli(*, only_summaries: bool = False) -> App:
    """The whole command line; `replay`, `report` and `generate` join where their dependencies are installed.

    With `only_summaries` its own help needs no command's module, and theirs would be the summary alone.
    """
    app = App(name="agentserve", help="A session server for agentic coding in front of vLLM.", version=version("agentserve"))
    commands = dict(COMMANDS)
    if importlib.util.find_spec("replays") is not None:
        commands |= importlib.import_module("replays.cli").COMMANDS
    for name, (where, summary) in commands.items():
        app.command(where, name=name, help=summary if only_summaries else None)
    return app


def _refuse_unknown(name: str, known: list[str]) -> None:
    """Raise SetupError for a command that there is not. cyclopts would import them all to say so."""
    if not name.startswith("-") and name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise SetupError(f"unknown command {name!r}" + (f", did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known)}"))


def main() -> None:
    """Run the command line. Exit code 0 on success, 2 for a bad setting or set-up, 130 after Ctrl-C."""
    first = next(iter(sys.argv[1:]), "--help")
    try:
        app = build_cli(only_summaries=first in ("--help", "-h"))
        _refuse_unknown(first, [name for name in app if not name.startswith("-")])
        app()
    except AgentserveError as error:
        ERRORS.print(f"[red]agentserve: {error.message}[/red]", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
