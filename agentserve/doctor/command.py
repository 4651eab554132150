"""The command line of `agentserve doctor`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from agentserve.asking import DEFAULT_URL
from agentserve.doctor.read import Where, read
from agentserve.doctor.show import as_json, show
from agentserve.doctor.table import examine, is_healthy
from agentserve.terminal import wide_console


def doctor(
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
