"""`python -m replays.return_prior TRACES`: write `admission/return_prior.py`, the idle times of recorded sessions by return class.

The scores of `admission.pace` and `admission.last_turn` are written with them. Only sessions that are not held back are counted, each
once however often it was recorded, so that what is measured on the others is measured on sessions that the table has not seen. Plain
classes come from whole sessions. Those refined by pace and by a full context, and the scores, come from sessions as a model of
`CONTEXT_TOKENS` sees them, without requests that do not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from admission.last_turn import NUM_LEVELS, Course, TurnEnd
from admission.life_table import NUM_BINS, bin_of
from admission.pace import LEVELS, Pace
from admission.return_class import return_class, with_level
from admission.returns import ReturnModel
from replays.traces import Request, Session, Stream, TraceSet

TARGET = Path(__file__).parents[1] / "admission" / "return_prior.py"
CONTEXT_TOKENS = 262_144
LONG_SECONDS = 60.0
"""A score tells apart what is back within this from what is not."""

_LEAST_IDLE_TIMES = 200
_L2 = 3.0
_MAX_STEPS = 40
_FOLDS = 8

_HEAD = '''"""Idle times of recorded sessions by return class: the prior of `admission.returns`, and the scores of `pace` and `last_turn`.

Written by `python -m replays.return_prior TRACES` from {num_sessions} sessions of the public kv-cache-tester traces (Apache-2.0).
"""

from __future__ import annotations

# fmt: off
RETURN_PRIOR: dict[str, tuple[tuple[int, ...], int]] = {{
'''

Counts = dict[str, tuple[list[int], int]]
"""Class → (returns per age bin, never returned)."""
Scores = dict[str, tuple[list[float], list[float]]]
"""Class → (weights of `Pace.facts`, the two cuts between the levels)."""


@dataclass(frozen=True, slots=True)
class LastTurn:
    """Weights of `Course.facts`, the cuts between its levels, and each level's factor on the odds of an end."""

    weights: tuple[float, ...]
    cuts: tuple[float, ...]
    odds: tuple[float, ...]


def held_back(session: Session) -> bool:
    """Whether a session is kept out of every fit: half of them, by id."""
    return bool(crc32(session.id.encode()) & 1)


@dataclass(frozen=True, slots=True)
class Idle:
    """What followed a turn: the time until the stream's next one, None when there was none. `facts` are those of `Pace`."""

    request: Request
    return_class: str
    gap_seconds: float | None
    facts: tuple[float, ...]
    signs: tuple[float, ...]
    """Those of `Course`."""
    pace_class: str
    """The class refined by the weights in force."""
    level: int | None
    """Of the weights in force; None for a sub-agent."""

    @property
    def level_class(self) -> str:
        """The refined class at its level."""
        return with_level(self.pace_class, self.level)


def idle_times(stream: Stream) -> Iterator[Idle]:
    """The idle times of a stream in order; the last has no end."""
    pace, course = Pace(), Course()
    for position, request in enumerate(stream.requests):
        following = stream.requests[position + 1 :][:1]
        gap = max(following[0].start_seconds - request.end_seconds, 0.0) if following else None
        name = return_class(is_subagent=bool(stream.name), calls_tools=request.stop == "tool_use", ends_turn=request.stop == "end_turn")
        end = _end(request)
        pace.turn_ended(from_user=end.from_user)
        course.turn_ended(end)
        share = (request.num_prompt_tokens + request.num_output_tokens) / CONTEXT_TOKENS
        num_output = request.num_output_tokens
        level = None if stream.name else course.level(share)
        refined_class = pace.refine(name, num_output, share)
        yield Idle(request, name, gap, pace.facts(num_output), course.facts(share), refined_class, level)
        if gap is not None:
            pace.came_back(gap)
            course.came_back(gap)


def _end(request: Request) -> TurnEnd:
    return TurnEnd(
        ends_turn=request.stop == "end_turn",
        tools=("tool",) if request.stop == "tool_use" else (),
        from_user="text" in request.input_types,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
    )


def distinct(sessions: Iterable[Session]) -> Iterator[Session]:
    """Each recording once: public corpora hold some under several names."""
    seen: set[tuple[tuple[float, int], ...]] = set()
    for session in sessions:
        key = tuple((request.start_seconds, request.num_prompt_tokens) for stream in session.streams for request in stream.requests)
        if key not in seen:
            seen.add(key)
            yield session


def within(stream: Stream, context_tokens: int) -> Stream:
    """The stream without requests that a model of so many tokens refuses."""
    return replace(stream, requests=tuple(request for request in stream.requests if request.num_prompt_tokens <= context_tokens))


def count(idles: Iterable[tuple[str, float | None]]) -> Counts:
    """(class, gap) → counts; a gap past the last bin counts as never."""
    table: Counts = {}
    for name, gap in idles:
        returned, never = table.setdefault(name, ([0] * NUM_BINS, 0))
        if gap is None or (index := bin_of(gap)) == NUM_BINS:
            table[name] = (returned, never + 1)
        else:
            returned[index] += 1
    return table


def fit_scores(idles: Sequence[Idle]) -> Scores:
    """A logistic score for each class with enough idle times: log odds of more than `LONG_SECONDS`; the levels are its thirds."""
    scores: Scores = {}
    for name in sorted({idle.return_class for idle in idles}):
        own = [idle for idle in idles if idle.return_class == name]
        if len(own) >= _LEAST_IDLE_TIMES:
            facts = np.array([idle.facts for idle in own])
            weights = _logistic(facts, np.array([idle.gap_seconds is None or idle.gap_seconds > LONG_SECONDS for idle in own], float))
            cuts = np.quantile(facts @ weights, [1 / len(LEVELS), 2 / len(LEVELS)])
            scores[name] = ([round(float(weight), 4) for weight in weights], [round(float(cut), 4) for cut in cuts])
    return scores


def fit_last_turn(idles: Iterable[Idle], model: ReturnModel) -> LastTurn:
    """The score of an end among idle times of root sessions beyond `LONG_SECONDS`; the levels hold as many of them each.

    A level's factor is on what `model` expects by class alone. It comes from scores that were fitted without the sessions that they score.
    """
    roots = [idle for idle in idles if idle.level is not None]
    long = [idle for idle in roots if idle.gap_seconds is None or idle.gap_seconds > LONG_SECONDS]
    facts = np.array([idle.signs for idle in long], float)
    ends = np.array([idle.gap_seconds is None for idle in long], float)
    expected = np.array([1 - model.alive(idle.pace_class, LONG_SECONDS) for idle in long])
    weights = np.round(_logistic(facts, ends), 4)
    cuts = np.round(np.quantile(facts @ weights, np.arange(1, NUM_LEVELS) / NUM_LEVELS), 4)
    scores = np.empty(len(long))
    for part in np.array_split(np.arange(len(long)), _FOLDS):  # in the order of sessions, so that nearly all are in one part
        scores[part] = facts[part] @ _logistic(np.delete(facts, part, 0), np.delete(ends, part))
    levels = np.searchsorted(cuts, scores)
    odds = [_odds(ends[levels == level]) / _odds(expected[levels == level]) for level in range(NUM_LEVELS)]
    return LastTurn(tuple(map(float, weights)), tuple(map(float, cuts)), tuple(round(each, 4) for each in odds))


def _odds(chances: NDArray[np.float64]) -> float:
    return float((chances.sum() + 0.5) / (len(chances) - chances.sum() + 0.5))


def _logistic(facts: NDArray[np.float64], outcomes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Newton's method with an L2 penalty on all but the constant, which comes first."""
    penalty = np.full(facts.shape[1], _L2)
    penalty[0] = 1e-6
    weights = np.zeros(facts.shape[1])
    for _ in range(_MAX_STEPS):
        chance = 1 / (1 + np.exp(-facts @ weights))
        gradient = facts.T @ (chance - outcomes) + penalty * weights
        curvature = (facts * (chance * (1 - chance))[:, None]).T @ facts + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def module_text(table: Counts, scores: Scores, last: LastTurn, num_sessions: int) -> str:
    """The Python module that holds the table and the scores."""
    lines = [_HEAD.format(num_sessions=num_sessions)]
    for name in sorted(table):
        returned, never = table[name]
        half = NUM_BINS // 2
        rows = [f"        {', '.join(map(str, part))},\n" for part in (returned[:half], returned[half:])]
        lines.append(f'    "{name}": ((\n{"".join(rows)}    ), {never}),\n')
    lines.append('}\n"""Class → (returns per age bin, idle times that never ended)."""\n\n')
    for title, column, about in (("PACE_WEIGHTS", 0, "weights of `Pace.facts`"), ("PACE_CUTS", 1, "scores between its levels")):
        lines.append(f"{title}: dict[str, tuple[float, ...]] = {{\n")
        lines += [f'    "{name}": ({", ".join(map(str, row[column]))}),\n' for name, row in sorted(scores.items())]
        lines.append(f'}}\n"""Class → {about}."""\n\n')
    for title, values, about in (
        ("LAST_TURN_WEIGHTS", last.weights, "Weights of `Course.facts`"),
        ("LAST_TURN_CUTS", last.cuts, "Scores between its levels"),
        ("LAST_TURN_ODDS", last.odds, "By level: factor on the odds of an end"),
    ):
        lines.append(f'{title}: tuple[float, ...] = (\n    {", ".join(map(str, values))},\n)\n"""{about}."""\n\n')
    lines[-1] = lines[-1].removesuffix("\n") + "# fmt: on\n"
    return "".join(lines)


def refined(idles: Iterable[Idle], scores: Scores) -> Iterator[tuple[str, float | None]]:
    """Each idle time under its class refined by these scores, and under the one without `full`."""
    for idle in idles:
        fullness = ":full" if idle.pace_class.endswith(":full") else ""
        name = idle.return_class
        if name in scores:
            weights, cuts = scores[name]
            name = f"{name}:{LEVELS[sum(np.dot(idle.facts, weights) > cut for cut in cuts)]}"
            yield name, idle.gap_seconds
        if fullness:
            yield name + fullness, idle.gap_seconds


def main(folder: Path) -> None:
    sessions = [session for session in distinct(TraceSet(folder).checked()) if not held_back(session)]
    streams = [stream for session in sessions for stream in session.streams]
    whole = [idle for stream in streams for idle in idle_times(stream)]
    fitting = [idle for stream in streams for idle in idle_times(within(stream, CONTEXT_TOKENS))]
    scores = fit_scores(fitting)
    table = count((idle.return_class, idle.gap_seconds) for idle in whole) | count(refined(fitting, scores))
    TARGET.write_text(module_text(table, scores, fit_last_turn(fitting, ReturnModel(prior=table)), len(sessions)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
