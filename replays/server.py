"""What a server says of itself: its model, the engine behind it, its metrics. Blocking; under locust the sockets yield to gevent."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

import msgspec
from msgspec import Struct

_GET_SECONDS = 10.0


class Model(Struct):
    id: str


class Models(Struct):
    data: list[Model]


class Version(Struct):
    """`engine` and `engine_url` are what agentserve says of the engine behind it; vLLM itself gives only its version."""

    version: str = ""
    engine: str | None = None
    engine_url: str | None = None


def get(url: str) -> bytes | None:
    """The body of a GET; None when it cannot be had."""
    try:
        with urllib.request.urlopen(url, timeout=_GET_SECONDS) as response:
            body: bytes = response.read()
            return body
    except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
        return None


def ask_model(url: str) -> str:
    """The id of the first model at `url`. Raises OSError when the server does not answer with one."""
    body = get(f"{url}/v1/models")
    if body is None:
        raise OSError(f"{url}/v1/models does not answer; is the server running there?")
    models = msgspec.json.decode(body, type=Models).data
    if not models:
        raise OSError(f"{url}/v1/models lists no model")
    return models[0].id


def ask_version(url: str) -> Version:
    """Version of the server at `url` and of the engine behind it, as far as it says."""
    body = get(f"{url}/version")
    return Version() if body is None else msgspec.json.decode(body, type=Version)


def ask_engine(url: str, model: str) -> str:
    """Name, version and model of the engine behind `url`, as far as the server says."""
    version = ask_version(url)
    if not version.engine and not version.version:
        return model
    return f"{version.engine or f'vllm {version.version}'}, {model}"
