"""JSON bodies: typed decoding with errors that name the field, and what clients get wrong about Unicode put right."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from agentserve.errors import InvalidRequest

T = TypeVar("T")

_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.", re.DOTALL)
_LONE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a whole body; lone surrogates become U+FFFD. Raises InvalidRequest with the path of what is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error, "") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        mended = replace_lone_surrogates(body)
        if mended == body:
            raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return decode_body(decoder, mended)


def decode_part(decoder: msgspec.json.Decoder[T], raw: msgspec.Raw, at: str) -> T:
    """Decode a part of a body that was left raw; `at` names it in errors."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(error, at) from error
    except RecursionError as error:
        raise InvalidRequest(f"`{at}` is nested too deeply", param=at) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"`{at}` is not valid JSON: {error}", param=at, code="invalid_json") from error


def replace_lone_surrogates(body: bytes) -> bytes:
    """JSON text in which each escaped half of a surrogate pair without its other half is \\ufffd."""
    return _ESCAPE.sub(lambda found: b"\\ufffd" if _LONE.fullmatch(found[0]) else found[0], body)


def _invalid(error: msgspec.ValidationError, at: str) -> InvalidRequest:
    text, found, path = str(error).partition(" - at `$")
    if not found:
        return InvalidRequest(f"{text} at `{at}`" if at else text, param=at or None)
    path = f"{at}{path}".strip("`").lstrip(".")
    return InvalidRequest(f"{text} at `{path}`", param=path)
