"""The flags of `agentserve serve`, one for each setting, and `agentserve settings`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from agentserve.settings import environment_name, flag, leaves, load


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


def _command() -> Callable[..., None]:
    """`serve` with one flag per setting."""
    paths = {"_".join(path): path for path, _ in leaves()}

    def command(*, config: Path | None = None, **flags: Any) -> None:
        """Serve agent sessions over HTTP: in front of --engine-url, or of the embedded CPU engine."""
        # The server's parts take more than a second to import, which a wrong flag, --help and `agentserve settings` should not pay.
        from agentserve.serve import serve

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


def print_settings() -> None:
    """Print every setting as a Markdown table: flag, environment name, default, meaning."""
    sys.stdout.write(settings_page())


serve_command = _command()
