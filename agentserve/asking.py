"""What a server says over HTTP, for commands of a few requests: blocking, one connection a request."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from dataclasses import dataclass

ASK_SECONDS = 10.0
DEFAULT_URL = "http://127.0.0.1:8000"
"""Where `make serve` listens and `make replay` looks, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer, whatever its status."""

    status: int
    body: bytes


def ask(url: str, *, api_key: str | None = None, body: bytes | None = None, seconds: float = ASK_SECONDS) -> Said | None:
    """GET `url`, or POST a JSON `body` to it; None where nobody answers in time."""
    headers = {"content-type": "application/json"} if body is not None else {}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=seconds) as response:
            return Said(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Said(error.code, error.read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
