"""This host: which vLLM and LMCache processes run on it, how they were started, and what a process may open."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agentserve.doctor.facts import ProcessFacts

_PROC = Path("/proc")
_NAMES = ("PYTHONHASHSEED", "LMCACHE_LOOKUP_SERVER_WORKER_IDS", "LMCACHE_SAVE_DECODE_CACHE")
"""Of a process's environment, all that is kept: the rest may hold secrets."""
_LOCAL = ("127.0.0.1", "localhost", "::1")
_VLLM_PORT, _LMCACHE_PORT = "8000", "8080"


def open_files() -> int | None:
    """How many files a process may open here at most; None: no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if hard == resource.RLIM_INFINITY else hard


def vllm_process(url: str, proc: Path = _PROC) -> ProcessFacts | None:
    """The vLLM that serves `url`, if it is on this host."""
    return _listening(url, "port", _VLLM_PORT, _is_vllm, proc)


def lmcache_process(url: str, proc: Path = _PROC) -> ProcessFacts | None:
    """The LMCache server whose HTTP side is at `url`, if it is on this host."""
    return _listening(url, "http-port", _LMCACHE_PORT, _is_lmcache, proc)


def lmcache_processes(proc: Path = _PROC) -> list[ProcessFacts]:
    """All LMCache servers of this host."""
    return [process for process, _ in _innermost(proc, _is_lmcache)]


def _is_vllm(arguments: Sequence[str]) -> bool:
    return "vllm.entrypoints.openai.api_server" in arguments or (
        "serve" in arguments and any(_named(word, "vllm") for word in arguments[:2])
    )


def _is_lmcache(arguments: Sequence[str]) -> bool:
    return "server" in arguments and any(_named(word, "lmcache") for word in arguments[:2])


def _named(word: str, name: str) -> bool:
    return Path(word).name == name


def _listening(url: str, option: str, default: str, is_one: Callable[[Sequence[str]], bool], proc: Path) -> ProcessFacts | None:
    where = urlsplit(url)
    if where.hostname not in _LOCAL:
        return None
    found = _innermost(proc, is_one)
    return next((process for process, _ in found if process.options.get(option, default) == str(where.port or 80)), None)


def _innermost(proc: Path, is_one: Callable[[Sequence[str]], bool]) -> list[tuple[ProcessFacts, int]]:
    """The processes of a kind with their parents' ids, without those that only started another of them."""
    found: list[tuple[ProcessFacts, int]] = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        arguments = _words(folder / "cmdline")
        if arguments and is_one(arguments):
            process = ProcessFacts(int(folder.name), tuple(arguments), _environment(folder), _soft_limit(folder))
            found.append((process, _parent(folder)))
    parents = {parent for _, parent in found}
    return [one for one in found if one[0].pid not in parents]


def _words(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:  # it has ended, or it is not ours
        return []


def _environment(folder: Path) -> Mapping[str, str] | None:
    pairs = [word.partition("=") for word in _words(folder / "environ")]
    return {name: value for name, _, value in pairs if name in _NAMES} if pairs else None


def _soft_limit(folder: Path) -> int | None:
    for line in "".join(_words(folder / "limits")).splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return int(soft) if soft.isdecimal() else None
    return None


def _parent(folder: Path) -> int:
    try:
        # "pid (name) state parent …", where the name may hold anything.
        return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0
