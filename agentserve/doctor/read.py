"""Reads the facts: over HTTP from engine, LMCache and server, from this host's processes, and from the model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentserve.asking import ask
from agentserve.boot import load_model_files
from agentserve.doctor import host
from agentserve.doctor.facts import EngineFacts, Facts, LmcacheFacts, ModelFacts, ServerFacts
from agentserve.doctor.launch import as_json
from agentserve.doctor.told import launch_facts, object_at, plugin_state
from agentserve.errors import SetupError
from agentserve.settings import EngineSettings

PROBE = "def größe(x):\n\treturn x ** 2  # 漢字 🙂, 12345 <b>don't</b>\n\n    if __name__ == '__main__':\r\n"
"""Text on which tokenizers differ."""

MAX_SESSIONS = 64
"""Sessions whose turns are read, the last used first."""
LIVE_SECONDS = 600.0
"""A session without a turn for longer than this before the latest one is not alive."""


@dataclass(frozen=True, slots=True)
class Where:
    """What the command line names. `server` may not be there; `engines` empty: what the server says of its engine."""

    server: str
    engines: Sequence[str] = ()
    lmcache: Sequence[str] = ()
    model_folder: Path | None = None
    api_key: str | None = None
    engine_api_key: str | None = None
    concurrency: int = 0


def read(where: Where) -> Facts:
    """All facts. Raises SetupError where there is no engine to look at."""
    unread: list[str] = []
    server, told = _server(where, unread)
    urls = list(where.engines) or told
    if not urls:
        raise SetupError(
            f"no agentserve answers at {where.server!r}: name the address of vLLM with --engine-url, or of the server with --url"
        )
    read_engines = [_engine(url.rstrip("/"), where.engine_api_key) for url in urls]
    model = _model(where.model_folder or next((root for _, root in read_engines if root is not None), None), unread)
    return Facts(
        [engine for engine, _ in read_engines],
        _lmcache(where.lmcache),
        server,
        model,
        where.concurrency,
        host.open_files(),
        unread,
    )


def _engine(url: str, api_key: str | None) -> tuple[EngineFacts, Path | None]:
    """An engine, and the folder that it names. Raises SetupError where nobody answers."""
    card = ((object_at(f"{url}/v1/models", api_key) or {}).get("data") or [None])[0]
    if card is None:
        raise SetupError(f"no vLLM answers at {url!r} (GET /v1/models): start it, or name its address with --engine-url")
    route = ask(f"{url}/inference/v1/generate", api_key=api_key, body=b"{}")
    tokens = object_at(f"{url}/tokenize", api_key, {"model": card["id"], "prompt": PROBE, "add_special_tokens": False}) or {}
    facts = replace(
        launch_facts(url, api_key),
        max_model_len=card.get("max_model_len"),
        events=object_at(f"{url}/kv_event_sources", api_key),
        has_token_route=None if route is None else route.status not in (403, 404, 405, 501),
        probe_ids=tuple(tokens["tokens"]) if "tokens" in tokens else None,
        plugin=plugin_state(url, api_key),
    )
    root = Path(card.get("root") or "")
    return facts, root if root.is_absolute() and root.is_dir() else None


def _lmcache(urls: Sequence[str]) -> list[LmcacheFacts]:
    """The LMCache servers that are named, else those of this host."""
    if not urls:
        return [LmcacheFacts(None, process) for process in host.lmcache_processes()]
    return [LmcacheFacts(object_at(f"{url.rstrip('/')}/config"), host.lmcache_process(url)) for url in urls]


def _model(folder: Path | None, unread: list[str]) -> ModelFacts | None:
    if folder is None:
        return None
    try:
        tokenizer, chat = load_model_files(EngineSettings(), folder)
    except SetupError as error:
        unread.append(error.message)
        return None
    parts = [
        as_json((folder / name).read_text()) if (folder / name).is_file() else {} for name in ("config.json", "generation_config.json")
    ]
    return ModelFacts(parts[0], parts[1], tuple(tokenizer.encode(PROBE)), tuple(chat.stop_ids))


def _server(where: Where, unread: list[str]) -> tuple[ServerFacts | None, list[str]]:
    """The agentserve in front, and the addresses of engines that it tells."""
    url = where.server.rstrip("/")
    version = object_at(f"{url}/version") or {}
    if "engine_url" not in version:
        unread.append(f"no agentserve at {url}: sessions, return gaps and the mirror are not known")
        return None, []
    told = version.get("engine_urls") or [version["engine_url"]]
    cache, sessions = object_at(f"{url}/v1/cache", where.api_key), object_at(f"{url}/v1/sessions", where.api_key)
    if cache is None or sessions is None:
        unread.append(f"the server at {url} does not show its cache: name one of its API keys with --api-key")
        return None, told
    known = sessions["data"]
    ends: dict[str, float] = {}
    gaps: list[float] = []
    for session in known[:MAX_SESSIONS]:
        turns = (object_at(f"{url}/v1/sessions/{quote(session['id'])}/turns", where.api_key) or {}).get("data") or []
        gaps += _gaps(turns)
        if turns:
            ends[session["id"]] = _seconds(turns[-1]["ended_at"])
    latest = max(ends.values(), default=0.0)
    live = sum(session["context_tokens"] for session in known if ends.get(session["id"], 0.0) > latest - LIVE_SECONDS)
    return ServerFacts(cache, [session["context_tokens"] for session in known], live, gaps), told


def _gaps(turns: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds between the turns of a session, where they did not run at once."""
    gaps = [_seconds(later["ended_at"]) - later["seconds"] - _seconds(earlier["ended_at"]) for earlier, later in pairwise(turns)]
    return [gap for gap in gaps if gap > 0]


def _seconds(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
