"""The text-free record of a turn: how it stands in a capture's file, and how its block ids are kept short. No I/O.

A file is JSON lines: one `CaptureHeader`, then turns and ends in the order in which they came. A prompt's blocks are named by ids, equal
where the blocks are equal within one run; a turn writes only the ids that differ from the session's turn before it in the same file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Annotated, Generic, TypeAlias, TypeVar

from msgspec import Meta, Struct

VERSION = 1
MAX_SESSIONS = 20_000
"""Sessions whose latest ids are remembered; the next turn of another writes all of its ids."""

Count: TypeAlias = Annotated[int, Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0)]


class CaptureHeader(Struct, tag_field="kind", tag="capture", omit_defaults=True, kw_only=True):
    """The first line of a file. `run` names the server's run: ids of one run mean nothing in another. `started` in Unix seconds."""

    version: int
    run: str
    block_size: Annotated[int, Meta(gt=0)]
    model: str
    started: float


class CapturedTurn(Struct, tag_field="kind", tag="turn", omit_defaults=True, kw_only=True):
    """One turn. Sessions are named by digests. `t` is when it was asked, Unix seconds; None is not known."""

    session: str
    parent: str | None = None
    t: float
    seconds: Seconds
    """From the request to the end."""
    wait: Seconds = 0.0
    """Of these, for a ticket."""
    ttft: Seconds | None = None
    """From the request to the first generated token."""
    num_prompt_tokens: Count
    num_output_tokens: Count
    num_cached_tokens: Count | None = None
    """What the engine took from its cache."""
    kept: Count = 0
    """Leading blocks that are those of the session's turn before it in this file."""
    ids: list[int] = []
    """Of the whole blocks behind those."""
    stop: str = ""
    """`tool_use`, `end_turn`, or the engine's own finish reason."""
    tools: list[str] = []
    """Names of the tools that the answer called."""
    relation: str = ""
    """How the prompt relates to what its session had before (a turn's kind)."""


class CapturedEnd(Struct, tag_field="kind", tag="end", omit_defaults=True, kw_only=True):
    """Somebody said that a session is over."""

    session: str
    t: float


CaptureLine: TypeAlias = CaptureHeader | CapturedTurn | CapturedEnd
Key = TypeVar("Key", bound=Hashable)


class IdDeltas(Generic[Key]):
    """Writes ids as differences. `name` gives the id of a block that is known by a key; keys are compared, ids are not."""

    def __init__(self, name: Callable[[Key], int], max_sessions: int = MAX_SESSIONS) -> None:
        self._name = name
        self._max_sessions = max_sessions
        self._latest: OrderedDict[str, Sequence[Key]] = OrderedDict()

    def add(self, session: str, blocks: Sequence[Key]) -> tuple[int, list[int]]:
        """(blocks kept of the session's turn before, ids of the others). Changes state."""
        before = self._latest.pop(session, blocks[:0])
        kept = num_equal(before, blocks)
        self._latest[session] = blocks
        if len(self._latest) > self._max_sessions:
            self._latest.popitem(last=False)
        return kept, [self._name(block) for block in blocks[kept:]]

    def forget(self) -> None:
        """A new file begins: it must be readable without the others."""
        self._latest.clear()

    def forget_session(self, session: str) -> None:
        self._latest.pop(session, None)


def num_equal(left: Sequence[Key], right: Sequence[Key]) -> int:
    """Length of the common front."""
    shared = min(len(left), len(right))
    if left[:shared] == right[:shared]:
        return shared
    return next((index for index in range(shared) if left[index] != right[index]), shared)


class IdSums:
    """Reads what `IdDeltas` wrote."""

    def __init__(self) -> None:
        self._latest: dict[str, list[int]] = {}

    def add(self, turn: CapturedTurn) -> list[int]:
        """All ids of a turn's prompt. Raises ValueError when the turn before it had fewer blocks than it keeps."""
        before = self._latest.get(turn.session, [])
        if turn.kept > len(before):
            raise ValueError(f"keeps {turn.kept} blocks of a turn that had {len(before)}")
        self._latest[turn.session] = ids = before[: turn.kept] + turn.ids
        return ids
