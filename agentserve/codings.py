"""Content codings of request bodies, undone in bounded steps: whatever a body unpacks to, at most a step beyond its limit is held."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from agentserve.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

STEP_BYTES = 1 << 18
"""Output of one step. Between two steps a caller may let others run."""
MAX_CODINGS = 4
"""Codings that one body may have on top of each other."""
ZSTD_WINDOW_LOG = 23
"""8 MB: the window that RFC 9659 sets for zstd over HTTP. A frame that asks for more is refused, as its window would be allocated."""


class Stream(Protocol):
    """One compressed stream, with the interface of `lzma.LZMADecompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """At most `max_length` bytes of output; the rest follows on calls with no data until `needs_input`."""
        ...


class ZlibStream:
    """zlib behind the interface of `Stream`. Raw deflate, which some clients send as "deflate", is told apart by its first byte."""

    def __init__(self, window_bits: int) -> None:
        self._window_bits = window_bits
        self._stream: zlib._Decompress | None = None
        self._full = False

    @property
    def eof(self) -> bool:
        return self._stream is not None and self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._full

    @property
    def unused_data(self) -> bytes:
        return b"" if self._stream is None else self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        if self._stream is None:
            is_raw = self._window_bits == zlib.MAX_WBITS and data[0] & 0x0F != zlib.DEFLATED
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS if is_raw else self._window_bits)
        output = self._stream.decompress(self._stream.unconsumed_tail + data, max_length)
        self._full = len(output) == max_length
        return output


def _zstd() -> Stream:
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_LOG})


CODINGS: dict[str, Callable[[], Stream]] = {
    "gzip": lambda: ZlibStream(16 + zlib.MAX_WBITS),
    "x-gzip": lambda: ZlibStream(16 + zlib.MAX_WBITS),
    "deflate": lambda: ZlibStream(zlib.MAX_WBITS),
    "zstd": _zstd,
}


def codings(content_encoding: str) -> list[str]:
    """The codings that a Content-Encoding header names, in the order in which they were applied. Raises UnsupportedMediaType."""
    names = [name for part in content_encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    for name in names:
        if name not in CODINGS:
            raise UnsupportedMediaType(f"the content coding {name!r} is not known; send the body as {', '.join(CODINGS)} or without one")
    if len(names) > MAX_CODINGS:
        raise UnsupportedMediaType(f"the body has {len(names)} content codings; at most {MAX_CODINGS} are undone")
    return names


class Unpacking:
    """A body on its way through its codings, the last applied first. Each of them may unpack to `max_bytes`."""

    def __init__(self, names: Sequence[str], max_bytes: int) -> None:
        self._stages = [_Stage(name, max_bytes) for name in reversed(names)]

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What `data` unpacks to, step by step. Raises BodyTooLarge, and InvalidRequest if it is not what the header says."""
        return self._through(0, data)

    def finish(self) -> None:
        """The body has ended. Raises InvalidRequest if a coding had not."""
        for stage in self._stages:
            stage.finish()

    def _through(self, number: int, data: bytes) -> Iterator[bytes]:
        if number == len(self._stages):
            yield data
            return
        for output in self._stages[number].feed(data):
            yield from self._through(number + 1, output)


class _Stage:
    """One coding; several streams may follow each other in it, as gzip members and zstd frames do."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._stream: Stream | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        while data or (self._stream is not None and not self._stream.eof and not self._stream.needs_input):
            if self._stream is None or self._stream.eof:
                self._stream = CODINGS[self._name]()
            try:
                output = self._stream.decompress(data, STEP_BYTES)
            except (zlib.error, zstd.ZstdError) as error:
                raise InvalidRequest(f"the body is not valid {self._name}: {error}", code="invalid_body") from error
            data = self._stream.unused_data if self._stream.eof else b""
            self._left -= len(output)
            if self._left < 0:
                raise BodyTooLarge(f"the body unpacks to more than {self._max_bytes} bytes")
            yield output

    def finish(self) -> None:
        if self._stream is None or not self._stream.eof:
            raise InvalidRequest(f"the body ends in the middle of its {self._name} stream", code="invalid_body")
