"""Collects what `model.m3.fast_paths` judges: a running engine's command line, environment, log, metrics and profiler trace."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from agentserve.engines.prometheus import sums
from agentserve.errors import SetupError

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_LOG_BYTES = 8 << 20
"""An engine says how it dispatches while it starts: the head of its log is enough."""


def parse_flags(arguments: list[str]) -> dict[str, Any]:
    """A vLLM command line as flags without dashes: True for a bare one, parsed JSON where the value is an object or a list."""
    flags: dict[str, Any] = {}
    name = None
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            name = name.replace("_", "-")
            flags[name] = _value(value) if equals else True
            name = None if equals else name
        elif name is not None:
            flags[name] = _value(argument)
            name = None
    return flags


def _value(text: str) -> Any:
    if text[:1] in ("{", "["):
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text
    return text


def process_evidence(pid: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Flags and environment of a process on this host. Raises SetupError where it is gone or belongs to somebody else."""
    folder = Path("/proc") / str(pid)
    try:
        arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        lines = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError as error:
        raise SetupError(f"cannot read process {pid}: {error.strerror or error}; run as its user, on its host") from error
    return parse_flags(arguments), dict(line.split("=", 1) for line in lines if "=" in line)


def read_log(path: Path) -> str:
    """The first 8 MiB of an engine's log. Raises SetupError."""
    try:
        with path.open("rb") as log:
            return log.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror or error}") from error


class _TraceEvent(msgspec.Struct):
    name: str = ""
    cat: str = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_TraceEvent]  # noqa: N815 # the Chrome trace format's own name


def read_kernels(path: Path) -> dict[str, int]:
    """Kernel launches by name from a torch profiler's Chrome trace (.json or .json.gz). Raises SetupError."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        trace = msgspec.json.decode(content, type=_Trace)
    except (OSError, EOFError, msgspec.DecodeError) as error:
        raise SetupError(f"{path} is no profiler trace that can be read: {error}") from error
    return dict(Counter(event.name for event in trace.traceEvents if event.cat == "kernel"))


async def read_metrics(engine_url: str) -> dict[str, float]:
    """The engine's counters, summed over labels. Raises SetupError where it does not answer."""
    url = f"{engine_url.rstrip('/')}/metrics"
    try:
        async with aiohttp.ClientSession(timeout=_TIMEOUT) as client, client.get(url) as response:
            response.raise_for_status()
            return sums(await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise SetupError(f"{url} does not answer: {error or type(error).__name__}") from error
