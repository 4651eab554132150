"""Bodies that begin like an earlier one: an agent sends its whole history each turn, so only the end of it has to be parsed.

An earlier body is remembered by where its message list began and ended and by a digest of everything up to that end. A new body with the
same bytes up to there is cut down to what follows; JSON allows that, as the cut lies between two messages of one list. Nothing of a body
is kept. Digests are taken at every `CHUNK_BYTES`, so a body finds its candidates without knowing whose it is.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import xxhash

CHUNK_BYTES = 16_384
"""Shorter bodies are parsed whole: that costs less than looking."""
MAX_CANDIDATES = 16
MAX_KEYS = 16_384

_NEXT = re.compile(rb"[ \t\r\n]*([,\]])")


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """The start of a body up to the end of its `num_messages`-th message.

    `start` and `end` are byte offsets of the first message and behind the last; `chain` is the running digest of the conversation there.
    """

    start: int
    end: int
    digest: bytes
    num_messages: int
    num_head_messages: int
    chain: xxhash.xxh3_128


class BodyScan:
    """One body, digested, with the longest known prefix of it."""

    __slots__ = ("_bodies", "_states", "body", "known")

    def __init__(self, bodies: KnownBodies, body: bytes) -> None:
        self._bodies = bodies
        self.body = body
        self._states = _states(body)
        self.known = bodies.find(body, self._states)

    def shortened(self) -> bytes:
        """The body without the known messages; the whole body if none is known."""
        if self.known is None:
            return self.body
        following = _NEXT.match(self.body, self.known.end)
        if following is None:  # not valid JSON; parsing the whole of it says where
            self.known = None
            return self.body
        rest = following.end() if following[1] == b"," else following.start(1)
        return self.body[: self.known.start] + self.body[rest:]

    def remember(self, start: int, end: int, *, num_messages: int, num_head_messages: int, chain: xxhash.xxh3_128) -> None:
        """Let later bodies that begin with this one's bytes up to `end` be cut there."""
        number = end // CHUNK_BYTES
        if not number:
            return
        state = self._states[number].copy()
        state.update(self.body[number * CHUNK_BYTES : end])
        self._bodies.add(self._key(number), KnownPrefix(start, end, state.digest(), num_messages, num_head_messages, chain.copy()))

    def _key(self, number: int) -> tuple[int, bytes]:
        return number, self._states[number].digest()

    def span(self, first: object, last: object, parsed: bytes) -> tuple[int, int]:
        """Offsets in this body of the first and behind the last message, given as views into `parsed`, the shortened body."""
        origin = _address(parsed)
        start, end = _address(first) - origin, _address(last) - origin + len(memoryview(last))  # type: ignore[arg-type]  # msgspec.Raw
        shift = len(self.body) - len(parsed)
        return (self.known.start if self.known else start), end + shift


class KnownBodies:
    """The remembered prefixes of one dialect; the least recently used are dropped."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[tuple[int, bytes], list[KnownPrefix]] = OrderedDict()

    def scan(self, body: bytes) -> BodyScan:
        """Digest `body` and look for the longest prefix of it that is known."""
        return BodyScan(self, body)

    def find(self, body: bytes, states: list[xxhash.xxh3_128]) -> KnownPrefix | None:
        """The longest known prefix; `states` are the digests at each chunk."""
        for number in range(len(states) - 1, 0, -1):
            key = (number, states[number].digest())
            for known in reversed(self._prefixes.get(key, ())):
                if known.end > len(body):
                    continue
                state = states[number].copy()
                state.update(body[number * CHUNK_BYTES : known.end])
                if state.digest() == known.digest:
                    self._prefixes.move_to_end(key)
                    return known
        return None

    def add(self, key: tuple[int, bytes], prefix: KnownPrefix) -> None:
        """Remember a prefix whose last whole chunk has `key`."""
        candidates = self._prefixes.setdefault(key, [])
        candidates[:] = [other for other in candidates if other.digest != prefix.digest][-MAX_CANDIDATES + 1 :]
        candidates.append(prefix)
        self._prefixes.move_to_end(key)
        if len(self._prefixes) > MAX_KEYS:
            self._prefixes.popitem(last=False)


def _states(body: bytes) -> list[xxhash.xxh3_128]:
    """The digest state before each whole chunk and behind the last; the first is of nothing."""
    state = xxhash.xxh3_128()
    states = [state.copy()]
    for start in range(0, len(body) - CHUNK_BYTES + 1, CHUNK_BYTES):
        state.update(body[start : start + CHUNK_BYTES])
        states.append(state.copy())
    return states


def _address(buffer: object) -> int:
    address: int = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]  # type: ignore[call-overload]  # msgspec.Raw is a buffer
    return address
