"""Traces ready to be simulated: read, checked, and turned into scripts, over processes where there are many."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from replays.formats import Sessions, open_traces
from replays.plan import PlannedCall
from replays.row_faults import RowFaults, RowsReport
from replays.simulator.chains import Forest
from replays.simulator.scripts import Script, script_of
from replays.theoretical import TheoreticalHit
from replays.traces import Session, TraceError, TraceSet

_PARALLEL_FROM = 32
"""Sessions from which a second process pays."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is played. `name` is for people; `rows` are those of the traces that were left out, or are odd."""

    name: str
    scripts: tuple[Script, ...]
    rows: RowsReport = field(default_factory=RowsReport)

    @property
    def num_calls(self) -> int:
        return sum(len(script.plan.calls) for script in self.scripts)

    @property
    def has_clock(self) -> bool:
        """Whether its sessions have recorded arrivals."""
        return all(script.plan.session.has_clock for script in self.scripts)


@dataclass(frozen=True, slots=True)
class Reading:
    """How traces are read: by which format, for which block size, and whether clients send answers back as they were generated."""

    trace_format: str = "auto"
    block_size: int = 128
    echoes: bool = False


def read_workload(
    paths: Sequence[Path],
    reading: Reading,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    faults: RowFaults | None = None,
) -> Workload:
    """The sessions of all paths. `progress` hears how many sessions of how many are done, `faults` of bad rows (strict if none is given).

    Raises TraceError.
    """
    faults = faults or RowFaults(strict=True)
    opened = [open_traces(path, reading.trace_format, faults) for path in paths]
    total = sum(len(sessions) for sessions in opened)
    scripts: list[Script] = []
    for path, sessions in zip(paths, opened, strict=True):
        for script in _scripts(path, sessions, reading, jobs, faults):
            scripts.append(script)
            progress(len(scripts), total)
    playable = [script for script in scripts if script.plan.calls]
    if not playable:
        raise TraceError("no session has a call to play", path=paths[0])
    return Workload(", ".join(path.name for path in paths), tuple(playable), faults.report())


def _scripts(path: Path, sessions: Sessions, reading: Reading, jobs: int, faults: RowFaults) -> Iterator[Script]:
    if isinstance(sessions, TraceSet):
        yield from _separate(path, sessions, reading, jobs, faults)
    else:
        yield from _joined(path, list(sessions.checked()), reading)


def _separate(path: Path, sessions: TraceSet, reading: Reading, jobs: int, faults: RowFaults) -> Iterator[Script]:
    """Sessions that share nothing: each read and planned where there is a free process."""
    worker = _Separate(path, reading)
    if jobs > 1 and len(sessions) >= _PARALLEL_FROM:
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            yield from _distinct(pool.imap(worker, range(len(sessions)), chunksize=4), sessions, faults)
    else:
        yield from _distinct(map(worker, range(len(sessions))), sessions, faults)


def _distinct(scripts: Iterator[Script | TraceError | None], sessions: TraceSet, faults: RowFaults) -> Iterator[Script]:
    seen: set[str] = set()
    for index, script in enumerate(scripts):
        if isinstance(script, TraceError):
            faults.skip(script)
        elif script is not None:
            session = script.plan.session
            if session.id in seen:
                faults.skip(sessions.error(index, f"session id {session.id!r} is used twice", "id"))
                continue
            seen.add(session.id)
            if (odd := sessions.odd(index, session)) is not None:
                faults.flag(odd)
            yield script


class _Separate:
    """Reads one session by its number; None for one without calls, the error for a bad one. What it has opened stays in its process."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path = path
        self._reading = reading
        self._sessions: TraceSet | None = None

    def __getstate__(self) -> tuple[Path, Reading]:
        return self._path, self._reading

    def __setstate__(self, state: tuple[Path, Reading]) -> None:
        self._path, self._reading = state
        self._sessions = None

    def __call__(self, index: int) -> Script | TraceError | None:
        if self._sessions is None:
            self._sessions = TraceSet(self._path)
        try:
            session = self._sessions[index]
        except TraceError as error:
            return error
        return _script(session, self._reading, self._path) if session.root.requests else None


def _script(session: Session, reading: Reading, path: Path, forest: Forest | None = None) -> Script:
    try:
        return script_of(session, reading.block_size, forest=forest, echoes=reading.echoes)
    except ValueError as error:
        raise TraceError(str(error), path=path) from None


def _joined(path: Path, sessions: Sequence[Session], reading: Reading) -> Iterator[Script]:
    """Sessions whose ids mean the same in all of them: one forest, and a theoretical hit rate of the whole trace."""
    forest = Forest()
    theoretical = _theoretical(sessions)
    made = [_script(session, reading, path, forest) for session in sessions if session.root.requests]
    forest.seal()
    for script in made:
        hits = theoretical[script.plan.session.id]
        calls = tuple(_rated(call, hits) for call in script.plan.calls)
        yield replace(script, plan=replace(script.plan, calls=calls))


def _rated(call: PlannedCall, hits: dict[tuple[int, int], TheoreticalHit]) -> PlannedCall:
    return replace(call, theoretical=hits[call.stream, call.index])


def _theoretical(sessions: Sequence[Session]) -> dict[str, dict[tuple[int, int], TheoreticalHit]]:
    """By session, then by (stream, call): the leading run of its ids that any call before it named."""
    order = sorted(
        (request.start_seconds, session.id, stream, index)
        for session in sessions
        for stream, line in enumerate(session.streams)
        for index, request in enumerate(line.requests)
    )
    streams = {session.id: session.streams for session in sessions}
    seen: set[int] = set()
    found: dict[str, dict[tuple[int, int], TheoreticalHit]] = {session.id: {} for session in sessions}
    for _, name, stream, index in order:
        ids = streams[name][stream].requests[index].hash_ids.tolist()
        run = next((place for place, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids[run:])
        found[name][stream, index] = TheoreticalHit(run, len(ids))
    return found
