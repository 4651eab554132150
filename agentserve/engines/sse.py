"""Reads server-sent events from bytes that come in any pieces."""

from __future__ import annotations


class SseParser:
    """Splits a byte stream into the `data` of its events (the event stream of the HTML standard, as engines write it).

    Takes LF and CRLF line ends, joins several `data:` lines of an event by LF, and skips comments and other fields. An event may be
    of any size: bytes are searched once, however small the pieces.
    """

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Take the next bytes; return the data of every event that they complete, in order."""
        end = piece.rfind(b"\n") + 1
        if not end:
            self._pending.append(piece)
            return []
        self._pending.append(piece[:end])
        lines = b"".join(self._pending)
        self._pending = [piece[end:]] if end < len(piece) else []
        events: list[bytes] = []
        for line in lines.split(b"\n")[:-1]:
            self._take(line.removesuffix(b"\r"), events)
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line and self._data:
            events.append(b"\n".join(self._data))
            self._data = []
