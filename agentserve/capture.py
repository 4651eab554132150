"""Captures every turn without its text, for `agentserve simulate` and `tune`: files of JSON lines, bounded and rotated.

A thread of its own names blocks and writes; a turn only hands over what it has. When the disk is full or slow, turns are left out of the
capture, counted, and served as ever. Blocks and sessions are named by keyed digests whose key dies with the process, so that nobody can
find out from a capture whether a text that he guesses was ever sent.
"""

from __future__ import annotations

import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
import structlog
import xxhash

from agentserve.errors import SetupError
from prefix_cache.blocks import BlockHash
from prefix_cache.captured import VERSION, CapturedEnd, CapturedTurn, CaptureHeader, IdDeltas

MAX_TOOL_NAME = 64
_MAX_QUEUED = 10_000
_RETRY_SECONDS = 30.0
_ID_MASK = (1 << 63) - 1
_PATTERN = "capture-*.jsonl"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Where, and how much: one file is at most about `file_bytes`, all together at most about `total_bytes`; the oldest goes first."""

    folder: Path
    file_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """What a turn hands over: everything of it but text. `turn`'s sessions are still names, and its ids are `blocks`."""

    turn: CapturedTurn
    blocks: Sequence[BlockHash]
    """Of the prompt's whole blocks."""


@dataclass(slots=True)
class CaptureCounts:
    """Turns and ends that are in a file, and those that are in none."""

    written: int = 0
    dropped: int = 0


@dataclass(eq=False)
class Capture:
    """Between `start` and `close`, what `turn` and `end` are given is written. Both return at once and raise nothing."""

    options: CaptureOptions
    block_size: int
    model: str
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    counts: CaptureCounts = field(default_factory=CaptureCounts)
    open_file: Callable[[Path], IO[bytes]] = lambda path: path.open("xb", buffering=0)

    def __post_init__(self) -> None:
        self._key = secrets.randbits(64)
        self._run = f"{secrets.randbits(32):08x}"
        self._deltas: IdDeltas[BlockHash] = IdDeltas(self._block_id)
        self._queue: queue.Queue[TurnFacts | CapturedEnd | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._write_all, name="capture", daemon=True)
        self._file: IO[bytes] | None = None
        self._path: Path | None = None
        self._num_bytes = 0
        self._num_files = 0
        self._retry_at = 0.0
        self._encoder = msgspec.json.Encoder()

    def start(self) -> None:
        """Raises SetupError when the folder cannot be written to."""
        try:
            self.options.folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise _unwritable(self.options.folder, error) from error
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, and stop."""
        self._queue.put(None)
        self._thread.join()
        self._close_file()

    @property
    def is_writing(self) -> bool:
        """False while the disk refuses."""
        return self._file is not None and self._thread.is_alive()

    def turn(self, facts: TurnFacts) -> None:
        """A turn has ended."""
        self._hand_over(facts)

    def end(self, session_id: str, namespace: str) -> None:
        """Somebody said that a session is over."""
        self._hand_over(CapturedEnd(session=namespaced(session_id, namespace), t=self.wall_clock()))

    def _hand_over(self, entry: TurnFacts | CapturedEnd) -> None:
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self.counts.dropped += 1

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                self._write(entry)
                self.counts.written += 1
            except OSError as error:
                self.counts.dropped += 1
                self._fail(error)

    def _write(self, entry: TurnFacts | CapturedEnd) -> None:
        if self._file is None:
            if self.clock() < self._retry_at:
                raise _StillFailing
            self._open()
        elif self._num_bytes >= self.options.file_bytes:
            self._close_file()
            self._open()
        self._append(self._encoder.encode(self._named(entry)) + b"\n")

    def _named(self, entry: TurnFacts | CapturedEnd) -> CapturedTurn | CapturedEnd:
        if isinstance(entry, CapturedEnd):
            session = self._session_id(entry.session)
            self._deltas.forget_session(session)
            return CapturedEnd(session=session, t=round(entry.t, 3))
        turn = entry.turn
        session = self._session_id(turn.session)
        kept, ids = self._deltas.add(session, entry.blocks)
        parent = None if turn.parent is None else self._session_id(turn.parent)
        return msgspec.structs.replace(turn, session=session, parent=parent, kept=kept, ids=ids)

    def _append(self, line: bytes) -> None:
        """The whole line or none of it: a part that a full disk took is cut off again."""
        assert self._file is not None
        number = self._file.write(line)
        if number != len(line):
            self._file.truncate(self._num_bytes)
            raise OSError("only a part of a line could be written")
        self._num_bytes += len(line)

    def _open(self) -> None:
        """A new file with its header; the oldest go while there are too many bytes. Files are read alone, so ids start anew."""
        self._prune()
        self._deltas.forget()
        now = datetime.now(UTC)
        self._num_files += 1
        name = f"capture-{now:%Y%m%dT%H%M%S}-{self._run}-{self._num_files:06d}.jsonl"
        self._path = self.options.folder / name
        self._file = self.open_file(self._path)
        self._num_bytes = 0
        header = CaptureHeader(
            version=VERSION, run=self._run, block_size=self.block_size, model=self.model, started=round(self.wall_clock(), 3)
        )
        self._append(self._encoder.encode(header) + b"\n")

    def _prune(self) -> None:
        files = sorted(self.options.folder.glob(_PATTERN))
        sizes = {file: file.stat().st_size for file in files}
        total = sum(sizes.values())
        for file in files:
            # Room for the file that is about to be opened.
            if total + self.options.file_bytes <= self.options.total_bytes:
                return
            file.unlink()
            total -= sizes[file]

    def _fail(self, error: OSError) -> None:
        if isinstance(error, _StillFailing):
            return
        _log.warning("capture_failed", folder=str(self.options.folder), error=error.strerror or str(error), retry_seconds=_RETRY_SECONDS)
        self._retry_at = self.clock() + _RETRY_SECONDS
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # what could be written has been; the reader leaves out a line that was cut off
                self._file.truncate(self._num_bytes)
            with suppress(OSError):
                self._file.close()
            if not self._num_bytes and self._path is not None:
                self._path.unlink(missing_ok=True)  # not even its header: each try would leave another
            self._file = None

    def _block_id(self, block: BlockHash) -> int:
        return xxhash.xxh3_64_intdigest(block, seed=self._key) & _ID_MASK

    def _session_id(self, name: str) -> str:
        return xxhash.xxh3_64_hexdigest(name.encode(), seed=self._key)


def check_folder(folder: Path) -> None:
    """Make the folder of a capture. Raises SetupError when it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error


def _unwritable(folder: Path, error: OSError) -> SetupError:
    return SetupError(f"--capture {str(folder)!r} cannot be written: {error.strerror or error}")


class _StillFailing(OSError):
    """The disk refused a moment ago; it is asked again later."""


def namespaced(session_id: str, namespace: str) -> str:
    """Sessions of different API keys are different, whatever their clients call them."""
    return f"{namespace}/{session_id}"


def stop_of(finish_reason: str) -> str:
    """The engine's or server's finish reason in the words of traces."""
    return {"tool_calls": "tool_use", "stop": "end_turn"}.get(finish_reason, finish_reason)
