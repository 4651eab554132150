"""Writes what was chosen into the server's settings file: its own tables, every other line as it was."""

from __future__ import annotations

import tomllib
from pathlib import Path

from replays.tuner.space import Setting

TABLE = "eviction"


class SettingsFileError(ValueError):
    """The file that is there cannot be kept: it is not TOML."""


def table_text(setting: Setting) -> str:
    """The table of a setting, in the form of the server's settings."""
    values = ", ".join(f'"{name}={value:.6g}"' for name, value in setting.parameters.items())
    return f'[{TABLE}]\npolicy = "{setting.policy}"\nparameters = [{values}]\n'


def apply(path: Path, setting: Setting) -> None:
    """Put `setting` into the file, made where it is not there. Raises SettingsFileError, or OSError; then the file is as it was."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        tomllib.loads(before)
    except tomllib.TOMLDecodeError as error:
        raise SettingsFileError(f"{path} is not TOML, and is left as it is: {error}") from None
    kept = _without(before, TABLE)
    text = kept.rstrip("\n") + ("\n\n" if kept.strip() else "") + table_text(setting)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _without(text: str, table: str) -> str:
    """`text` without one table."""
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = line.strip().split("#")[0].strip() == f"[{table}]"
        if not inside:
            kept.append(line)
    return "".join(kept)
