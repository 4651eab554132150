"""Hands what was chosen to the server: live through its administration route, or into its settings file, every other line as it was."""

from __future__ import annotations

import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import msgspec

from replays.tuner.space import Setting

TABLE = "admission"
_TIMEOUT_SECONDS = 30.0


class ApplyError(ValueError):
    """It could not be handed over; the message says why, and what is as it was."""


def table_text(setting: Setting) -> str:
    """The admission policy in the form of the server's settings."""
    values = ", ".join(f'"{name}={value:.6g}"' for name, value in setting.admission_parameters.items())
    return f'[{TABLE}]\npolicy = "{setting.admission}"\nparameters = [{values}]\n'


def write_settings(path: Path, setting: Setting) -> None:
    """Put the admission policy into the file, made where it is not there; a server takes it on SIGHUP. Raises ApplyError, or OSError."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    try:
        tomllib.loads(before)
    except tomllib.TOMLDecodeError as error:
        raise ApplyError(f"{path} is not TOML, and is left as it is: {error}") from None
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


def body_of(setting: Setting, *, with_eviction: bool) -> bytes:
    """The body of PUT /v1/admin/policies."""
    body: dict[str, Mapping[str, object]] = {"admission": {"policy": setting.admission, "parameters": dict(setting.admission_parameters)}}
    if with_eviction:
        body["eviction"] = {"policy": setting.policy, "parameters": dict(setting.parameters)}
    return msgspec.json.encode(body)


def switch(url: str, admin_key: str, setting: Setting, *, with_eviction: bool) -> None:
    """Let a running server go on by `setting`. Raises ApplyError with the server's own message."""
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/admin/policies", body_of(setting, with_eviction=with_eviction), method="PUT")
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", f"Bearer {admin_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
            response.read()
    except urllib.error.HTTPError as error:
        raise ApplyError(f"{url} did not take it: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise ApplyError(f"{url} did not answer: {error}") from None
