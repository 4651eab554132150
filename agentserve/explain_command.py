"""The command line of `agentserve explain`."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from cyclopts import Parameter, validators

from agentserve.asking import DEFAULT_URL
from agentserve.explain import advice, read_turns, show
from agentserve.terminal import wide_console


def explain(
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
    turns = read_turns(url, session, api_key or None, limit)
    if json:
        sys.stdout.write(msgspec.json.encode({"session": session, "turns": turns, "advice": advice(turns)}).decode() + "\n")
    else:
        show(wide_console(), session, turns)
