"""JSON bodies: typed decoding with errors that name the field, and what clients get wrong about Unicode put right."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from agentserve.errors import InvalidRequest

T = TypeVar("T")

_ESCAPE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\\.", re.DOTALL)
_LONE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")

MAX_DEPTH = 128
"""Lists and objects inside each other, in a message or in the tools. What a model is given is walked by functions that call themselves."""

_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|([\[{])|[\]}]', re.DOTALL)


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
    if _is_deep_part(raw):
        raise InvalidRequest(f"`{at}` is nested deeper than {MAX_DEPTH} levels", param=at, code="invalid_json")
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(error, at) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"`{at}` is not valid JSON: {error}", param=at, code="invalid_json") from error


def decode_parts(
    together: msgspec.json.Decoder[list[T]], alone: msgspec.json.Decoder[T], raws: Sequence[msgspec.Raw], at: Callable[[int], str]
) -> list[T]:
    """Decode neighbouring parts of a body at once, which costs a fraction of one by one. `at` names a part, by its place, in errors."""
    if not any(map(_is_deep_part, raws)):
        try:
            return together.decode(b"[" + b",".join(raws) + b"]")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # one by one says where
    return [decode_part(alone, raw, at(index)) for index, raw in enumerate(raws)]


def _is_deep_part(raw: msgspec.Raw) -> bool:
    return len(raw) > 2 * MAX_DEPTH and is_deep(bytes(raw))


def is_deep(text: bytes) -> bool:
    """Whether lists and objects of JSON text are inside each other deeper than MAX_DEPTH."""
    if len(text) <= 2 * MAX_DEPTH:  # each takes two brackets
        return False
    if text.count(b"{") + text.count(b"[") <= MAX_DEPTH:
        return False
    depth = 0
    for token in _BRACKET.finditer(text):
        if token[1]:
            depth += 1
        elif not token[0].startswith(b'"'):
            depth -= 1
        if depth > MAX_DEPTH:
            return True
    return False


def replace_lone_surrogates(body: bytes) -> bytes:
    """JSON text in which each escaped half of a surrogate pair without its other half is \\ufffd."""
    return _ESCAPE.sub(lambda found: b"\\ufffd" if _LONE.fullmatch(found[0]) else found[0], body)


def _invalid(error: msgspec.ValidationError, at: str) -> InvalidRequest:
    text, found, path = str(error).partition(" - at `$")
    if not found:
        return InvalidRequest(f"{text} at `{at}`" if at else text, param=at or None)
    path = f"{at}{path}".strip("`").lstrip(".")
    return InvalidRequest(f"{text} at `{path}`", param=path)
