"""`python -m replays.return_prior TRACES`: write `admission/return_prior.py`, the idle times of recorded sessions by return class.

Only sessions that are not held back are counted, each once however often it was recorded, so that what is measured on the others is
measured on sessions that the table has not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from admission.return_class import return_class
from admission.returns import NUM_BINS, bin_of
from replays.traces import Request, Session, Stream, TraceSet

TARGET = Path(__file__).parents[1] / "admission" / "return_prior.py"

_HEAD = '''"""Idle times of recorded sessions by return class: the prior of `admission.returns`.

Written by `python -m replays.return_prior TRACES` from {num_sessions} sessions of the public kv-cache-tester traces (Apache-2.0).
"""

from __future__ import annotations

# fmt: off
RETURN_PRIOR: dict[str, tuple[tuple[int, ...], int]] = {{
'''
_NOTE = '''}
# fmt: on
"""Class → (returns per age bin, idle times that never ended)."""
'''


def held_back(session: Session) -> bool:
    """Whether a session is kept out of every fit: half of them, by id."""
    return bool(crc32(session.id.encode()) & 1)


@dataclass(frozen=True, slots=True)
class Idle:
    """What followed a turn: the time until the stream's next one, None when there was none."""

    request: Request
    return_class: str
    gap_seconds: float | None


def idle_times(stream: Stream) -> Iterator[Idle]:
    """The idle times of a stream in order; the last has no end."""
    for position, request in enumerate(stream.requests):
        following = stream.requests[position + 1 :][:1]
        gap = max(following[0].start_seconds - request.end_seconds, 0.0) if following else None
        name = return_class(is_subagent=bool(stream.name), calls_tools=request.stop == "tool_use", ends_turn=request.stop == "end_turn")
        yield Idle(request, name, gap)


def distinct(sessions: Iterable[Session]) -> Iterator[Session]:
    """Each recording once: public corpora hold some under several names."""
    seen: set[tuple[tuple[float, int], ...]] = set()
    for session in sessions:
        key = tuple((request.start_seconds, request.num_prompt_tokens) for stream in session.streams for request in stream.requests)
        if key not in seen:
            seen.add(key)
            yield session


def count(sessions: Iterable[Session]) -> dict[str, tuple[list[int], int]]:
    """Class → (returns per age bin, never returned)."""
    table: dict[str, tuple[list[int], int]] = {}
    for session in sessions:
        for stream in session.streams:
            for idle in idle_times(stream):
                returned, never = table.setdefault(idle.return_class, ([0] * NUM_BINS, 0))
                if idle.gap_seconds is None or (index := bin_of(idle.gap_seconds)) == NUM_BINS:
                    table[idle.return_class] = (returned, never + 1)
                else:
                    returned[index] += 1
    return table


def module_text(table: dict[str, tuple[list[int], int]], num_sessions: int) -> str:
    """The Python module that holds the table, as the formatter would write it."""
    lines = [_HEAD.format(num_sessions=num_sessions)]
    for name in sorted(table):
        returned, never = table[name]
        half = NUM_BINS // 2
        rows = [f"        {', '.join(map(str, part))},\n" for part in (returned[:half], returned[half:])]
        lines.append(f'    "{name}": ((\n{"".join(rows)}    ), {never}),\n')
    return "".join([*lines, _NOTE])


def main(folder: Path) -> None:
    sessions = [session for session in distinct(TraceSet(folder).checked()) if not held_back(session)]
    TARGET.write_text(module_text(count(sessions), len(sessions)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
