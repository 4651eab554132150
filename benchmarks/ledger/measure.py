"""The `ledger` benchmark: its parts one after the other, and their figures by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from agentserve.boot import load_model_files
from agentserve.log import configure_log
from agentserve.settings import EngineSettings
from benchmarks.cases import CasesResult, run_cases
from benchmarks.ledger.agent import Tally
from benchmarks.ledger.disconnects import Disconnects, disconnect
from benchmarks.ledger.frozen_redis import NUM_SESSIONS, PAUSE_SECONDS, Frozen, freeze
from benchmarks.ledger.long_history import NUM_MESSAGES, Costs, measure_clients
from benchmarks.ledger.replays import BLOCK_SIZE, EVERY_TURN_SECONDS, Replayed, replay
from benchmarks.ledger.script import generate
from benchmarks.report import Options, Result, Row, percentile
from benchmarks.served_model import prepare

SHOWN_FAILURES = 5


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is done. Times in seconds."""

    sessions: int
    steps: int
    disconnects: int
    long_turns: int
    before_freeze: float
    frozen: float
    """0: Redis is not frozen."""


FULL = Amount(sessions=100, steps=50, disconnects=10_000, long_turns=100, before_freeze=30.0, frozen=30.0)
QUICK = Amount(sessions=8, steps=30, disconnects=270, long_turns=20, before_freeze=0.0, frozen=0.0)
SEED = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """What the parts found. `replays` are the clean one, the disturbed one, and one whose clocks change with every request."""

    long: Mapping[str, Costs]
    replays: tuple[Replayed, Replayed, Replayed]
    disconnects: Disconnects
    frozen: Frozen | None
    cases: CasesResult


def measure(options: Options) -> Result:
    """Everything in one run. A quick run counts the cases beside its other parts, but for the long histories, whose times would be theirs
    too; and it does not freeze Redis.
    """
    configure_log("error")
    folder, amount = options.cache_folder / "nano", QUICK if options.quick else FULL
    prepare(folder)
    with Progress(transient=True) as progress, ThreadPoolExecutor(1) as beside:
        long = measure_clients(folder, amount.long_turns)
        if options.quick:
            counting = beside.submit(run_cases, True)
        replays = _replays(folder, amount, progress)
        bar = progress.add_task("clients leave", total=amount.disconnects)
        left = asyncio.run(disconnect(folder, amount.disconnects, SEED, lambda: progress.advance(bar)))
        frozen = _frozen(folder, amount, progress)
        if not options.quick:
            counting = beside.submit(run_cases, False)
        progress.add_task("tests of the cases", total=None)
        cases = counting.result()
    return _result(Measured(long, replays, left, frozen, cases))


def _replays(folder: Path, amount: Amount, progress: Progress) -> tuple[Replayed, Replayed, Replayed]:
    tokenizer, chat = load_model_files(EngineSettings(), folder)
    scripts = [generate(SEED * 1000 + number, amount.steps) for number in range(amount.sessions)]

    def one(name: str, *, disturbed: bool, rhythm_seconds: float = 60.0) -> Replayed:
        bar = progress.add_task(f"sessions, {name}", total=len(scripts))
        done = lambda: progress.advance(bar)  # noqa: E731 - stands beside its bar
        return asyncio.run(replay(scripts, tokenizer, chat, disturbed=disturbed, rhythm_seconds=rhythm_seconds, done=done))

    clean, disturbed = one("as they are", disturbed=False), one("disturbed", disturbed=True)
    return clean, disturbed, one("disturbed every turn", disturbed=True, rhythm_seconds=EVERY_TURN_SECONDS)


def _frozen(folder: Path, amount: Amount, progress: Progress) -> Frozen | None:
    if not amount.frozen:
        return None
    seconds = amount.before_freeze + amount.frozen
    bar = progress.add_task("Redis stands still", total=NUM_SESSIONS * seconds / PAUSE_SECONDS)
    frozen = freeze(folder, before_seconds=amount.before_freeze, frozen_seconds=amount.frozen, done=lambda: progress.advance(bar))
    return asyncio.run(frozen)


def _share(part: int, whole: int) -> float:
    """NaN where there is nothing to take a share of: it is not 100 %."""
    return part / whole if whole else math.nan


def figures(measured: Measured) -> dict[str, float | None]:
    """By the names that the bars have. Shares of 1, points of percent; None: not measured in this run."""
    tally = _sum(measured.replays)
    clean, disturbed, every = (100 * replayed.hit_rate for replayed in measured.replays)
    left, frozen, cases = measured.disconnects.left, measured.frozen, measured.cases
    stops = measured.disconnects.stop_seconds
    known, moving, rewritten = (measured.long[name] for name in ("known bytes", "moving head", "rewritten"))
    return {
        "cases_total": cases.cases_total,
        "cases_passed": cases.cases_passed,
        "turns": tally.turns,
        "exact_share": _share(tally.exact, tally.unedited),
        "reserialised_exact_share": _share(tally.reserialised_exact, tally.reserialised),
        "edited_kept_share": _share(tally.edited_kept, tally.edited),
        "respelled_answer_share": min(replayed.respelled_share for replayed in measured.replays),
        "disturbed_hit_gap_points": clean - disturbed,
        "disturbed_every_turn_hit_gap_points": clean - every,
        "clean_hit_rate_percent": clean,
        "encoded_tokens_per_turn": tally.encoded_tokens / tally.continued,
        "new_tokens_per_turn": tally.new_tokens / tally.continued,
        "disconnects": measured.disconnects.total,
        "disconnects_missed": measured.disconnects.missed,
        "leaked_tickets": left.tickets,
        "leaked_tasks": left.tasks,
        "leaked_turns": left.turns,
        "leaked_descriptors": left.descriptors,
        "engine_requests_after": left.engine_requests,
        "engine_stop_p99_ms": 1000 * percentile(stops, 99),
        "engine_stop_max_ms": 1000 * max(stops),
        "parse_2000_messages_ms": max(known.added_milliseconds, moving.added_milliseconds),
        "parse_2000_messages_rewritten_ms": rewritten.added_milliseconds,
        "too_many_encoded_turns": sum(costs.too_many for costs in measured.long.values()) + len(tally.failures),
        "redis_frozen_turns": len(frozen.frozen_seconds) if frozen else None,
        "redis_frozen_failed": frozen.failed if frozen else None,
        "redis_frozen_inexact": frozen.inexact if frozen else None,
        "redis_frozen_added_p99_ms": frozen.added_p99_milliseconds if frozen else None,
    }


def _sum(replays: tuple[Replayed, ...]) -> Tally:
    tally = Tally()
    for replayed in replays:
        tally.add(replayed.tally)
    return tally


def _result(measured: Measured) -> Result:
    found = figures(measured)
    columns = ("figure",)
    rows = tuple(Row(name, {columns[0]: figure}) for name, figure in found.items())
    return Result("One ledger under everything that clients do", columns, rows, tuple(_notes(measured)), figures=found)


def _notes(measured: Measured) -> list[str]:
    long = measured.long["known bytes"]
    notes = [
        f"Turns: the same generated sessions three times, over an unlimited cache of blocks of {BLOCK_SIZE} tokens. Disturbed: what the "
        "canonicaliser moves changes each minute of the session's time, what it drops or orders with each request.",
        f"Histories: {long.num_messages:,} messages (from {NUM_MESSAGES:,} on), {long.prompt_tokens:,} tokens, {long.body_bytes:,} bytes; "
        f"a whole turn up to the engine, decoding included, takes "
        + ", ".join(f"{costs.whole_milliseconds:.1f} ms ({name})" for name, costs in measured.long.items())
        + ".",
        "Clients left: " + ", ".join(f"{count:,} {phase}" for phase, count in measured.disconnects.by_phase.items()) + ".",
    ]
    notes += [f"Not exact: {failure}" for failure in _sum(measured.replays).failures[:SHOWN_FAILURES]]
    cases = measured.cases
    labels = {"failed": cases.failed, "open": cases.open, "not run": cases.not_run}
    return notes + [f"Cases {name}: {', '.join(names)}" for name, names in labels.items() if names]
